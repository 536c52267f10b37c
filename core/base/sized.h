/* SPDX-License-Identifier: Apache-2.0 */
/* Public structs that a caller allocates. They begin with `size_t size`, which the caller sets to
 * sizeof its struct, so that a program and a library that know different members can be used
 * together. */
#pragma once

#include <stddef.h>

#include <ckptfs/err.h>

/* Copy to a caller's struct, after its size, as much of our own struct of len bytes as it has room
 * for. USAGE: its size is 0, or not more than the size's own, so that the caller has forgotten to
 * set it. `name` is the struct's name. */
int ckpt_sized_give(void *theirs, const void *own, size_t len, const char *name,
                    struct ckpt_err *err);

/* Checks, before there is anything to give, that the caller has set the size. */
int ckpt_sized_check(const void *theirs, const char *name, struct ckpt_err *err);

/* Copy a caller's struct to our own of len bytes, whose members beyond it stay as they are. USAGE:
 * its size is 0, or greater than len, so that it may have members which this library does not know.
 * `name` is the struct's name. */
int ckpt_sized_take(void *own, size_t len, const void *theirs, const char *name,
                    struct ckpt_err *err);
