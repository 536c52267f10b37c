/* SPDX-License-Identifier: Apache-2.0 */
/* The sandbox limits what the daemon can do once it reads untrusted files, even if one of them
 * takes control of it. Landlock denies opening anything except, for reading, the run, the base
 * model and the targets of their links at mount time (ckpt_options_places); it also denies TCP, and
 * signals to other processes. seccomp denies running programs, creating processes and sockets,
 * tracing, mounting, and changing owners, modes or settings of the system. Both are permanent and
 * hold for all threads that are started later. A step that later links to another place cannot be
 * opened; the error says why. */
#pragma once

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

#include "mount/config.h"

struct ckptfs_sandbox {
    unsigned landlock; /* version of the kernel's Landlock interface; 0: files are not confined */
    bool seccomp;
};

/* Confine the calling thread. Call it after privileges were dropped and no_new_privs was set, and
 * before other threads are started. Protections that the kernel lacks are left out; *ret says which
 * are in force. */
int ckptfs_sandbox_enter(const struct ckptfs_config *config, struct ckptfs_sandbox *ret,
                         struct ckpt_err *err);

/* Describe the sandbox: "landlock 7, seccomp", "seccomp" or "none". Returns buf or a static string.
 */
const char *ckptfs_sandbox_text(const struct ckptfs_sandbox *s, char *buf, size_t cap);

/* If the sandbox may be the reason why a file that exists could not be opened, say so in the error.
 */
void ckptfs_sandbox_explain(const struct ckptfs_sandbox *s, struct ckpt_err *err);

/* Drop the privileges that the daemon does not need, before it reads the first byte
 * of a checkpoint and before any other thread is started. It keeps its user id (only root may be
 * able to read the run) and CAP_DAC_READ_SEARCH (the run may belong to another user). Mounts are
 * changed by the mounter process (mounter.h). no_new_privs makes this final: no program that is
 * executed can regain a privilege. */
int ckptfs_privilege_drop(struct ckpt_err *err);
