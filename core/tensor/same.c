/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing two tensors by their pieces, then by samples of their bytes. */
#include "tensor/same.h"

#include <string.h>

#include "tensor/read.h"

enum { PLACES = 16, PLACE_BYTES = 256 };

static bool same_piece(const struct ckpt_piece *a, const struct ckpt_piece *b)
{
    return a->dst == b->dst && a->src == b->src && a->source == b->source && a->naxis == b->naxis &&
           memcmp(a->axis, b->axis, a->naxis * sizeof *a->axis) == 0;
}

static bool same_pieces(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    if (a->value || b->value || a->npiece != b->npiece)
        return false;
    for (size_t i = 0; i < a->npiece; i++)
        if (!same_piece(&a->piece[i], &b->piece[i]))
            return false;
    return true;
}

static bool same_kind(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->dtype == b->dtype && a->rank == b->rank && a->ranks == b->ranks &&
           memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0;
}

int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err)
{
    const uint64_t nbytes = ckpt_tensor_nbytes(a);
    const size_t len = nbytes < PLACE_BYTES ? (size_t)nbytes : PLACE_BYTES;
    bool same = same_kind(a, b);

    if (same && !same_pieces(a, b))
        for (unsigned i = 0; i < PLACES && same && len; i++) {
            unsigned char x[PLACE_BYTES], y[PLACE_BYTES];
            const uint64_t off = (nbytes - len) / (PLACES - 1) * i;
            const uint64_t at = i == PLACES - 1 ? nbytes - len : off;
            struct ckpt_reading rd = {0};
            if (ckpt_tensor_pread(a, &rd, x, len, at, err) < 0 ||
                ckpt_tensor_pread(b, &rd, y, len, at, err) < 0)
                return -1;
            same = memcmp(x, y, len) == 0;
        }
    *ret_same = same;
    return 0;
}
