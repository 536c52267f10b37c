/* SPDX-License-Identifier: Apache-2.0 */
/* Collecting the pieces of a tensor. */
#include "format/pieces.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

void ckpt_pieces_release(struct ckpt_pieces *p)
{
    ckpt_vec_release(&p->box);
    ckpt_vec_release(&p->draft);
}

int ckpt_pieces_add(struct ckpt_pieces *p, const uint64_t *dim, const struct ckpt_box *box,
                    uint32_t source, uint64_t off, const uint64_t *stride, struct ckpt_err *err)
{
    struct ckpt_piece_draft *d;

    if (ckpt_box_numel(box) == 0)
        return 0;
    if (ckpt_vec_push(&p->box, *box) < 0 || ckpt_vec_add(&p->draft, &d) < 0)
        return ckpt_nomem(err);
    ckpt_piece_from_box(dim, box, source, off, stride, d);
    return 0;
}

size_t ckpt_pair_clip(const struct ckpt_box_pair *pair, const uint64_t *local_dim, uint64_t lo,
                      uint64_t hi, struct ckpt_box_pair out[CKPT_MAX_SPANS])
{
    const uint32_t rank = pair->local.rank;
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t stride[CKPT_MAX_RANK], first = 0;

    if (ckpt_box_numel(&pair->local) == 0)
        return 0;
    ckpt_shape_strides(local_dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++)
        first += pair->local.lo[d] * stride[d];
    if (hi <= first)
        return 0;
    size_t n =
        ckpt_axes_clip(pair->local.n, stride, rank, lo > first ? lo - first : 0, hi - first, span);
    for (size_t i = 0; i < n; i++) {
        out[i].local.rank = out[i].global.rank = rank;
        for (uint32_t d = 0; d < rank; d++) {
            out[i].local.lo[d] = pair->local.lo[d] + span[i].lo[d];
            out[i].global.lo[d] = pair->global.lo[d] + span[i].lo[d];
            out[i].local.n[d] = out[i].global.n[d] = span[i].n[d];
        }
    }
    return n;
}

int ckpt_pieces_add_part(struct ckpt_pieces *p, const uint64_t *dim,
                         const struct ckpt_box_pair *pair, const uint64_t *local_dim, uint64_t lo,
                         uint64_t hi, uint32_t source, uint64_t off, const uint64_t *stride,
                         struct ckpt_err *err)
{
    struct ckpt_box_pair clip[CKPT_MAX_SPANS];
    const size_t n = ckpt_pair_clip(pair, local_dim, lo, hi, clip);

    for (size_t i = 0; i < n; i++) {
        uint64_t at = off;
        for (uint32_t d = 0; d < pair->local.rank; d++)
            at += clip[i].local.lo[d] * stride[d];
        if (ckpt_pieces_add(p, dim, &clip[i].global, source, at, stride, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_pieces_cover(const struct ckpt_pieces *p, const struct ckpt_catalog *cat,
                      const uint64_t *dim, uint32_t rank, bool *ret_gap, struct ckpt_err *err)
{
    size_t bad;

    *ret_gap = false;
    if (ckpt_boxes_cover(dim, rank, p->box.ptr, p->box.len, &bad, err) == 0)
        return 0;
    *ret_gap = bad == SIZE_MAX;
    if (*ret_gap)
        return -1;
    ckpt_cleanup(ckpt_freep) char *name =
        ckpt_source_name(cat->sources.ptr[p->draft.ptr[bad].source]);
    return ckpt_err_in(err, "'%s' overlaps another file", name ? name : "?");
}

int ckpt_pieces_catalog(const struct ckpt_pieces *p, struct ckpt_catalog *cat, const char *name,
                        enum ckpt_dtype dtype, const uint64_t *dim, uint32_t rank,
                        struct ckpt_err *err)
{
    size_t index;

    return ckpt_catalog_add(cat, name, dtype, dim, rank, &index, err) < 0
               ? -1
               : ckpt_catalog_set_pieces(cat, index, p->draft.ptr, p->draft.len, err);
}

/* ---- a few elements ---- */

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
