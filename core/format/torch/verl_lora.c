/* SPDX-License-Identifier: Apache-2.0 */
/* Three numbers and the names of modules. */
#include "format/torch/verl_lora.h"

#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "container/config.h"

#define META "lora_train_meta.json"

/* The last component of the name of the module whose matrix A this is ("q_proj"); its length, or 0.
 */
static size_t module_of(const char *name, const char **ret)
{
    const char *end = strstr(name, ".lora_A."), *begin = end;

    while (end && begin > name && begin[-1] != '.')
        begin--;
    *ret = begin;
    return end ? (size_t)(end - begin) : 0;
}

static int add_targets(const struct ckpt_catalog *cat, json_t *targets, struct ckpt_err *err)
{
    struct ckpt_map seen = {0};
    int result = 0;

    for (size_t i = 0; i < cat->tensors.len && result == 0; i++) {
        const char *module;
        const size_t len = module_of(cat->tensors.ptr[i].name, &module);
        uint32_t at;
        bool is_new = false;
        if (len && (ckpt_map_put(&seen, module, len, 0, &at, &is_new) < 0 ||
                    (is_new && json_array_append_new(targets, json_stringn(module, len)) < 0)))
            result = ckpt_nomem(err);
    }
    ckpt_map_release(&seen);
    return result;
}

int ckpt_verl_lora_config(const struct ckpt_dir *dir, const struct ckpt_catalog *cat, json_t **ret,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *meta = NULL, *targets = json_array();

    if (!targets)
        return ckpt_nomem(err);
    if (ckpt_config_read_if(dir, META, CKPT_CONFIG_MAX_BYTES, &meta, err) < 0 ||
        add_targets(cat, targets, err) < 0)
        return -1;
    json_t *r = json_object_get(meta, "r"), *alpha = json_object_get(meta, "lora_alpha");
    const char *task = ckpt_json_str(meta, "task_type");
    if (!json_is_integer(r) || !json_is_number(alpha) || json_array_size(targets) == 0)
        return 0;
    *ret = json_pack("{s:s, s:s?, s:O, s:O, s:O}", "peft_type", "LORA", "task_type", task, "r", r,
                     "lora_alpha", alpha, "target_modules", targets);
    return *ret ? 0 : ckpt_nomem(err);
}
