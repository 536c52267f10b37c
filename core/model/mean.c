/* SPDX-License-Identifier: Apache-2.0 */
/* Making the mean of several models. */
#include "model/mean.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/read.h"
#include "tensor/value.h"

/* ---- do the models agree? ---- */

/* The first key of a that b has not, or with another value; or NULL. */
static const char *differing_key(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)a, key, value)
        if (!json_equal(value, json_object_get(b, key)))
            return key;
    return NULL;
}

static int check_config(const struct ckpt_mean_step *a, const struct ckpt_mean_step *b,
                        struct ckpt_err *err)
{
    const char *key = differing_key(a->config, b->config);

    if (!key)
        key = differing_key(b->config, a->config);
    return key ? ckpt_fail(err, CKPT_CONFLICT,
                           "average: config.json of step '%s' has another '%s' than that of '%s'",
                           b->name, key, a->name)
               : 0;
}

static int check_names(const struct ckpt_mean_step *a, const struct ckpt_mean_step *b,
                       struct ckpt_err *err)
{
    for (size_t i = 0; i < a->cat->tensors.len; i++)
        if (!ckpt_catalog_find(b->cat, a->cat->tensors.ptr[i].name))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "average: step '%s' has no tensor '%s', which '%s' has", b->name,
                             a->cat->tensors.ptr[i].name, a->name);
    return 0;
}

static bool same_shape(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->rank == b->rank && memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0;
}

static int check_kind(const struct ckpt_mean_step *a, const struct ckpt_tensor *x,
                      const struct ckpt_mean_step *b, const struct ckpt_tensor *y,
                      struct ckpt_err *err)
{
    if (same_shape(x, y) && x->dtype == y->dtype)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT, "average: '%s' is %s %s in step '%s', and %s %s in '%s'",
                     x->name, ckpt_tensor_dtype_name(x), ckpt_shape_text(x->dim, x->rank).text,
                     a->name, ckpt_tensor_dtype_name(y), ckpt_shape_text(y->dim, y->rank).text,
                     b->name);
}

/* Compare two tensors of the same kind to the last byte. */
static int is_equal(const struct ckpt_tensor *x, const struct ckpt_tensor *y, bool *ret,
                    struct ckpt_err *err)
{
    enum { CHUNK = 1 << 20 };
    const uint64_t nbytes = ckpt_tensor_nbytes(x);
    ckpt_cleanup(ckpt_freep) unsigned char *buf = malloc((size_t)2 * CHUNK);
    struct ckpt_reading rd = {0};

    *ret = true;
    if (!buf)
        return ckpt_nomem(err);
    if (ckpt_tensor_unchanged(x, y))
        return 0;
    for (uint64_t at = 0, n; at < nbytes && *ret; at += n) {
        n = ckpt_min_u64(CHUNK, nbytes - at);
        if (ckpt_tensor_pread(x, &rd, buf, n, at, err) < 0 ||
            ckpt_tensor_pread(y, &rd, buf + CHUNK, n, at, err) < 0)
            return -1;
        *ret = memcmp(buf, buf + CHUNK, n) == 0;
    }
    return 0;
}

static int check_equal(const struct ckpt_mean_step *a, const struct ckpt_tensor *x,
                       const struct ckpt_mean_step *b, const struct ckpt_tensor *y,
                       struct ckpt_err *err)
{
    bool same;

    if (is_equal(x, y, &same, err) < 0)
        return -1;
    return same ? 0
                : ckpt_fail(
                      err, CKPT_UNSUPPORTED,
                      "average: '%s' is %s, of which there is no mean, and step '%s' has other "
                      "values than '%s' (quantised weights: add the option dequantize)",
                      x->name, ckpt_tensor_dtype_name(x), b->name, a->name);
}

/* ---- means ---- */

/* The tensor of one step as an operand of a tensor of cat. Its pieces are copied, so that it can be
 * sliced as those of cat are; what is computed stays in the step's catalogue. */
static int operand_of(struct ckpt_catalog *cat, const struct ckpt_tensor *t, uint32_t first_source,
                      const struct ckpt_tensor **ret, struct ckpt_err *err)
{
    struct ckpt_tensor *own;

    *ret = t;
    if (t->value || t->cat == cat)
        return 0;
    if (!(own = ckpt_arena_alloc(&cat->arena, sizeof *own)))
        return ckpt_nomem(err);
    *own = *t;
    own->cat = cat;
    *ret = own;
    return ckpt_tensor_copy_pieces(cat, own, t, first_source, err);
}

static int make_one(struct ckpt_mean_step *step, size_t n, const uint32_t *first_source, size_t i,
                    struct ckpt_err *err)
{
    struct ckpt_catalog *cat = step->cat;
    struct ckpt_tensor *t = &cat->tensors.ptr[i];
    const struct ckpt_tensor **arg = ckpt_arena_alloc(&cat->arena, n * sizeof *arg);
    struct ckpt_tensor *own = ckpt_arena_alloc(&cat->arena, sizeof *own);
    const bool is_mean = ckpt_dtype_is_castable((enum ckpt_dtype)t->dtype);

    if (!arg || !own)
        return ckpt_nomem(err);
    *own = *t;
    arg[n - 1] = own;
    for (size_t k = 1; k < n; k++) {
        const struct ckpt_tensor *other = ckpt_catalog_find(step[k].cat, t->name);
        if (check_kind(step, t, &step[k], other, err) < 0 ||
            (!is_mean && check_equal(step, t, &step[k], other, err) < 0) ||
            (is_mean && operand_of(cat, other, first_source[k], &arg[n - 1 - k], err) < 0))
            return -1;
    }
    return is_mean ? ckpt_value_mean(cat, i, arg, (uint32_t)n, err) : 0;
}

int ckpt_mean_make(struct ckpt_mean_step *step, size_t n, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = step->cat;
    ckpt_cleanup(ckpt_freep) uint32_t *first_source = calloc(n, sizeof *first_source);

    if (!first_source)
        return ckpt_nomem(err);
    for (size_t k = 1; k < n; k++) {
        if (check_config(step, &step[k], err) < 0 || check_names(step, &step[k], err) < 0 ||
            check_names(&step[k], step, err) < 0)
            return -1;
        first_source[k] = (uint32_t)cat->sources.len;
        if (ckpt_catalog_add_sources(cat, step[k].cat, err) < 0)
            return -1;
    }
    for (size_t i = 0; n > 1 && i < cat->tensors.len; i++)
        if (make_one(step, n, first_source, i, err) < 0)
            return -1;
    for (size_t k = 1; k < n; k++) {
        if (ckpt_catalog_keep(cat, step[k].cat, err) < 0)
            return -1;
        step[k].cat = NULL;
    }
    return 0;
}
