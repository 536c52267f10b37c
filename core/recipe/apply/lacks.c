/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a model's tensors with the list that its model file has for its config. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "recipe/apply/apply.h"
#include "recipe/library/recipes.h"
#include "recipe/library/settings.h"
#include "recipe/library/types.h"

/* The list of a model file is walked through as for a checkpoint that is to be written. */

void ckpt_lacks_release(struct ckpt_lacks *l)
{
    ckpt_str_release(&l->names);
    ckpt_str_release(&l->shapes);
}

/* ---- shapes ---- */

int ckpt_lacks_put_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *file = NULL;

    if (t->npiece && !(file = ckpt_source_name(t->cat->sources.ptr[t->piece[0].source])))
        return ckpt_nomem(err);
    ckpt_str_printf(out, "'%s'%s%s%s is %s", t->name, file ? " in '" : "", file ? file : "",
                    file ? "'" : "", ckpt_shape_text(t->dim, t->rank).text);
    return out->failed ? ckpt_nomem(err) : 0;
}

/* Are these the same dimensions of three or more in another order? Stacked experts are [in, out] in
 * some models and [out, in] in others of the same type, and transformers loads both. */
static bool is_rearranged(const struct ckpt_tensor *t, const uint64_t *want, uint32_t rank)
{
    bool taken[CKPT_MAX_RANK] = {false};

    for (uint32_t d = 0; d < t->rank && rank == t->rank; d++) {
        uint32_t k = 0;
        while (k < rank && (taken[k] || want[k] != t->dim[d]))
            k++;
        if (k == rank)
            return false;
        taken[k] = true;
    }
    return rank == t->rank && rank >= 3;
}

int ckpt_lacks_add_shape(struct ckpt_lacks *l, const struct ckpt_tensor *t, const uint64_t *want,
                         uint32_t rank, struct ckpt_err *err)
{
    if (l->quantized && (t->rank != 1 || rank != 1))
        return 0;
    if (!ckpt_dtype_is_castable(t->dtype)) /* integers are packed weights, as MLX has them */
        return 0;
    if (is_rearranged(t, want, rank))
        return 0;
    if (l->nshape++ >= CKPT_APPLY_LACKS)
        return 0;
    if (l->shapes.len)
        ckpt_str_puts(&l->shapes, ", ");
    if (ckpt_lacks_put_tensor(&l->shapes, t, err) < 0)
        return -1;
    ckpt_str_printf(&l->shapes, ", not %s", ckpt_shape_text(want, rank).text);
    return l->shapes.failed ? ckpt_nomem(err) : 0;
}

/* ---- names ---- */

/* Add the part of a name from the word before its first number on ("layers.0.mlp.weight"), by which
 * a part of a model is recognised below another prefix. */
static const char *tail_of(const char *name)
{
    const char *word = name;

    for (const char *dot; (dot = strchr(word, '.')); word = dot + 1)
        if (dot[1] >= '0' && dot[1] <= '9')
            return word;
    return NULL;
}

/* Does the list name the tensors of this catalogue, if it knows them below another prefix? A list
 * may have the names of a whole model, of which a class has one part, and the other way round. */
static int find_related(struct ckpt_apply *ap, const struct ckpt_family *f)
{
    struct ckpt_map tails = {0};
    const char *tail;
    int rc = 0;

    for (size_t i = 0; i < ap->src->tensors.len && rc == 0; i++)
        if ((tail = tail_of(ap->src->tensors.ptr[i].name)) &&
            ckpt_map_add(&tails, tail, (uint32_t)i) == CKPT_NONE)
            rc = ckpt_nomem(ap->err);
    ap->lacks->tails = &tails;
    if (rc == 0 && ckpt_apply_check(ap, &f->tensors) < 0)
        rc = -1;
    ap->lacks->tails = NULL;
    ckpt_map_release(&tails);
    return rc;
}

void ckpt_lacks_relate(struct ckpt_lacks *l, const struct ckpt_catalog *cat, const char *name)
{
    const char *tail = tail_of(name);
    const uint32_t i = tail ? ckpt_map_find(l->tails, tail) : CKPT_NONE;

    if (i == CKPT_NONE)
        return;
    const char *stored = cat->tensors.ptr[i].name;
    const size_t len = strlen(stored), own = strlen(name);
    l->related = true;
    l->behind |= len > own && stored[len - own - 1] == '.' && ckpt_has_suffix(stored, name);
}

/* ---- the class ---- */

/* Is the class one of transformers' for this type, as far as names tell: "LlamaForCausalLM" of
 * 'llama', but not "LlamaForCausalLMEagle3", a draft model whose head is smaller? */
static bool is_known_class(const struct ckpt_family *f, const json_t *config)
{
    static const char *const heads[] = {"Model",
                                        "ForCausalLM",
                                        "ForConditionalGeneration",
                                        "ForSequenceClassification",
                                        "ForTokenClassification",
                                        "ForQuestionAnswering"};
    static const char head[] = "ForCausalLM";
    const char *class = ckpt_config_class(config), *own = ckpt_config_class(f->config),
               *type = ckpt_json_str_or(config, "model_type", "");
    const size_t len = strlen(type) - (ckpt_has_suffix(type, "_text") ? strlen("_text") : 0);

    if (!class)
        return true;
    if (!ckpt_class_begins_as(class, type, len) &&
        !(own && ckpt_has_suffix(own, head) &&
          ckpt_class_begins_as(class, own, strlen(own) - strlen(head))))
        return false;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (ckpt_has_suffix(class, heads[i]))
            return true;
    return false;
}

/* ---- all of it ---- */

/* Why missing tensors of a model with this config are not told; NULL: they are. */
static const char *why_unchecked(const json_t *config)
{
    const char *class = ckpt_config_class(config);

    if (json_object_get(config, "quantization_config"))
        return "the model is quantised";
    if (!class || !ckpt_json_str(config, "model_type"))
        return "config.json does not name the model's class";
    return ckpt_has_suffix(class, "ForCausalLM") ? NULL : "no list has the tensors of its class";
}

/* A walk that ended early, because a number is not known, says nothing about what it did not see.
 */
static int conclude(struct ckpt_apply *ap, const struct ckpt_family *f, size_t n)
{
    struct ckpt_lacks *l = ap->lacks;

    l->n = n;
    if (ap->err->code && ap->err->code != CKPT_LIMIT) {
        l->unchecked = "config.json lacks a number of the model";
        return 0;
    }
    if (memchr(ap->used, true, ap->src->tensors.len))
        return 0;
    l->unchecked = "it has none of the model's tensors under their names";
    if (find_related(ap, f) < 0 && ap->err->code == CKPT_NOMEM)
        return -1;
    l->none = !l->related && !l->quantized;
    return 0;
}

static int count(const struct ckpt_family *f, const struct ckpt_catalog *cat, const json_t *config,
                 struct ckpt_lacks *ret, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = {.allow_partial = true, .allow_leftover = true};
    const struct ckpt_recipe recipe = {.name = f->name, .family = f, .backwards = true};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *remarks = NULL;
    ckpt_cleanup(ckpt_freep) bool *used = calloc(cat->tensors.len + 1, sizeof *used);
    struct ckpt_err own = {0};
    struct ckpt_apply ap = {
        .recipe = &recipe, .src = cat, .opt = &opt, .used = used, .lacks = ret, .err = &own};

    if (!used)
        return ckpt_nomem(err);
    if (ckpt_catalog_new(&remarks, err) < 0)
        return -1;
    int rc = ckpt_settings_of_config(&ap.set, f, config, err);
    ap.cat = remarks;
    ap.set.src = cat;
    if (rc == 0 && ((ckpt_apply_check(&ap, &f->tensors) < 0 && own.code == CKPT_NOMEM) ||
                    conclude(&ap, f, ap.nleft) < 0))
        rc = ckpt_nomem(err);
    ckpt_settings_release(&ap.set);
    ckpt_str_release(&ap.name);
    return rc;
}

int ckpt_recipe_lacks(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const json_t *config, struct ckpt_lacks *ret, struct ckpt_err *err)
{
    const struct ckpt_family *f = NULL;
    const char *type = ckpt_json_str(config, "model_type"), *why = why_unchecked(config);

    ret->quantized |= json_object_get(config, "quantization_config") != NULL;
    if (type && ckpt_recipes_family(set, type, &f, err) < 0)
        return -1;
    if (!f)
        ret->unchecked = "no list has the tensors of its model type";
    else if ((ret->listed = !f->open) && count(f, cat, config, ret, err) < 0)
        return -1;
    ret->own_class = f && !is_known_class(f, config);
    /* A causal model of transformers has no part below another prefix: nothing would be loaded. */
    ret->none |= ret->behind && !why && !ret->own_class && !json_object_get(config, "auto_map");
    if (why || (ret->quantized && f))
        ret->unchecked = why ? why : "the model is quantised";
    if (ret->unchecked)
        ret->n = 0;
    else if (ret->n > CKPT_APPLY_LACKS)
        ckpt_str_puts(&ret->names, ", ...");
    if (ret->nshape > CKPT_APPLY_LACKS)
        ckpt_str_puts(&ret->shapes, ", ...");
    return ret->names.failed || ret->shapes.failed ? ckpt_nomem(err) : 0;
}
