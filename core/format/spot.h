/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a few elements that two files should have in common: if they differ, the files are of
 * different saves. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/source.h"
#include "tensor/dtype.h"

/* Elements of a dtype that lie one behind the other at byte `off` of a source. */
struct ckpt_spot {
    struct ckpt_source *source;
    enum ckpt_dtype dtype;
    uint64_t off;
};

/* No more bytes than this of either file are compared in one call. */
enum { CKPT_SPOT_BYTES = 1024 };

/* Compare n elements: *ret is the number of the first that differs, n if none does. Elements of one
 * dtype are equal if their bytes are. Of two dtypes, which are castable, a is rounded to b's, and a
 * NaN is equal to any NaN. */
int ckpt_spot_compare(const struct ckpt_spot *a, const struct ckpt_spot *b, size_t n, size_t *ret,
                      struct ckpt_err *err);
