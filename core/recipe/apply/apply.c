/* SPDX-License-Identifier: Apache-2.0 */
/* Applying a recipe: the model file says which tensors the model has, and the rules say how each is
 * made. */
#include "recipe/apply/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "recipe/language/field.h"

/* ---- stages of a pipeline ---- */

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

/* Divide the blocks as nanotron does (models/base.py, build_model): a stage ends with the block at
 * which the costs so far exceed its share of the whole. USAGE: there are more stages than layers.
 */
static int pipeline_init(struct ckpt_pipeline *st, const struct ckpt_recipe *recipe,
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

/* ---- before anything is made ---- */

static void apply_release(struct ckpt_apply *ap)
{
    ckpt_settings_release(&ap->set);
    free(ap->pipeline.stage);
    ckpt_resolver_release(&ap->rs);
    ckpt_catalog_free(ap->cat);
    ckpt_catalog_free(ap->joined);
    ckpt_tied_copies_release(&ap->copies);
    free(ap->used);
    ckpt_instance_release(&ap->in);
    ckpt_vec_release(&ap->drafts);
    ckpt_str_release(&ap->name);
    json_decref(ap->explanation);
}

/* Join ranked tensors first, before anything uses their shapes. */
static int join(struct ckpt_apply *ap)
{
    ckpt_cleanup(ckpt_settings_release) struct ckpt_settings draft = {0};

    if (!ap->recipe->family || !ckpt_join_needed(ap->src))
        return 0;
    if (ckpt_settings_draft(&draft, ap->recipe, ap->src, ap->opt, ap->err) < 0 ||
        ckpt_join(ap->recipe, ap->src, &draft, &ap->joined, ap->err) < 0)
        return -1;
    ap->src = ap->joined;
    return 0;
}

/* Prepare for a checkpoint that is divided over ranks, and padded. */
static int begin_output(struct ckpt_apply *ap)
{
    static const unsigned char zeros[16];
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *source = NULL;

    if (ckpt_source_mem_new("zeros", zeros, sizeof zeros, &source, ap->err) < 0)
        return -1;
    ap->in.pad_to = ap->opt->output->pad_to;
    ap->in.zeros = ckpt_catalog_add_source(ap->cat, source, ap->err);
    return ap->in.zeros == UINT32_MAX
               ? -1
               : pipeline_init(&ap->pipeline, ap->recipe, &ap->set, ap->opt->output->pp, ap->err);
}

/* ---- fused tensors ---- */

/* Make *name that of a tensor which is stored by itself, unless the entry is about other names, or
 * the module that would contain the tensor is there. */
static int rename_one(const struct ckpt_fused *f, struct ckpt_catalog *cat, const char **name,
                      struct ckpt_err *err)
{
    const char *at = strstr(*name, f->module);
    const char *rest = at ? at + strlen(f->module) : "";

    if (!at || !ckpt_has_prefix(rest, f->prefix))
        return 0;
    /* the tensor that shows that the module is there: beside it, or in its place */
    ckpt_cleanup(ckpt_freep) char *witness =
        f->witness ? ckpt_asprintf("%.*s%s", (int)(at - *name), *name, f->witness)
                   : ckpt_asprintf("%.*sweight", (int)(rest - *name), *name);
    if (!witness)
        return ckpt_nomem(err);
    if (ckpt_catalog_find(cat, witness))
        return 0;
    *name = ckpt_field_text(&cat->arena, err, "%.*s%s%s", (int)(at - *name), *name, f->alone,
                            rest + strlen(f->prefix));
    return *name ? 0 : -1;
}

/* Rename tensors that the framework stores as part of another module where a model has that module,
 * and by themselves where it has not: norms, which are part of the projection behind them. */
static int rename_fused(const struct ckpt_recipe *recipe, struct ckpt_catalog *cat,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);

    if (!recipe->fused.len)
        return 0;
    if (!name)
        return ckpt_nomem(err);
    /* a later entry sees the name that an earlier one gave */
    for (size_t i = 0; i < cat->tensors.len; i++)
        for (size_t k = 0; k < recipe->fused.len; k++)
            if (rename_one(&recipe->fused.ptr[k], cat, &name[i], err) < 0)
                return -1;
    return ckpt_catalog_select(cat, name, err);
}

/* ---- all of it ---- */

/* A checkpoint that is made must be recognised when it is read again, so it must have the tensors
 * by which the recipe recognises its family: a family of experts without a single expert would be
 * taken for another family. */
static int check_evidence(struct ckpt_apply *ap)
{
    const char *lacks = ckpt_recipe_evidence_lacks(ap->recipe, ap->cat);

    if (!lacks || !ap->recipe->backwards || !ap->opt->output || ap->opt->allow_partial ||
        ap->opt->allow_missing)
        return 0;
    return ckpt_fail(ap->err, CKPT_UNSUPPORTED,
                     "the checkpoint could not be read again: %s recognises its checkpoints by a "
                     "tensor '%s', and this model has none that becomes it",
                     ap->recipe->name, lacks);
}

static int run(struct ckpt_apply *ap, const struct ckpt_recipes *set)
{
    if (ckpt_recipes_choose(set, ap->src, ap->opt, &ap->recipe, ap->err) < 0 || join(ap) < 0 ||
        ckpt_catalog_new_like(ap->src, &ap->cat, ap->err) < 0 ||
        ckpt_settings_init(&ap->set, ap->recipe, ap->src, ap->opt, ap->cat, ap->err) < 0)
        return -1;
    if (ap->opt->output && begin_output(ap) < 0)
        return -1;
    ap->used = calloc(ap->src->tensors.len + 1, sizeof *ap->used);
    if (!ap->used)
        return ckpt_nomem(ap->err);
    if (ckpt_resolver_init(&ap->rs, ap->recipe, ap->src, &ap->set, ap->err) < 0)
        return -1;
    if (ap->recipe->backwards && !ap->recipe->family->open &&
        ckpt_apply_check(ap, &ap->recipe->family->tensors) < 0)
        return -1;
    if ((ap->recipe->family->open || ap->recipe->backwards
             ? ckpt_apply_sources(ap)
             : ckpt_apply_items(ap, &ap->recipe->family->tensors)) < 0 ||
        ckpt_apply_kept(ap) < 0)
        return -1;
    if (ap->nleft > CKPT_APPLY_SHOWN)
        ckpt_catalog_warn(ap->cat, "%zu more tensors are left out", ap->nleft - CKPT_APPLY_SHOWN);
    if (rename_fused(ap->recipe, ap->cat, ap->err) < 0 || check_evidence(ap) < 0)
        return -1;
    return ckpt_tied_copies_check(&ap->copies, ap->recipe, ap->opt->allow_leftover, ap->cat,
                                  ap->err) < 0
               ? -1
               : ckpt_leftover_check(ap->recipe, ap->src, ap->used, ap->opt->allow_leftover,
                                     ap->cat, ap->err);
}

static int make_model(struct ckpt_apply *ap, struct ckpt_model **ret)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *m = calloc(1, sizeof *m);

    if (!m || !(m->recipe = strdup(ap->recipe->name)))
        return ckpt_nomem(ap->err);
    m->config = json_incref(ap->set.hf);
    m->made = ap->set.made ? json_incref(ap->set.made) : NULL;
    json_decref(ap->cat->config);
    ap->cat->config = json_incref(ap->set.hf);
    m->catalog = ckpt_steal(&ap->cat);
    *ret = ckpt_steal(&m);
    return 0;
}

int ckpt_recipe_apply(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                      const struct ckpt_recipe_options *opt, struct ckpt_model **ret,
                      struct ckpt_err *err)
{
    ckpt_cleanup(apply_release) struct ckpt_apply ap = {.src = src, .opt = opt, .err = err};

    return run(&ap, r) < 0 ? -1 : make_model(&ap, ret);
}

int ckpt_recipe_explain(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const char *name, json_t **ret,
                        struct ckpt_err *err)
{
    ckpt_cleanup(apply_release) struct ckpt_apply ap = {
        .src = src, .opt = opt, .explain = name, .err = err};

    if (run(&ap, r) < 0)
        return -1;
    if (!ap.explanation)
        return ckpt_fail(err, CKPT_MISSING, "the model has no tensor '%.200s'", name);
    *ret = ckpt_steal(&ap.explanation);
    return 0;
}

void ckpt_model_free(struct ckpt_model *m)
{
    if (!m)
        return;
    ckpt_catalog_free(m->catalog);
    json_decref(m->config);
    json_decref(m->made);
    free(m->recipe);
    free(m);
}
