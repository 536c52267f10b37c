/* SPDX-License-Identifier: Apache-2.0 */
/* Limiting what this process can do, for good: Landlock for files and TCP ports, seccomp for system
 * calls. What is confined is the calling thread, and threads that it starts later. */
#pragma once

#include <stdbool.h>

#include "base/err.h"

#ifdef __SANITIZE_ADDRESS__
#define CKPT_LEAKS_ARE_LOOKED_FOR true /* LeakSanitizer traces this process at exit */
#else
#define CKPT_LEAKS_ARE_LOOKED_FOR false
#endif

/* The version of the kernel's Landlock; 0: it has none. From 4 on it limits TCP. */
unsigned ckpt_landlock_version(void);

/* Begin a set of rules, which denies all that is not allowed below: a descriptor. */
int ckpt_landlock_begin(unsigned version, int *ret_rules, struct ckpt_err *err);

/* Allow reading the file `path`, or everything below the directory. A path that does not exist
 * needs no rule. 0, or -1 and errno. */
int ckpt_landlock_allow(int rules, const char *path);

/* Allow connecting to a TCP port. */
int ckpt_landlock_port(int rules, unsigned port);

/* Put the rules into force. no_new_privs must be set. */
int ckpt_landlock_enter(int rules, struct ckpt_err *err);

/* Deny running programs, creating processes, tracing, mounting, serving on sockets, changing
 * owners, modes or settings of the system; and connecting, unless `connects`. False: the kernel has
 * no filters, or the architecture is not known. */
bool ckpt_seccomp_enter(bool connects);
