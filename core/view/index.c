/* SPDX-License-Identifier: Apache-2.0 */
/* json.dumps(index, indent=2, sort_keys=True) + "\n", an entry per tensor. */
#include "view/index.h"

#include <assert.h>

static void put_head(const struct ckpt_index *x, struct ckpt_str *out)
{
    ckpt_str_puts(out, "{\n  \"metadata\": {\n    \"total_parameters\": ");
    ckpt_str_put_u64(out, x->shards->total_numel);
    ckpt_str_puts(out, ",\n    \"total_size\": ");
    ckpt_str_put_u64(out, x->shards->total_bytes);
    ckpt_str_puts(out, "\n  },\n  \"weight_map\": {\n");
}

static void put_entry(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct ckpt_index *x = ctx;
    uint32_t tensor = x->by_name[i];

    if (i == 0)
        put_head(x, out);
    ckpt_str_puts(out, "    ");
    ckpt_json_put_string(out, x->cat->tensors.ptr[tensor].name);
    ckpt_str_puts(out, ": ");
    ckpt_json_put_string(out, x->shards->name[x->shards->file[tensor]]);
    ckpt_str_puts(out, i + 1 < x->cat->tensors.len ? ",\n" : "\n  }\n}\n");
}

int ckpt_index_text(const struct ckpt_index *index, struct ckpt_arena *arena, struct ckpt_text *ret,
                    struct ckpt_err *err)
{
    assert(index->cat->tensors.len > 0);
    return ckpt_text_init(ret, put_entry, index, index->cat->tensors.len, arena, err);
}
