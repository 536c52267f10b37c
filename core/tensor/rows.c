/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a matrix, and then the rows that are replaced in it. */
#include "tensor/rows.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "tensor/read.h"
#include "tensor/value.h"

struct rows {
    struct ckpt_value value;
    const struct ckpt_tensor *arg[2];
    struct ckpt_tensor operand[2]; /* the matrix, and the rows */
    const uint64_t *row;
    size_t n;
};

/* Write the elements of row i that lie in [lo, hi) of the matrix to their places in buf. */
static int put_row(const struct rows *v, struct ckpt_reading *rd, size_t i, char *buf, uint64_t lo,
                   uint64_t hi, struct ckpt_err *err)
{
    const struct ckpt_tensor *from = &v->operand[1];
    const enum ckpt_dtype dtype = (enum ckpt_dtype)v->operand[0].dtype;
    const uint64_t cols = from->dim[1], begin = v->row[i] * cols;
    const uint64_t first = ckpt_max_u64(lo, begin), end = ckpt_min_u64(hi, begin + cols);
    ckpt_cleanup(ckpt_freep) void *raw =
        malloc((size_t)(end - first + 1) * ckpt_dtype_size((enum ckpt_dtype)from->dtype));

    if (!raw)
        return ckpt_nomem(err);
    if (ckpt_elements_pread(from, rd, raw, i * cols + (first - begin), i * cols + (end - begin),
                            err) < 0)
        return -1;
    ckpt_dtype_cast(buf + (first - lo) * ckpt_dtype_size(dtype), dtype, raw,
                    (enum ckpt_dtype)from->dtype, (size_t)(end - first));
    return 0;
}

static int rows_compute(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                        uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const struct rows *v = (const struct rows *)t->value;
    const uint64_t cols = v->operand[1].dim[1];

    if (ckpt_elements_pread(v->arg[0], rd, buf, lo, hi, err) < 0)
        return ckpt_err_in(err, "tensor '%s'", t->name);
    for (size_t i = 0; i < v->n; i++)
        if (v->row[i] < (hi + cols - 1) / cols && v->row[i] >= lo / cols &&
            put_row(v, rd, i, buf, lo, hi, err) < 0)
            return ckpt_err_in(err, "tensor '%s'", t->name);
    return 0;
}

static const struct ckpt_value_ops rows_ops = {.name = "rows replaced", .compute = rows_compute};

static int check(const struct ckpt_tensor *t, const struct ckpt_tensor *rows, const uint64_t *row,
                 size_t n, struct ckpt_err *err)
{
    if (!ckpt_dtype_is_castable((enum ckpt_dtype)t->dtype) ||
        !ckpt_dtype_is_castable((enum ckpt_dtype)rows->dtype))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "rows of '%s' (%s) for '%s' (%s)", rows->name,
                         ckpt_tensor_dtype_name(rows), t->name, ckpt_tensor_dtype_name(t));
    if (t->rank != 2 || rows->rank != 2 || rows->dim[0] != n || rows->dim[1] != t->dim[1])
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' %s has not the %zu rows of '%s' %s that it should replace",
                         rows->name, ckpt_shape_text(rows->dim, rows->rank).text, n, t->name,
                         ckpt_shape_text(t->dim, t->rank).text);
    for (size_t i = 0; i < n; i++)
        if (row[i] >= t->dim[0] || (i && row[i] <= row[i - 1]))
            return ckpt_fail(err, CKPT_CONFLICT, "row %" PRIu64 " of '%s' %s is %s", row[i],
                             t->name, ckpt_shape_text(t->dim, t->rank).text,
                             row[i] >= t->dim[0] ? "not there" : "replaced out of order");
    return 0;
}

int ckpt_value_rows(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *rows,
                    const uint64_t *row, size_t n, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];

    assert(index < cat->tensors.len);
    if (check(t, rows, row, n, err) < 0)
        return -1;
    struct rows *v = ckpt_arena_alloc(&cat->arena, sizeof *v);
    uint64_t *own = ckpt_arena_alloc(&cat->arena, (n + 1) * sizeof *own);
    if (!v || !own)
        return ckpt_nomem(err);
    memcpy(own, row, n * sizeof *own);
    *v = (struct rows){.operand = {*t, *rows}, .row = own, .n = n};
    v->arg[0] = &v->operand[0];
    v->arg[1] = &v->operand[1];
    v->value = (struct ckpt_value){
        .ops = &rows_ops, .narg = 2, .arg = v->arg, .param = {XXH3_64bits(row, n * sizeof *row)}};
    return ckpt_tensor_compute(t, &v->value, t->dtype, err);
}
