/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a rank's torch.save file of sharded tensors: what is accepted has all its bytes. */
#include "fuzz.h"

#include "format/torch/piece.h"

static void check_piece(struct ckpt_source *s, const struct ckpt_rank_piece *p)
{
    struct ckpt_axis axis[CKPT_MAX_RANK];
    struct ckpt_err err = {0};
    unsigned char byte;
    uint64_t end;

    MUST(p->rank <= CKPT_MAX_RANK && p->box.rank == p->rank);
    MUST(ckpt_box_within(&p->box, p->dim, p->rank));
    if (ckpt_box_numel(&p->box) == 0)
        return;
    for (uint32_t d = 0; d < p->rank; d++)
        axis[d] = (struct ckpt_axis){.n = p->box.n[d], .src = p->stride[d]};
    MUST(ckpt_piece_src_end(axis, p->rank, p->off, ckpt_dtype_size(p->dtype), &end));
    MUST(end <= s->size && ckpt_source_pread(s, &byte, 1, end - 1, &err) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ckpt_rank_pieces pieces = {0};
    struct ckpt_source *s = NULL;
    struct ckpt_err err = {0};

    MUST(ckpt_source_mem_new("input", data, size, &s, &err) == 0);
    if (ckpt_rank_pieces_read(s, 1, &pieces, &err) == 0) {
        for (size_t i = 0; i < pieces.piece.len; i++)
            check_piece(s, &pieces.piece.ptr[i]);
    } else {
        check_err(&err);
    }
    ckpt_rank_pieces_release(&pieces);
    ckpt_source_unref(s);
    return 0;
}
