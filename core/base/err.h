/* SPDX-License-Identifier: Apache-2.0 */
/* Filling a struct ckpt_err: fail once, then prefix context on the way up.
 *
 * Every function here accepts err == NULL and returns -1, so that callers can `return
 * ckpt_fail(...)`. Texts are made printable: control bytes and broken UTF-8 that came from a
 * checkpoint are shown as \xNN. */
#pragma once

#include <ckptfs/err.h>

/* Record an error unless one is recorded already. Always returns -1. */
int ckpt_fail(struct ckpt_err *err, enum ckpt_code code, const char *fmt, ...) CKPT_PRINTF(3, 4);

/* Fills err as ckpt_fail does, for a failed system call: appends strerror(errnum). ENOENT and
 * ENOTDIR are MISSING, ENOMEM is NOMEM, ESTALE is STALE, the rest is IO. */
int ckpt_fail_errno(struct ckpt_err *err, int errnum, const char *fmt, ...) CKPT_PRINTF(3, 4);

/* Record an error that was collected in a struct of its own, as it is. Always returns -1. */
int ckpt_err_move(struct ckpt_err *err, const struct ckpt_err *own);

/* Record that memory ran out (NOMEM). Always returns -1. */
int ckpt_nomem(struct ckpt_err *err);

/* Put "context: " before the recorded text. Always returns -1. */
int ckpt_err_in(struct ckpt_err *err, const char *fmt, ...) CKPT_PRINTF(2, 3);
