/* SPDX-License-Identifier: Apache-2.0 */
/* Running n independent tasks on a few threads. */
#pragma once

#include <stddef.h>

#include "base/err.h"

/* Call fn(ctx, i, err) for i in [0, n), on at most nthread threads (0: a number that suits waiting
 * for storage). The failure with the lowest i is reported, whatever the timing; items after it may
 * be skipped, items before it are all done. Threads are joined before it returns. */
int ckpt_parallel(size_t n, unsigned nthread, int (*fn)(void *ctx, size_t i, struct ckpt_err *err),
                  void *ctx, struct ckpt_err *err);

/* From now on, 0 means n threads: more where storage is behind a network, where each request takes
 * long, and many are answered at once. */
void ckpt_parallel_default(unsigned n);
