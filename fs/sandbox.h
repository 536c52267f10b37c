/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon cannot do once it reads files that nobody vouches for, even if one of them takes
 * it over.
 *
 * Landlock: open anything but the run, the base and where their links led at mount time
 * (ckpt_options_places), for reading; TCP; signals to other processes. seccomp: run programs, make
 * processes and sockets, trace, mount, change owners, modes and the system's settings. Both last,
 * and hold for all threads that are started later. A step that links to another place later can't
 * be opened; the error says why. */
#ifndef CKPT_FS_SANDBOX_H
#define CKPT_FS_SANDBOX_H

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

#include "cmdline.h"

struct ckptfs_sandbox {
    unsigned landlock; /* version of the kernel's interface; 0: files are not confined */
    bool seccomp;
};

/* Confine this thread. After privileges were dropped and no_new_privs was set, before other threads
 * are started. What the kernel lacks is left out, and told in *ret. */
int ckptfs_sandbox_enter(const struct ckptfs_config *config, struct ckptfs_sandbox *ret,
                         struct ckpt_err *err);

/* "landlock 7, seccomp", "seccomp", "none". A static text, or of buf. */
const char *ckptfs_sandbox_text(const struct ckptfs_sandbox *s, char *buf, size_t cap);

/* Add to an error why a file that is there could not be opened, if that may be the reason. */
void ckptfs_sandbox_explain(const struct ckptfs_sandbox *s, struct ckpt_err *err);

#endif
