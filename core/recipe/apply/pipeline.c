/* SPDX-License-Identifier: Apache-2.0 */
/* Dividing the blocks of a pipeline by their costs. */
#include "recipe/apply/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MOST_BLOCKS = 1 << 20 };

static uint64_t blocks_of(const struct ckpt_pipeline *st, const struct ckpt_pipeline_block *b)
{
    return b->name->axes ? st->layers : 1;
}

static double cost_of(const struct ckpt_pipeline_block *b, struct ckpt_settings *set)
{
    const struct ckpt_expr_env env = {ckpt_settings_after, set, set->src};
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = b->cost ? ckpt_expr_eval(b->cost, &env) : NULL;

    return json_is_number(v) ? json_number_value(v) : 0;
}

static void divide(struct ckpt_pipeline *st, struct ckpt_settings *set, uint32_t pp)
{
    const struct ckpt_recipe *r = st->recipe;
    double all = 0, done = 0;
    uint64_t at = 0;
    uint32_t stage = 0;

    for (size_t i = 0; i < r->pipeline.len; i++)
        all += (double)blocks_of(st, &r->pipeline.ptr[i]) * cost_of(&r->pipeline.ptr[i], set);
    for (size_t i = 0; i < r->pipeline.len; i++) {
        const double cost = cost_of(&r->pipeline.ptr[i], set);
        for (uint64_t k = 0; k < blocks_of(st, &r->pipeline.ptr[i]); k++) {
            st->stage[at++] = stage;
            done += cost;
            if (stage + 1 < pp && done > all * ((double)(stage + 1) / pp))
                stage++;
        }
    }
}

int ckpt_pipeline_init(struct ckpt_pipeline *st, const struct ckpt_recipe *recipe,
                       struct ckpt_settings *set, uint32_t pp, struct ckpt_err *err)
{
    uint64_t n = 0;

    if (!recipe->pipeline.len)
        return 0;
    if (!ckpt_settings_dim(set, "layer", &st->layers) || st->layers > MOST_BLOCKS)
        return ckpt_fail(err, CKPT_MISSING, "%s: the number of layers is not known", recipe->name);
    if (pp > st->layers)
        return ckpt_fail(err, CKPT_USAGE,
                         "option pp: the model has %" PRIu64 " layer%s, which cannot be divided "
                         "among %" PRIu32 " stages",
                         st->layers, st->layers == 1 ? "" : "s", pp);
    for (size_t i = 0; i < recipe->pipeline.len; i++)
        n += blocks_of(st, &recipe->pipeline.ptr[i]);
    if (!(st->stage = calloc(n + 1, sizeof *st->stage)))
        return ckpt_nomem(err);
    st->recipe = recipe;
    divide(st, set, pp);
    return 0;
}

void ckpt_pipeline_release(struct ckpt_pipeline *st)
{
    free(st->stage);
    st->stage = NULL;
}

uint32_t ckpt_pipeline_find(const struct ckpt_pipeline *st, const char *name)
{
    uint64_t at = 0, layer[CKPT_NAME_NUMBERS] = {0};

    for (size_t i = 0; st->recipe && i < st->recipe->pipeline.len; i++) {
        const struct ckpt_pipeline_block *b = &st->recipe->pipeline.ptr[i];
        if (ckpt_name_match_start(b->name, name, strlen(name), layer) &&
            (!b->name->axes || layer[0] < st->layers))
            return st->stage[at + (b->name->axes ? layer[0] : 0)];
        at += blocks_of(st, b);
    }
    return 0;
}
