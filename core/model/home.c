/* SPDX-License-Identifier: Apache-2.0 */
/* Looking for the config of a model. */
#include "model/home.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"

/* Folders in which trainers keep them: beside the weights, or with them. */
static const char *const inner[] = {"",      "huggingface",         "hf", "model/huggingface",
                                    "model", "pytorch_model_fsdp_0"};

static int look_in(struct ckpt_dir *dir, const char *below, struct ckpt_home *ret,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;

    if (*below && !ckpt_dir_has_dir(dir, below))
        return 0;
    if (ckpt_dir_open_below(dir, *below ? below : ".", &at, err) < 0 ||
        ckpt_config_read_if(at, "config.json", CKPT_CONFIG_MAX_BYTES, &config, err) < 0)
        return -1;
    if (ckpt_json_str(config, "model_type") || json_object_get(config, "architectures")) {
        ret->dir = ckpt_steal(&at);
        ret->config = ckpt_steal(&config);
    } else if (config && !ret->other &&
               !(ret->other = ckpt_asprintf("%s/config.json", ckpt_dir_path(at)))) {
        return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_home_find(struct ckpt_dir *dir, struct ckpt_dir *above, struct ckpt_home *ret,
                   struct ckpt_err *err)
{
    struct ckpt_dir *const outer[] = {dir, above};

    for (size_t d = 0; d < 2 && outer[d]; d++)
        for (size_t i = 0; i < sizeof inner / sizeof inner[0] && !ret->dir; i++)
            if (look_in(outer[d], inner[i], ret, err) < 0)
                return -1;
    return 0;
}

void ckpt_home_release(struct ckpt_home *home)
{
    ckpt_dir_unref(home->dir);
    json_decref(home->config);
    free(home->other);
}
