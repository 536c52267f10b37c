/* SPDX-License-Identifier: Apache-2.0 */
/* Finding pairs of codes and scales by their names. */
#include "model/dequantize.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/opening.h"
#include "recipe/apply/instance.h"
#include "tensor/dequant.h"

#define SCALE_INV "_scale_inv"
#define BLOCKS "_blocks"
#define SCALES "_scales"

enum { BLOCK = 128, MXFP4_BYTES = 16 };

struct dequantize {
    struct ckpt_catalog *cat;
    struct ckpt_weight_map *map;
    uint64_t block[2];
    enum ckpt_dtype dtype;
    bool quantized;        /* by its configuration */
    const char *elsewhere; /* how else its weights are dequantised; or NULL */
    const char **name;     /* new name of each tensor; NULL: the tensor was used up */
    struct ckpt_err *err;
};

/* For a name "X<tail>", find the tensor "X<other>"; SIZE_MAX: there is none. */
static size_t find_sibling(const struct dequantize *d, const char *name, const char *tail,
                           const char *other)
{
    ckpt_cleanup(ckpt_freep) char *sibling =
        ckpt_asprintf("%.*s%s", (int)(strlen(name) - strlen(tail)), name, other);
    const struct ckpt_tensor *t = sibling ? ckpt_catalog_find(d->cat, sibling) : NULL;

    return t ? (size_t)(t - d->cat->tensors.ptr) : SIZE_MAX;
}

/* ---- FP8 ---- */

static int dequantize_fp8(struct dequantize *d, size_t at)
{
    const struct ckpt_tensor scale = d->cat->tensors.ptr[at];
    const size_t weight = find_sibling(d, scale.name, SCALE_INV, "");

    if (weight == SIZE_MAX)
        return ckpt_fail(d->err, CKPT_MISSING, "the scales '%s' have no tensor", scale.name);
    if (ckpt_value_fp8(d->cat, weight, &scale, d->block, d->dtype, d->err) < 0)
        return -1;
    d->name[at] = NULL;
    return 0;
}

static int check_has_scales(const struct dequantize *d, const struct ckpt_tensor *t)
{
    const bool packed = d->quantized && t->rank > 1 &&
                        (t->dtype == CKPT_I32 || t->dtype == CKPT_I8 || t->dtype == CKPT_U8);

    if (!packed &&
        (t->dtype != CKPT_F8_E4M3 || find_sibling(d, t->name, "", SCALE_INV) != SIZE_MAX))
        return 0;
    return ckpt_fail(d->err, CKPT_MISSING,
                     "'%s' is %s, without scales '%s" SCALE_INV
                     "': only block-scaled FP8 and MXFP4 can be dequantised%s%s",
                     t->name, ckpt_dtype_name(t->dtype), t->name, d->elsewhere ? "; " : "",
                     d->elsewhere ? d->elsewhere : "");
}

/* ---- MXFP4 ---- */

static int check_mxfp4(const struct dequantize *d, const struct ckpt_tensor *b,
                       const struct ckpt_tensor *s)
{
    if (b->dtype != CKPT_U8 || s->dtype != CKPT_U8)
        return ckpt_fail(d->err, CKPT_UNSUPPORTED, "MXFP4 '%s' is %s and '%s' is %s, not U8",
                         b->name, ckpt_dtype_name(b->dtype), s->name, ckpt_dtype_name(s->dtype));
    if (b->rank != 4 || s->rank != 3 || b->dim[3] != MXFP4_BYTES ||
        memcmp(b->dim, s->dim, 3 * sizeof *b->dim) != 0)
        return ckpt_fail(d->err, CKPT_CONFLICT,
                         "MXFP4 '%s' has the shape %s and '%s' %s: not [experts, out, groups, %d] "
                         "and [experts, out, groups]",
                         b->name, ckpt_shape_text(b->dim, b->rank).text, s->name,
                         ckpt_shape_text(s->dim, s->rank).text, MXFP4_BYTES);
    return 0;
}

/* Update the weight map: X is in the file in which its blocks were. */
static int move_in_map(struct dequantize *d, const char *from, const char *to)
{
    const uint32_t file = ckpt_weight_map_find(d->map, from);

    return file == UINT32_MAX ? 0
                              : ckpt_weight_map_put(d->map, to, d->map->files.ptr[file], d->err);
}

static int dequantize_mxfp4(struct dequantize *d, size_t at, size_t scales_at)
{
    const struct ckpt_tensor *b = &d->cat->tensors.ptr[at], *s = &d->cat->tensors.ptr[scales_at];
    struct ckpt_tensor blocks, scales;

    if (check_mxfp4(d, b, s) < 0 ||
        ckpt_rearrange(d->cat, b, "e n g b", "e g b n", &blocks, d->err) < 0 ||
        ckpt_rearrange(d->cat, s, "e n g", "e g n", &scales, d->err) < 0 ||
        ckpt_value_mxfp4(d->cat, at, &blocks, &scales, d->dtype, d->err) < 0)
        return -1;
    d->name[scales_at] = NULL;
    d->name[at] = ckpt_arena_strndup(&d->cat->arena, b->name, strlen(b->name) - strlen(BLOCKS));
    if (!d->name[at])
        return ckpt_nomem(d->err);
    return move_in_map(d, b->name, d->name[at]);
}

/* Fail if half of a pair is missing. Tensors of another kind can have such names, so only a tensor
 * whose dtype and shape look like half of a pair counts. */
static int check_is_alone(const struct dequantize *d, const struct ckpt_tensor *t,
                          const char *other)
{
    const bool blocks = strcmp(other, SCALES) == 0;

    if (t->dtype != CKPT_U8 || t->rank != (blocks ? 4 : 3) || (blocks && t->dim[3] != MXFP4_BYTES))
        return 0;
    return ckpt_fail(d->err, CKPT_MISSING,
                     "'%s' looks like half of an MXFP4 weight: there is no "
                     "'...%s' beside it",
                     t->name, other);
}

/* ---- the whole ---- */

static int dequantize(struct dequantize *d, size_t i)
{
    const struct ckpt_tensor *t = &d->cat->tensors.ptr[i];
    size_t other;

    if (ckpt_has_suffix(t->name, SCALE_INV))
        return dequantize_fp8(d, i);
    if (ckpt_has_suffix(t->name, BLOCKS)) {
        other = find_sibling(d, t->name, BLOCKS, SCALES);
        return other == SIZE_MAX ? check_is_alone(d, t, SCALES) : dequantize_mxfp4(d, i, other);
    }
    if (ckpt_has_suffix(t->name, SCALES))
        return find_sibling(d, t->name, SCALES, BLOCKS) == SIZE_MAX ? check_is_alone(d, t, BLOCKS)
                                                                    : 0;
    return check_has_scales(d, t);
}

static void read_config(struct dequantize *d, const json_t *config)
{
    const json_t *quant = json_object_get(config, "quantization_config"),
                 *block = json_object_get(quant, "weight_block_size");
    const char *dtype = ckpt_config_dtype(config);

    if (!dtype || !ckpt_dtype_parse(dtype, strlen(dtype), &d->dtype) ||
        !ckpt_dtype_is_castable(d->dtype))
        d->dtype = CKPT_BF16;
    d->quantized = quant;
    d->elsewhere = ckpt_config_dequantized_by(config);
    for (size_t i = 0; i < 2; i++) {
        const json_int_t n = json_integer_value(json_array_get(block, i));
        d->block[i] = n > 0 ? (uint64_t)n : BLOCK;
    }
}

int ckpt_dequantize(struct ckpt_catalog *cat, const json_t *config, struct ckpt_weight_map *map,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);
    struct dequantize d = {.cat = cat, .map = map, .name = name, .err = err};

    if (!name)
        return ckpt_nomem(err);
    read_config(&d, config);
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (dequantize(&d, i) < 0)
            return -1;
    return ckpt_catalog_select(cat, name, err);
}

bool ckpt_is_quantized(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const enum ckpt_dtype dtype = (enum ckpt_dtype)cat->tensors.ptr[i].dtype;
        if ((ckpt_dtype_size(dtype) == 1 || ckpt_dtype_pack(dtype) > 1) && dtype != CKPT_BOOL)
            return true;
    }
    return false;
}

bool ckpt_is_packed(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (cat->tensors.ptr[i].dtype == CKPT_I32 && cat->tensors.ptr[i].rank > 1)
            return true;
    return ckpt_is_quantized(cat);
}
