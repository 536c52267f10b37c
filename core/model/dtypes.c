/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing dtypes. */
#include "model/opening.h"

#include <string.h>

#include "format/automodel/export.h"

const char *ckpt_config_dtype(const json_t *config)
{
    const char *name = ckpt_json_str(config, "dtype");

    return name ? name : ckpt_json_str(config, "torch_dtype");
}

static bool config_dtype(const json_t *config, enum ckpt_dtype *ret)
{
    const char *name = ckpt_config_dtype(config);

    return name && ckpt_dtype_parse(name, strlen(name), ret) && ckpt_dtype_is_castable(*ret);
}

static const struct ckpt_base *base_of(const struct ckpt_opening *o)
{
    return o->decision.use_base_dtypes ? o->shared->base : NULL;
}

/* The tensor's name in the base. */
static const char *base_name(const struct ckpt_opening *o, const char *name)
{
    const char *other = ckpt_json_str(o->base_names, name);

    return other ? other : name;
}

static const struct ckpt_tensor *find_in_base(const struct ckpt_opening *o, const char *name)
{
    return base_of(o) && base_of(o)->cat ? ckpt_catalog_find(base_of(o)->cat, base_name(o, name))
                                         : NULL;
}

/* The dtype in the model from which training started. The checkpoint's own mapping has priority;
 * the base's headers follow, because the mapping may cover only one rank's tensors. */
static bool find_mapped(const struct ckpt_opening *o, const char *name, enum ckpt_dtype *ret)
{
    const char *text = ckpt_json_str(o->facts.dtypes, name);
    const struct ckpt_tensor *model;

    if (text && ckpt_dtype_parse(text, strlen(text), ret))
        return true;
    if (!(model = find_in_base(o, name)))
        return false;
    *ret = model->dtype;
    return true;
}

/* Does transformers load the tensor as F32 whatever the file says? Rounding it to the model's main
 * dtype would only lose bits. */
static bool keeps_dtype(const struct ckpt_opening *o, const char *name)
{
    return ckpt_texts_end(&ckpt_opening_type(o)->keeps_dtype, name);
}

/* Is it a weight of the model, which every save rounded to the config's dtype? Not a scalar or a
 * buffer, whose dtype is the module's own, and not a tensor that the base, if it lists its tensors,
 * does not have. */
static bool is_weight(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    if (t->rank == 0 || ckpt_texts_end(&ckpt_opening_type(o)->buffers, t->name))
        return false;
    if (base_of(o)->cat)
        return find_in_base(o, t->name) != NULL;
    return !base_of(o)->weight_map ||
           ckpt_weight_map_find(base_of(o)->weight_map, base_name(o, t->name)) != UINT32_MAX;
}

/* Are these F32 weights of a 16-bit model, on which the optimizer works? A config alone never
 * widens. */
static bool is_narrowed(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                        enum ckpt_dtype *ret)
{
    return base_of(o) && !o->facts.dtypes && t->dtype == CKPT_F32 && is_weight(o, t) &&
           config_dtype(base_of(o)->config, ret) && ckpt_dtype_size(*ret) == 2;
}

bool ckpt_dtypes_unknown(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    enum ckpt_dtype mapped;

    return o->facts.dtypes && !o->shared->opt->raw &&
           o->shared->opt->dtype_rule == CKPT_DTYPE_AUTO && ckpt_dtype_is_castable(t->dtype) &&
           !keeps_dtype(o, t->name) && !find_mapped(o, t->name, &mapped);
}

enum ckpt_dtype ckpt_dtypes_wanted(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    const bool cast = o->shared->opt->dtype_rule == CKPT_DTYPE_CAST;
    enum ckpt_dtype mapped, dtype;

    if (!ckpt_dtype_is_castable(t->dtype) || o->shared->opt->dtype_rule == CKPT_DTYPE_STORED)
        return t->dtype;
    if (t->wanted && !cast)
        return (enum ckpt_dtype)(t->wanted - 1);
    if (o->shared->opt->raw && !cast)
        return t->dtype;
    if (cast && o->facts.names != CKPT_NAMES_HUB)
        return o->shared->opt->dtype;
    if (find_mapped(o, t->name, &mapped))
        return ckpt_automodel_dtype(t->dtype, &mapped, cast ? &o->shared->opt->dtype : NULL);
    if (keeps_dtype(o, t->name))
        return t->dtype;
    if (cast)
        return o->shared->opt->dtype;
    return is_narrowed(o, t, &dtype) ? dtype : t->dtype;
}
