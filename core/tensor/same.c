/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing two tensors by dtype and shape, by their pieces, then by samples of their bytes. */
#include "tensor/same.h"

#include <string.h>

#include "base/err.h"
#include "io/source.h"
#include "tensor/read.h"
#include "tensor/value.h"

enum { PLACES = 16, PLACE_BYTES = 256 };

static bool same_piece(const struct ckpt_tensor *s, const struct ckpt_tensor *t, size_t i)
{
    const struct ckpt_piece *a = &s->piece[i], *b = &t->piece[i];

    return a->dst == b->dst && a->src == b->src && a->naxis == b->naxis &&
           memcmp(a->axis, b->axis, a->naxis * sizeof *a->axis) == 0 &&
           ckpt_source_same(s->cat->sources.ptr[a->source], t->cat->sources.ptr[b->source]);
}

static bool same_kind(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->dtype == b->dtype && a->rank == b->rank && a->ranks == b->ranks &&
           memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0;
}

int ckpt_tensor_same_kind(const struct ckpt_tensor *a, const char *in_a,
                          const struct ckpt_tensor *b, const char *in_b, struct ckpt_err *err)
{
    char x[CKPT_SHAPE_TEXT], y[CKPT_SHAPE_TEXT];

    if (same_kind(a, b))
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT, "'%s' is %s %s in %s, and %s %s in %s", a->name,
                     ckpt_dtype_name(a->dtype), ckpt_shape_text(a->dim, a->rank, x, sizeof x), in_a,
                     ckpt_dtype_name(b->dtype), ckpt_shape_text(b->dim, b->rank, y, sizeof y),
                     in_b);
}

bool ckpt_tensor_unchanged(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    const struct ckpt_value *v = a->value, *w = b->value;
    bool same = same_kind(a, b) && !v == !w && a->npiece == b->npiece;

    for (size_t i = 0; same && i < a->npiece; i++)
        same = same_piece(a, b, i);
    if (same && v)
        same = v->ops == w->ops && v->narg == w->narg &&
               memcmp(v->param, w->param, sizeof v->param) == 0;
    for (uint32_t i = 0; same && v && i < v->narg; i++)
        same = ckpt_tensor_unchanged(v->arg[i], w->arg[i]);
    return same;
}

int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err)
{
    const uint64_t nbytes = ckpt_tensor_nbytes(a);
    const size_t len = nbytes < PLACE_BYTES ? (size_t)nbytes : PLACE_BYTES;
    bool same = same_kind(a, b);

    if (same && !ckpt_tensor_unchanged(a, b))
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
