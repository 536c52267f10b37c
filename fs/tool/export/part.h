/* SPDX-License-Identifier: Apache-2.0 */
/* Which part of an export this process writes: all of it, the part that --part names, or the part
 * that its launcher (mpirun, srun) made it. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/err.h>

struct ckpt_part {
    uint32_t index, count; /* index counts from 0 */
    const char *launcher;  /* the variable of the environment that says so, static storage; NULL: a
                              person does, and nobody waits for the other parts */
};

/* Find the part. `given` is the value of --part ("I/N", I from 1) or NULL; `alone`: all of it, and
 * the environment is not asked. USAGE: the text or the environment is not understood. */
int ckpt_part_find(const char *given, bool alone, struct ckpt_part *ret, struct ckpt_err *err);
