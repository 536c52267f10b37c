/* SPDX-License-Identifier: Apache-2.0 */
/* Three numbers. */
#include "format/torch/verl_lora.h"

#include "base/mem.h"
#include "container/config.h"

#define META "lora_train_meta.json"

int ckpt_verl_lora_config(const struct ckpt_dir *dir, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *meta = NULL;

    if (ckpt_config_read_if(dir, META, CKPT_CONFIG_MAX_BYTES, &meta, err) < 0)
        return -1;
    json_t *r = json_object_get(meta, "r"), *alpha = json_object_get(meta, "lora_alpha");
    const char *task = ckpt_json_str(meta, "task_type");
    if (!json_is_integer(r) || !json_is_number(alpha))
        return 0;
    *ret = json_pack("{s:s, s:s?, s:O, s:O}", "peft_type", "LORA", "task_type", task, "r", r,
                     "lora_alpha", alpha);
    return *ret ? 0 : ckpt_nomem(err);
}
