/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of tensors. */
#include "format/dcp/rows.h"

#include <inttypes.h>

#include "base/ckd.h"

enum { MOST_PARTS = 1 << 25 };

static uint64_t rows_in(const struct ckpt_tensor *t) { return t->rank ? t->dim[0] : 1; }

/* The first row of a rank. */
static uint64_t first_row(uint64_t rows, uint32_t rank, uint32_t ranks)
{
    const uint64_t each = rows / ranks + (rows % ranks > 0);

    return each && rank > rows / each ? rows : ckpt_min_u64(each * rank, rows);
}

bool ckpt_rows_of(const struct ckpt_tensor *t, uint32_t rank, uint32_t ranks, struct ckpt_rows *ret)
{
    const uint64_t rows = rows_in(t), lo = first_row(rows, rank, t->rank ? ranks : 1),
                   hi = first_row(rows, rank + 1, t->rank ? ranks : 1);
    const uint64_t size = rows ? ckpt_tensor_nbytes(t) / rows : 0;

    if (rank > 0 && (t->rank == 0 || (lo == rows && first_row(rows, rank - 1, ranks) == rows)))
        return false;
    *ret = (struct ckpt_rows){
        .tensor = t, .lo = lo, .n = hi - lo, .from = lo * size, .len = (hi - lo) * size};
    return true;
}

void ckpt_rows_dim(const struct ckpt_rows *r, uint64_t dim[CKPT_MAX_RANK],
                   uint64_t off[CKPT_MAX_RANK])
{
    for (uint32_t d = 0; d < r->tensor->rank; d++) {
        dim[d] = d ? r->tensor->dim[d] : r->n;
        off[d] = d ? 0 : r->lo;
    }
}

bool ckpt_rows_whole(const struct ckpt_rows *r) { return r->n == rows_in(r->tensor); }

int ckpt_rows_count(const struct ckpt_catalog *cat, uint32_t ranks, size_t *ret,
                    struct ckpt_err *err)
{
    const uint64_t n = (uint64_t)cat->tensors.len * ranks; /* both fit 32 bits */

    if (n > MOST_PARTS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "option ranks: %zu tensors cut for %" PRIu32
                         " ranks are more than %d parts",
                         cat->tensors.len, ranks, MOST_PARTS);
    *ret = (size_t)n;
    return 0;
}
