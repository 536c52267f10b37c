/* SPDX-License-Identifier: Apache-2.0 */
/* Making computed tensors; the elementwise operators. */
#include "tensor/value.h"

#include <assert.h>
#include <string.h>

#include "base/ckd.h"
#include "tensor/catalog.h"

enum { STEP = 512 }; /* elements that are computed at once, on the stack */

int ckpt_tensor_compute(struct ckpt_tensor *t, const struct ckpt_value *v, int dtype,
                        struct ckpt_err *err)
{
    uint64_t nbytes;

    if (ckd_mul(&nbytes, t->numel, (uint64_t)ckpt_dtype_size((enum ckpt_dtype)dtype)) ||
        nbytes > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' as %s has 2^63 bytes or more", t->name,
                         ckpt_dtype_name((enum ckpt_dtype)dtype));
    t->dtype = (uint8_t)dtype;
    t->value = v;
    t->piece = NULL;
    t->npiece = 0;
    t->max_span = 0;
    return 0;
}

/* Make *t, a tensor of cat, a computed one whose operand is a copy of it. */
static int wrap(struct ckpt_catalog *cat, struct ckpt_tensor *t, const struct ckpt_value_ops *ops,
                double number, int dtype, struct ckpt_err *err)
{
    struct {
        struct ckpt_value value;
        const struct ckpt_tensor *arg;
        struct ckpt_tensor operand;
    } *v = ckpt_arena_alloc(&cat->arena, sizeof *v);

    if (!v)
        return ckpt_nomem(err);
    v->operand = *t;
    v->arg = &v->operand;
    v->value = (struct ckpt_value){.ops = ops, .narg = 1, .arg = &v->arg};
    memcpy(&v->value.param[0], &number, sizeof number);
    return ckpt_tensor_compute(t, &v->value, dtype, err);
}

/* ---- cast ---- */

static void cast(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                 enum ckpt_dtype from, size_t n)
{
    (void)v;
    ckpt_dtype_cast(dst, to, src, from, n);
}

static const struct ckpt_value_ops cast_ops = {.name = "cast", .elements = cast, .rounds = true};

enum ckpt_dtype ckpt_value_unrounded(const struct ckpt_tensor *t)
{
    if (!t->value || !t->value->ops->rounds)
        return t->dtype;
    if (t->value->ops == &cast_ops)
        return t->value->arg[0]->dtype;
    return t->dtype == CKPT_F64 ? CKPT_F64 : CKPT_F32;
}

int ckpt_value_cast(struct ckpt_catalog *cat, size_t index, int dtype, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    const struct ckpt_value *v = t->value;

    assert(index < cat->tensors.len);
    assert(ckpt_dtype_is_castable(t->dtype) && ckpt_dtype_is_castable(dtype));
    if (t->dtype == dtype)
        return 0;
    if (v && v->ops == &cast_ops && v->arg[0]->dtype == dtype) {
        const uint32_t block = t->block;
        *t = *v->arg[0];
        t->block = block;
        return 0;
    }
    if (v && v->ops->rounds)
        return ckpt_tensor_compute(t, v, dtype, err);
    return wrap(cat, t, &cast_ops, 0, dtype, err);
}

/* ---- x + 1, x - 1, x times or over a number ---- */

enum operation { ADD, TIMES, OVER };

/* Compute in the wider of the tensor's type and F32, as torch adds a number to a tensor. */
static void compute(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from, size_t n,
                    enum operation op, float number)
{
    const enum ckpt_dtype wide = from == CKPT_F64 ? CKPT_F64 : CKPT_F32;
    const double by = number;
    union {
        float f32[STEP];
        double f64[STEP];
    } x;

    for (size_t i = 0, len; i < n; i += len) {
        len = n - i < STEP ? n - i : STEP;
        ckpt_dtype_cast(&x, wide, (const char *)src + i * ckpt_dtype_size(from), from, len);
        for (size_t k = 0; k < len; k++) {
            if (wide == CKPT_F64)
                x.f64[k] = op == ADD ? x.f64[k] + by : op == TIMES ? x.f64[k] * by : x.f64[k] / by;
            else
                x.f32[k] = op == ADD     ? x.f32[k] + number
                           : op == TIMES ? x.f32[k] * number
                                         : x.f32[k] / number;
        }
        ckpt_dtype_cast((char *)dst + i * ckpt_dtype_size(to), to, &x, wide, len);
    }
}

static void plus_one(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                     enum ckpt_dtype from, size_t n)
{
    (void)v;
    compute(dst, to, src, from, n, ADD, 1.0F);
}

static void minus_one(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                      enum ckpt_dtype from, size_t n)
{
    (void)v;
    compute(dst, to, src, from, n, ADD, -1.0F);
}

/* The number of an operator that takes one: the value's first parameter. */
static float number_of(const struct ckpt_value *v)
{
    double number;

    memcpy(&number, &v->param[0], sizeof number);
    return (float)number;
}

static void times(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                  enum ckpt_dtype from, size_t n)
{
    compute(dst, to, src, from, n, TIMES, number_of(v));
}

static void over(const struct ckpt_value *v, void *dst, enum ckpt_dtype to, const void *src,
                 enum ckpt_dtype from, size_t n)
{
    compute(dst, to, src, from, n, OVER, number_of(v));
}

const struct ckpt_value_ops ckpt_value_plus_one = {.name = "plus_one", .elements = plus_one};
static const struct ckpt_value_ops value_minus_one = {.name = "minus_one", .elements = minus_one};
static const struct ckpt_value_ops value_times = {
    .name = "times", .elements = times, .takes_number = true};
static const struct ckpt_value_ops value_over = {
    .name = "over", .elements = over, .takes_number = true};

const struct ckpt_value_ops *ckpt_value_find(const char *name)
{
    static const struct ckpt_value_ops *const all[] = {&ckpt_value_plus_one, &value_minus_one,
                                                       &value_times, &value_over};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (strcmp(name, all[i]->name) == 0)
            return all[i];
    return NULL;
}

int ckpt_value_apply(struct ckpt_catalog *cat, size_t index, const struct ckpt_value_ops *ops,
                     double number, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];

    assert(index < cat->tensors.len);
    if (!ckpt_dtype_is_castable(t->dtype))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is %s: %s cannot be computed from that dtype",
                         t->name, ckpt_dtype_name(t->dtype), ops->name);
    return wrap(cat, t, ops, ops->takes_number ? number : 0, t->dtype, err);
}
