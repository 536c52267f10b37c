/* SPDX-License-Identifier: Apache-2.0 */
/* Restoring module order. */
#include "ckpt/module_order.h"

#include <stdbool.h>
#include <string.h>

#include "base/str.h"

/* Siblings in the order in which the modules of Llama, Mistral, Qwen2, Qwen3, Phi-3 and Gemma
 * register them; the groups follow one another only to be one table. */
static const char *const order[] = {
    "model",
    "language_model",
    "embed_tokens",
    "layers",
    "norm",
    "lm_head",
    "self_attn",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "q_norm",
    "k_norm",
    "gate",
    "experts",
    "gate_proj",
    "gate_up_proj",
    "up_proj",
    "down_proj",
    "weight",
    "bias",
};

enum { NORDER = sizeof order / sizeof order[0] };

static int rank_of(const char *part, size_t len)
{
    int i = 0;

    while (i < NORDER && (strlen(order[i]) != len || memcmp(order[i], part, len) != 0))
        i++;
    return i;
}

int ckpt_module_order_cmp(const char *a, const char *b)
{
    const char *x = a, *y = b;

    for (;;) {
        size_t n = strcspn(x, "."), m = strcspn(y, ".");
        if (n != m || memcmp(x, y, n) != 0) {
            int c = rank_of(x, n) - rank_of(y, m);
            return c ? c : ckpt_natural_cmp(x, y);
        }
        x += n;
        y += m;
        if (!*x || !*y)
            return (*x != 0) - (*y != 0);
        x++;
        y++;
    }
}
