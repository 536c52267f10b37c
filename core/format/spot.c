/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a few elements. */
#include "format/spot.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

static bool is_nan(const unsigned char *bytes, enum ckpt_dtype dtype)
{
    double wide;

    ckpt_dtype_cast(&wide, CKPT_F64, bytes, dtype, 1);
    return wide != wide;
}

int ckpt_spot_compare(const struct ckpt_spot *a, const struct ckpt_spot *b, size_t n, size_t *ret,
                      struct ckpt_err *err)
{
    unsigned char stored[CKPT_SPOT_BYTES], rounded[CKPT_SPOT_BYTES], other[CKPT_SPOT_BYTES];
    const size_t from = ckpt_dtype_size(a->dtype), esize = ckpt_dtype_size(b->dtype);
    const bool cast = a->dtype != b->dtype;
    size_t i = 0;

    assert(n * from <= sizeof stored && n * esize <= sizeof other);
    if (ckpt_source_pread(a->source, stored, n * from, a->off, err) < 0 ||
        ckpt_source_pread(b->source, other, n * esize, b->off, err) < 0)
        return -1;
    if (cast)
        ckpt_dtype_cast(rounded, b->dtype, stored, a->dtype, n);
    const unsigned char *p = cast ? rounded : stored, *q = other;
    while (i < n &&
           (memcmp(p, q, esize) == 0 || (cast && is_nan(p, b->dtype) && is_nan(q, b->dtype)))) {
        i++;
        p += esize;
        q += esize;
    }
    *ret = i;
    return 0;
}
