/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing dtypes. */
#include "model/dtypes.h"

#include <string.h>

#include "base/str.h"
#include "format/automodel/export.h"

/* The dtype that config.json states, under its new key or its old one. */
static bool config_dtype(const json_t *config, enum ckpt_dtype *ret)
{
    const char *name = ckpt_json_str(config, "dtype");

    if (!name)
        name = ckpt_json_str(config, "torch_dtype");
    return name && ckpt_dtype_parse(name, strlen(name), ret) && ckpt_dtype_is_castable(*ret);
}

/* The tensor's name in the base. */
static const char *base_name(const struct ckpt_dtypes *d, const char *name)
{
    const char *other = ckpt_json_str(d->base_names, name);

    return other ? other : name;
}

static const struct ckpt_tensor *find_in_base(const struct ckpt_dtypes *d, const char *name)
{
    return d->base && d->base->cat ? ckpt_catalog_find(d->base->cat, base_name(d, name)) : NULL;
}

/* The dtype in the model from which training started. The checkpoint's own mapping has priority;
 * the base's headers follow, because the mapping may cover only one rank's tensors. */
static bool find_mapped(const struct ckpt_dtypes *d, const char *name, enum ckpt_dtype *ret)
{
    const char *text = ckpt_json_str(d->mapping, name);
    const struct ckpt_tensor *model;

    if (text && ckpt_dtype_parse(text, strlen(text), ret))
        return true;
    if (!(model = find_in_base(d, name)))
        return false;
    *ret = model->dtype;
    return true;
}

/* Does transformers load the tensor as F32 whatever the file says? Rounding it to the model's main
 * dtype would only lose bits. */
static bool keeps_dtype(const struct ckpt_dtypes *d, const char *name)
{
    return d->keeps && ckpt_texts_end(d->keeps, name);
}

/* Is it a weight of the model, which every save rounded to the config's dtype? Not a scalar or a
 * buffer, whose dtype is the module's own, and not a tensor that the base, if it lists its tensors,
 * does not have. */
static bool is_weight(const struct ckpt_dtypes *d, const struct ckpt_tensor *t)
{
    if (t->rank == 0 || (d->buffers && ckpt_texts_end(d->buffers, t->name)))
        return false;
    if (d->base->cat)
        return find_in_base(d, t->name) != NULL;
    return !d->base->weight_map ||
           json_object_get(d->base->weight_map, base_name(d, t->name)) != NULL;
}

/* Are these F32 weights of a 16-bit model, on which the optimizer works? A config alone never
 * widens. */
static bool is_narrowed(const struct ckpt_dtypes *d, const struct ckpt_tensor *t,
                        enum ckpt_dtype *ret)
{
    return d->base && !d->mapping && t->dtype == CKPT_F32 && is_weight(d, t) &&
           config_dtype(d->base->config, ret) && ckpt_dtype_size(*ret) == 2;
}

bool ckpt_dtypes_unknown(const struct ckpt_dtypes *d, const struct ckpt_tensor *t)
{
    enum ckpt_dtype mapped;

    return d->mapping && !d->opt->raw && d->opt->dtype_rule == CKPT_DTYPE_AUTO &&
           ckpt_dtype_is_castable(t->dtype) && !keeps_dtype(d, t->name) &&
           !find_mapped(d, t->name, &mapped);
}

enum ckpt_dtype ckpt_dtypes_wanted(const struct ckpt_dtypes *d, const struct ckpt_tensor *t)
{
    const bool cast = d->opt->dtype_rule == CKPT_DTYPE_CAST;
    enum ckpt_dtype mapped, dtype;

    if (!ckpt_dtype_is_castable(t->dtype) || d->opt->dtype_rule == CKPT_DTYPE_STORED)
        return t->dtype;
    if (t->wanted && !cast)
        return (enum ckpt_dtype)(t->wanted - 1);
    if (d->opt->raw && !cast)
        return t->dtype;
    if (cast && !d->hf_names)
        return d->opt->dtype;
    if (find_mapped(d, t->name, &mapped))
        return ckpt_automodel_dtype(t->dtype, &mapped, cast ? &d->opt->dtype : NULL);
    if (keeps_dtype(d, t->name))
        return t->dtype;
    if (cast)
        return d->opt->dtype;
    return is_narrowed(d, t, &dtype) ? dtype : t->dtype;
}
