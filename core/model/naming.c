/* SPDX-License-Identifier: Apache-2.0 */
/* Answering a reader's questions about names from the facts about the config's model type. */
#include "model/naming.h"

#include <string.h>

#include "base/str.h"
#include "model/experts.h"
#include "tensor/fqn.h"

static const struct ckpt_type *type_of(const void *types, const json_t *config)
{
    return ckpt_types_find(types, ckpt_json_str(config, "model_type"));
}

static int cmp(const void *types, const json_t *config, const char *a, const char *b)
{
    const struct ckpt_texts *order = &type_of(types, config)->order;

    return ckpt_order_cmp(order->text, order->n, a, b);
}

/* Is it the name of that tensor, below any module? */
static bool ends_at_dot(const char *name, const char *tensor)
{
    const size_t n = strlen(name), len = strlen(tensor);

    return ckpt_has_suffix(name, tensor) && (n == len || name[n - len - 1] == '.');
}

static bool may_lack(const void *types, const json_t *config, const char *name)
{
    const struct ckpt_type *type = type_of(types, config);

    for (size_t i = 0; i < type->output.n; i++)
        if (ends_at_dot(name, type->output.text[i]))
            return true;
    return ckpt_texts_end(&type->absent, name);
}

static bool is_converted(const void *types, const json_t *config, const char *name)
{
    const struct ckpt_type *type = type_of(types, config);

    return type->converted && ckpt_experts_is_fused(type, name);
}

struct ckpt_naming ckpt_naming_of(const struct ckpt_types *types)
{
    return (struct ckpt_naming){
        .ctx = types, .cmp = cmp, .may_lack = may_lack, .is_converted = is_converted};
}
