/* SPDX-License-Identifier: Apache-2.0 */
/* Taking ranges of elements from a buffer. */
#include "format/deepspeed/flat.h"

#include <inttypes.h>

#include "base/ckd.h"

void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b) { ckpt_vec_release(&b->stretch); }

int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err)
{
    const struct ckpt_ds_stretch s = {b->n, {.n = n, .off = off, .source = source}};

    if (n == 0)
        return 0;
    if (b->stretch.len && dtype != b->dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "one rank's part is %s, another's %s",
                         ckpt_dtype_name(b->dtype), ckpt_dtype_name(dtype));
    b->dtype = dtype;
    if (ckd_add(&b->n, b->n, n))
        return ckpt_fail(err, CKPT_FORMAT, "a buffer would be larger than any file");
    return ckpt_vec_push(&b->stretch, s) < 0 ? ckpt_nomem(err) : 0;
}

/* Find the part of the buffer with element `at`. */
static size_t find(const struct ckpt_ds_buffer *b, uint64_t at)
{
    size_t lo = 0, hi = b->stretch.len;

    while (hi - lo > 1) {
        const size_t mid = lo + (hi - lo) / 2;
        if (b->stretch.ptr[mid].begin <= at)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err)
{
    if (at > b->n || n > b->n - at)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "it needs elements %" PRIu64 "..%" PRIu64
                         " of a buffer of which the files hold %" PRIu64,
                         at, at + n, b->n);
    for (size_t i = find(b, at); n; i++) {
        const struct ckpt_ds_stretch *s = &b->stretch.ptr[i];
        const uint64_t skip = at - s->begin, len = ckpt_min_u64(n, s->at.n - skip);
        if (ckpt_ds_parts_extend(p, s->at.source, s->at.off + skip * ckpt_dtype_size(b->dtype), len,
                                 err) < 0)
            return -1;
        at += len;
        n -= len;
    }
    return 0;
}
