/* SPDX-License-Identifier: Apache-2.0 */
/* The cast as a computed tensor: read the operand in chunks, convert each. */
#include "tensor/value.h"

#include <assert.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/catalog.h"
#include "tensor/dtype.h"
#include "tensor/read.h"

/* Bytes of the operand that are read at once: large enough to be one good read of a shard, small
 * enough to be there per worker. */
enum { CHUNK_BYTES = 512 * 1024 };

static int cast_compute(const struct ckpt_value *v, const struct ckpt_tensor *t,
                        struct ckpt_reading *rd, void *buf, uint64_t lo, uint64_t hi,
                        struct ckpt_err *err)
{
    const struct ckpt_operand *arg = &v->arg[0];
    const size_t from = ckpt_dtype_size(arg->tensor->dtype), to = ckpt_dtype_size(t->dtype);
    const uint64_t step = ckpt_min_u64(CHUNK_BYTES / from, hi - lo);
    ckpt_cleanup(ckpt_freep) void *chunk = NULL;

    if (lo == hi)
        return 0;
    if (!(chunk = malloc((size_t)step * from)))
        return ckpt_nomem(err);
    for (char *out = buf; lo < hi;) {
        size_t n = (size_t)ckpt_min_u64(step, hi - lo);
        if (ckpt_tensor_pread(arg->cat, arg->tensor, rd, chunk, n * from, lo * from, err) < 0)
            return -1;
        ckpt_dtype_cast(out, t->dtype, chunk, arg->tensor->dtype, n);
        out += n * to;
        lo += n;
    }
    return 0;
}

static const struct ckpt_value_ops cast_ops = {.name = "cast", .compute = cast_compute};

/* A cast of t: the operand is a copy of t as it was. */
static const struct ckpt_value *cast_new(struct ckpt_catalog *cat, const struct ckpt_tensor *t)
{
    struct {
        struct ckpt_value value;
        struct ckpt_operand arg;
        struct ckpt_tensor stored;
    } *v = ckpt_arena_alloc(&cat->arena, sizeof *v);

    if (!v)
        return NULL;
    v->stored = *t;
    v->arg = (struct ckpt_operand){.cat = cat, .tensor = &v->stored};
    v->value = (struct ckpt_value){.ops = &cast_ops, .narg = 1, .arg = &v->arg};
    return &v->value;
}

int ckpt_value_cast(struct ckpt_catalog *cat, size_t index, int dtype, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    struct ckpt_tensor stored = *t;
    uint64_t nbytes;

    assert(index < cat->tensors.len);
    assert(ckpt_dtype_is_castable(t->dtype) && ckpt_dtype_is_castable(dtype));
    if (t->dtype == dtype)
        return 0;
    if (t->value && t->value->ops == &cast_ops) { /* from what is stored, not from a cast of it */
        stored = *t->value->arg[0].tensor;
        stored.block = t->block;
    }
    if (stored.dtype == dtype) {
        *t = stored;
        return 0;
    }
    if (ckd_mul(&nbytes, t->numel, ckpt_dtype_size(dtype)) || nbytes > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' as %s has 2^63 bytes or more", t->name,
                         ckpt_dtype_name(dtype));
    const struct ckpt_value *v = cast_new(cat, &stored);
    if (!v)
        return ckpt_nomem(err);
    t->dtype = (uint8_t)dtype;
    t->value = v;
    t->piece = NULL;
    t->npiece = 0;
    t->max_span = 0;
    return 0;
}

bool ckpt_value_is_cast(const struct ckpt_value *v) { return v->ops == &cast_ops; }
