/* SPDX-License-Identifier: Apache-2.0 */
/* Answers about the checkpoint of an open view. */
#include "model/describe.h"

#include <string.h>

#include "base/mem.h"
#include "format/reader.h"
#include "format/writer.h"
#include "model/opening.h"
#include "model/state.h"
#include "recipe/library/types.h"

int ckpt_describe_rule(const struct ckpt_view *v, const char *tensor, json_t **ret,
                       struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    ckpt_cleanup(ckpt_opening_release) struct ckpt_opening o = {
        .shared = v->shared, .dir = v->dir, .above = v->above, .step = ""};

    *ret = NULL;
    if (!v->recipe || (s->opt->output.writer && s->opt->output.writer->recipes))
        return 0; /* its rules know the hub's names only */
    if (ckpt_opening_begin(&o, err) < 0 || ckpt_opening_read(&o, err) < 0 ||
        ckpt_opening_identify(&o, err) < 0)
        return -1;
    const struct ckpt_recipe_options opt = ckpt_opening_recipe_options(&o);
    return ckpt_recipe_explain(s->recipes, o.cat, &opt, tensor, ret, err);
}

int ckpt_describe_sharding(const struct ckpt_view *v, struct ckpt_annotations **ret,
                           struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;

    return ckpt_annotations_new(s->recipes, v->cat, s->opt->raw ? NULL : v->config, ret, err);
}

/* Asks the view's reader, by its function `ask` (NULL: it has no such function), for an object. */
static int ask_reader(const struct ckpt_view *view,
                      int (*ask)(struct ckpt_dir *, const struct ckpt_reader_options *, json_t *,
                                 struct ckpt_err *),
                      json_t **ret, struct ckpt_err *err)
{
    const struct ckpt_shared *s = view->shared;
    const struct ckpt_reader_options opt = {
        .pool = s->pool, .log = &s->opt->log, .allow_partial = s->opt->allow_partial};
    ckpt_cleanup(ckpt_json_decrefp) json_t *out = json_object();

    if (!out)
        return ckpt_nomem(err);
    if (ask && ask(view->dir, &opt, out, err) < 0)
        return -1;
    *ret = ckpt_steal(&out);
    return 0;
}

int ckpt_describe_objects(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err)
{
    if (view->groups)
        return (*ret = json_pack("{s:o}", "optim.param_groups", json_deep_copy(view->groups)))
                   ? 0
                   : ckpt_nomem(err);
    const struct ckpt_reader *reader = ckpt_reader_probe(view->dir, err);
    return reader ? ask_reader(view, reader->objects, ret, err) : -1;
}

int ckpt_describe_states(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_opening_release) struct ckpt_opening o = {.shared = view->shared,
                                                                .dir = view->dir,
                                                                .above = view->above,
                                                                .around = view->around,
                                                                .step = "",
                                                                .lists_states = true};

    if (ckpt_opening_begin(&o, err) < 0)
        return -1;
    /* no optimizer is worth reading all headers again */
    if (o.reader->is_published || json_is_false(json_object_get(view->cat->about, "optimizer")))
        return (*ret = json_object()) ? 0 : ckpt_nomem(err);
    if (ckpt_opening_read(&o, err) < 0)
        return -1;
    return (*ret = ckpt_state_list(o.cat)) ? 0 : ckpt_nomem(err);
}

int ckpt_describe_paths(const struct ckpt_view *view, json_t **ret, struct ckpt_err *err)
{
    const struct ckpt_reader *reader = ckpt_reader_probe(view->dir, err);

    return reader ? ask_reader(view, reader->paths, ret, err) : -1;
}

/* ---- ties ---- */

/* The input embedding's name in this view; NULL: it has none. */
static const char *embedding_of(const struct ckpt_catalog *cat, const struct ckpt_type *type)
{
    for (size_t i = 0; i < type->embedding.n; i++)
        if (ckpt_catalog_find(cat, type->embedding.text[i]))
            return type->embedding.text[i];
    return NULL;
}

json_t *ckpt_describe_ties(const struct ckpt_shared *shared, const struct ckpt_catalog *cat,
                           const json_t *config)
{
    const struct ckpt_type *type =
        ckpt_types_find(ckpt_recipes_types(shared->recipes), ckpt_json_str(config, "model_type"));
    const bool is_known = type != ckpt_types_any(ckpt_recipes_types(shared->recipes));
    json_t *tied = json_object();

    if (!ckpt_json_bool(config, "tie_word_embeddings", false))
        return tied;
    for (size_t i = 0; i < type->ties.n && tied; i++) {
        const struct ckpt_text_pair *tie = &type->ties.pair[i];
        const char *to = tie->to ? tie->to : embedding_of(cat, type);
        /* for a type without facts of its own the list has the names of all types */
        if (!is_known && (!type->output.n || strcmp(tie->from, type->output.text[0]) != 0))
            continue;
        if (!to || ckpt_catalog_find(cat, tie->from) || !ckpt_catalog_find(cat, to))
            continue;
        ckpt_json_set(&tied, tie->from, json_string(to));
    }
    return tied;
}
