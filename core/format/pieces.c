/* SPDX-License-Identifier: Apache-2.0 */
/* Collecting the pieces of a tensor. */
#include "format/pieces.h"

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
