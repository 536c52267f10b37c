/* SPDX-License-Identifier: Apache-2.0 */
/* What both programs need around the public API: filling an error, owning locals, a growing text.
 */
#ifndef CKPT_FS_FAIL_H
#define CKPT_FS_FAIL_H

#include <stdbool.h>
#include <stddef.h>

#include <ckptfs/ckptfs.h>

#define CKPTFS_CLEANUP(fn) __attribute__((cleanup(fn)))

/* free() and the API's destructors for CKPTFS_CLEANUP; each takes the address of the variable. */
void ckptfs_freep(void *p);
void ckptfs_closep(int *fd);
void ckptfs_viewp(struct ckpt_view **view);

/* Record an error unless one is recorded already. Always returns -1. */
int ckptfs_fail(struct ckpt_err *err, enum ckpt_code code, const char *fmt, ...) CKPT_PRINTF(3, 4);

/* The same for a failed system call: appends strerror(errnum); its code is IO, MISSING or NOMEM. */
int ckptfs_fail_errno(struct ckpt_err *err, int errnum, const char *fmt, ...) CKPT_PRINTF(3, 4);
int ckptfs_nomem(struct ckpt_err *err);

/* A malloc'ed formatted text, or NULL. */
char *ckptfs_text(const char *fmt, ...) CKPT_PRINTF(1, 2);

#endif
