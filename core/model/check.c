/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a catalogue with the base's headers and with the numbers of config.json. */
#include "model/opening.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "model/dequantize.h"
#include "model/fit.h"
#include "recipe/language/name.h"

enum { SHOWN = 5 }; /* number of names that a text lists of each kind */

/* A text such as "3 ('a', 'b', ...)" that grows name by name. */
struct list {
    size_t n;
    struct ckpt_str text;
};

static void list_add(struct list *l, const char *text)
{
    if (l->n++ < SHOWN)
        ckpt_str_printf(&l->text, "%s%s", l->text.len ? ", " : "", text);
    else if (l->n == SHOWN + 1)
        ckpt_str_puts(&l->text, " ...");
}

struct report {
    struct list shapes, lost, missing, extra;
    size_t common;
};

static void report_release(struct report *r)
{
    struct list *all[] = {&r->shapes, &r->lost, &r->missing, &r->extra};

    for (size_t i = 0; i < 4; i++)
        ckpt_str_release(&all[i]->text);
}

static void put_list(struct ckpt_str *out, const char *what, const struct list *l)
{
    if (l->n)
        ckpt_str_printf(out, "%s%zu %s: %s", out->len ? "; " : "", l->n, what,
                        ckpt_str_get(&l->text));
}

/* ---- shapes ---- */

/* A number of the text model, which composite configs have below text_config: what some of them say
 * under the same key themselves is a default that nobody heeds. */
static bool text_number(const json_t *config, const char *key, uint64_t *ret)
{
    return ckpt_json_u64(json_object_get(config, "text_config"), key, ret) ||
           ckpt_json_u64(config, key, ret);
}

/* Was the vocabulary resized during training? Then the checkpoint's own config says so too. */
static bool vocab_was_resized(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                              const struct ckpt_tensor *b)
{
    uint64_t own, theirs;

    if (!o->shared->base || t->rank == 0 || !text_number(o->config, "vocab_size", &own) ||
        !text_number(o->shared->base->config, "vocab_size", &theirs) || own == theirs)
        return false;
    return t->dim[0] == own && b->dim[0] == theirs &&
           memcmp(t->dim + 1, b->dim + 1, (t->rank - 1) * sizeof *t->dim) == 0;
}

/* Does the shape fit the base's? Packed weights of a quantised base have another shape than the
 * weights that they represent. */
static bool fits(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                 const struct ckpt_tensor *b)
{
    return ckpt_fit_shape(t, b) || (t->rank == b->rank && vocab_was_resized(o, t, b));
}

static void add_shape(struct list *l, const struct ckpt_tensor *t, const char *where,
                      const uint64_t *dim, uint32_t rank)
{
    struct ckpt_str text = {0};

    ckpt_str_printf(&text, "'%s' is %s, but in %s it is %s", t->name,
                    ckpt_shape_text(t->dim, t->rank).text, where, ckpt_shape_text(dim, rank).text);
    list_add(l, ckpt_str_get(&text));
    ckpt_str_release(&text);
}

/* ---- names ---- */

/* Does the format list all tensors, so that none can be missing unnoticed? */
static bool lists_all(const struct ckpt_opening *o) { return o->decision.way == CKPT_WAY_MEMORY; }

/* May the model lack the tensor although its base has it: tied, computed, or needed only for a
 * quantisation? */
static bool may_be_absent(const struct ckpt_opening *o, const char *name)
{
    if (ckpt_texts_end(&ckpt_opening_type(o)->output, name))
        return !lists_all(o) || ckpt_json_bool(o->config, "tie_word_embeddings", true);
    return ckpt_texts_end(&ckpt_opening_type(o)->absent, name);
}

/* Is the base quantised, and the checkpoint not? */
static bool is_base_packed(const struct ckpt_opening *o)
{
    return ckpt_config_is_quantized(o->shared->base->config) && !ckpt_is_packed(o->cat);
}

/* The names of the base's tensors, in its order. */
struct names {
    struct ckpt_fit_model model;
    CKPT_VEC(const char *) list; /* the base's */
    CKPT_VEC(bool) seen;         /* the checkpoint has the tensor */
    struct ckpt_map map;
    struct ckpt_arena arena; /* memory of the forms */
    struct ckpt_map forms; /* skeletons of the names that were seen: the same for one tensor of all
                              layers and experts */
};

static void names_release(struct names *n)
{
    ckpt_fit_model_release(&n->model);
    ckpt_vec_release(&n->list);
    ckpt_vec_release(&n->seen);
    ckpt_map_release(&n->map);
    ckpt_map_release(&n->forms);
    ckpt_arena_release(&n->arena);
}

/* Collect the base's names. */
static int names_of_base(struct names *n, const struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;
    const char *name;

    n->model = (struct ckpt_fit_model){
        .cat = base->cat, .map = base->weight_map, .packed = is_base_packed(o)};
    if (ckpt_fit_model_init(&n->model, err) < 0)
        return -1;
    for (size_t i = 0; (name = ckpt_base_name_at(base->cat, base->weight_map, i)); i++)
        if (ckpt_map_add(&n->map, name, (uint32_t)i) == CKPT_NONE ||
            ckpt_vec_push(&n->list, name) < 0 || ckpt_vec_push(&n->seen, false) < 0)
            return ckpt_nomem(err);
    return 0;
}

static int add_form(struct names *n, const char *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str form = {0};
    const char *own;

    ckpt_name_skeleton(name, strlen(name), &form);
    if (!form.failed && ckpt_map_find(&n->forms, ckpt_str_get(&form)) != CKPT_NONE)
        return 0;
    return form.failed || !(own = ckpt_arena_strdup(&n->arena, ckpt_str_get(&form))) ||
                   ckpt_map_add(&n->forms, own, 0) == CKPT_NONE
               ? ckpt_nomem(err)
               : 0;
}

static int sort_missing(const struct ckpt_opening *o, struct names *n, struct report *r,
                        struct ckpt_err *err)
{
    const bool packed = is_base_packed(o);

    for (size_t i = 0; i < n->list.len; i++) {
        const char *name = n->list.ptr[i];
        ckpt_cleanup(ckpt_str_release) struct ckpt_str form = {0};
        if (n->seen.ptr[i] || (packed && ckpt_fit_stands_for(o->cat, name)))
            continue;
        ckpt_name_skeleton(name, strlen(name), &form);
        if (form.failed)
            return ckpt_nomem(err);
        if (strchr(ckpt_str_get(&form), '#') &&
            ckpt_map_find(&n->forms, ckpt_str_get(&form)) != CKPT_NONE)
            list_add(&r->lost, name);
        else if (!may_be_absent(o, name))
            list_add(&r->missing, name);
    }
    return 0;
}

/* ---- the base ---- */

static int compare_tensor(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                          struct names *n, struct report *r, struct ckpt_err *err)
{
    const char *name = ckpt_json_str_or(o->base_names, t->name, t->name);
    const uint32_t at = ckpt_map_find(&n->map, name);
    const struct ckpt_tensor *b;

    if (at == CKPT_NONE) {
        if (ckpt_fit_model_has(&n->model, name))
            r->common++;
        else
            list_add(&r->extra, t->name);
        return 0;
    }
    n->seen.ptr[at] = true;
    r->common++;
    b = o->shared->base->cat ? ckpt_catalog_find(o->shared->base->cat, name) : NULL;
    if (b && !fits(o, t, b))
        add_shape(&r->shapes, t, "the base", b->dim, b->rank);
    return add_form(n, name, err);
}

static int finish_report(struct ckpt_opening *o, struct report *r, struct ckpt_err *err)
{
    const bool absent = r->lost.n || (lists_all(o) && r->missing.n);
    const bool wrong = r->shapes.n || (absent && !o->shared->opt->allow_partial);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    put_list(&text, "of another shape", &r->shapes);
    put_list(&text, "lost, though other layers or experts have them", &r->lost);
    put_list(&text, "of the base are not in the checkpoint", &r->missing);
    put_list(&text, "are not in the base", &r->extra);
    if (!text.len)
        return 0;
    if (wrong)
        return ckpt_fail(err, r->shapes.n ? CKPT_CONFLICT : CKPT_MISSING,
                         "the checkpoint does not fit base '%s': %s%s",
                         ckpt_dir_path(o->shared->base->dir), ckpt_str_get(&text),
                         lists_all(o) ? " (missing=base takes what is missing from the base)"
                                      : "; is a shard lost?");
    ckpt_catalog_warn(o->cat, "compared with base '%s': %s", ckpt_dir_path(o->shared->base->dir),
                      ckpt_str_get(&text));
    return 0;
}

/* None of the base's names is among the tensors: the base is another model, or the names have a
 * prefix. Whoever loads the model would initialise all of it. */
static int tell_none(struct ckpt_opening *o, const struct names *n, struct ckpt_err *err)
{
    const char *base = ckpt_dir_path(o->shared->base->dir), *ours = o->cat->tensors.ptr[0].name;

    if (!o->shared->opt->allow_partial)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "the checkpoint does not fit base '%s': none of its %zu tensors ('%s' "
                         "...) is among the %zu of the checkpoint ('%s' ...); is base another "
                         "model's? (view=raw shows the tensors as they are, key_mapping renames "
                         "the base's)",
                         base, n->list.len, n->list.ptr[0], o->cat->tensors.len, ours);
    ckpt_catalog_warn(o->cat,
                      "compared with base '%s': none of its tensors ('%s' ...) is among those of "
                      "the checkpoint ('%s' ...)",
                      base, n->list.ptr[0], ours);
    return 0;
}

static int compare_base(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(names_release) struct names n = {0};
    ckpt_cleanup(report_release) struct report r = {0};

    if (names_of_base(&n, o, err) < 0)
        return -1;
    for (size_t i = 0; n.list.len && i < o->cat->tensors.len; i++)
        if (compare_tensor(o, &o->cat->tensors.ptr[i], &n, &r, err) < 0)
            return -1;
    if (n.list.len == 0 || o->cat->tensors.len == 0)
        return 0;
    if (r.common == 0)
        return tell_none(o, &n, err);
    return sort_missing(o, &n, &r, err) < 0 ? -1 : finish_report(o, &r, err);
}

/* ---- missing=base ---- */

/* May the model have the tensor although its base has it not: an output matrix of its own, or what
 * is no parameter? */
static bool may_be_more(const struct ckpt_opening *o, const char *name)
{
    const struct ckpt_type *type = ckpt_opening_type(o);

    return ckpt_texts_end(&type->output, name) || ckpt_texts_end(&type->buffers, name) ||
           ckpt_texts_end(&type->computed, name) || ckpt_texts_end(&type->absent, name);
}

/* Leave the tensors out whose name[] is NULL, of which `left` has the names. */
static int leave_out(struct ckpt_opening *o, const char *const *name, json_t *left,
                     const struct list *shown, struct ckpt_err *err)
{
    ckpt_catalog_warn(o->cat, "left out: %zu tensors of the checkpoint that base '%s' has not: %s",
                      shown->n, ckpt_dir_path(o->shared->base->dir), ckpt_str_get(&shown->text));
    return json_object_set(o->cat->about, "left_over", left) < 0
               ? ckpt_nomem(err)
               : ckpt_catalog_select(o->cat, name, err);
}

static int fail_left(const struct ckpt_opening *o, const struct list *left, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "missing=base: base '%s' has not %zu tensor%s of the checkpoint, so its own "
                     "might stand in for what was only renamed: %s; is a name misspelt, or has it "
                     "a prefix? (allow_leftover leaves such tensors out, key_mapping renames the "
                     "base's)",
                     ckpt_dir_path(o->shared->base->dir), left->n, left->n == 1 ? "" : "s",
                     ckpt_str_get(&left->text));
}

int ckpt_opening_check_taking(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_catalog *base = o->shared->base->cat;
    const bool by_recipe = o->decision.way == CKPT_WAY_RECIPE; /* then it knows all names */
    ckpt_cleanup(report_release) struct report r = {0};
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(o->cat);
    ckpt_cleanup(ckpt_json_decrefp) json_t *left = json_array();

    for (size_t i = 0; name && left && i < o->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        const struct ckpt_tensor *b =
            ckpt_catalog_find(base, ckpt_json_str_or(o->base_names, t->name, t->name));
        if (b && !fits(o, t, b))
            add_shape(&r.shapes, t, "the base", b->dim, b->rank);
        if (b || by_recipe || may_be_more(o, t->name))
            continue;
        list_add(&r.extra, t->name);
        ckpt_json_append(&left, json_string(t->name));
        name[i] = NULL;
    }
    if (!name || !left)
        return ckpt_nomem(err);
    if (r.shapes.n)
        return ckpt_fail(
            err, CKPT_CONFLICT, "the checkpoint does not fit base '%s': %zu of another shape: %s",
            ckpt_dir_path(o->shared->base->dir), r.shapes.n, ckpt_str_get(&r.shapes.text));
    if (r.extra.n == 0)
        return 0;
    return o->shared->opt->allow_leftover ? leave_out(o, name, left, &r.extra, err)
                                          : fail_left(o, &r.extra, err);
}

/* ---- config.json ---- */

static int fail_small(const struct ckpt_tensor *t, const uint64_t *want, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT,
                     "tensor '%s' is %s, by config.json it is %s; is a shard lost?", t->name,
                     ckpt_shape_text(t->dim, t->rank).text, ckpt_shape_text(want, t->rank).text);
}

/* The product of the numbers under these keys, 0 for no key; false: the config lacks one of them.
 */
static bool least_dim(const json_t *config, const struct ckpt_texts *keys, uint64_t *ret)
{
    uint64_t n;

    *ret = keys->n != 0;
    for (size_t i = 0; i < keys->n; i++)
        if (!text_number(config, keys->text[i], &n) || ckd_mul(ret, *ret, n))
            return false;
    return true;
}

static int compare_least(const struct ckpt_opening *o, const struct ckpt_least *least,
                         const struct ckpt_tensor *t, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *matched = NULL;
    uint64_t want[CKPT_LEAST_DIMS];
    bool small = false;

    if (t->rank != least->rank)
        return 0;
    if (ckpt_regex_sub(least->names, t->name, &matched, err) < 0)
        return ckpt_err_in(err, "%s: least", ckpt_opening_type(o)->name);
    for (uint32_t d = 0; matched && d < least->rank; d++) {
        if (!least_dim(o->config, &least->dim[d], &want[d]))
            return 0;
        small |= t->dim[d] < want[d];
        want[d] = least->dim[d].n ? want[d] : t->dim[d];
    }
    return small ? fail_small(t, want, err) : 0;
}

/* Check a dimension against the config. It only finds tensors that are smaller than every model of
 * the type has them, because that is the effect of a lost last shard. */
static int compare_config(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                          struct ckpt_err *err)
{
    const struct ckpt_leasts *leasts = &ckpt_opening_type(o)->least;

    for (size_t i = 0; i < leasts->n; i++)
        if (compare_least(o, &leasts->least[i], t, err) < 0)
            return -1;
    return 0;
}

/* Compare the number of a decoder's layers, if names count them, with the config. A difference is a
 * warning, not an error, because a few types count layers differently; layers for multi-token
 * prediction come in addition. */
static void compare_layers(struct ckpt_opening *o)
{
    const char *at = ckpt_opening_type(o)->layers;
    uint64_t want, extra = 0, have = 0, layer;

    if (!at || !text_number(o->config, "num_hidden_layers", &want))
        return;
    (void)text_number(o->config, "num_nextn_predict_layers", &extra);
    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        const char *name = o->cat->tensors.ptr[i].name;
        size_t n = ckpt_has_prefix(name, at) ? strspn(name + strlen(at), "0123456789") : 0;
        unsigned long long number;
        if (n && ckpt_parse_u64(name + strlen(at), n, &number) && (layer = number) >= have)
            have = layer + (layer != UINT64_MAX);
    }
    if (have && (have < want || have - want > extra))
        ckpt_catalog_warn(o->cat,
                          "the checkpoint has %" PRIu64 " layers, by config.json it has %" PRIu64,
                          have, want);
}

int ckpt_opening_check(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (o->shared->base && compare_base(o, err) < 0)
        return -1;
    for (size_t i = 0; o->config && i < o->cat->tensors.len; i++)
        if (compare_config(o, &o->cat->tensors.ptr[i], err) < 0)
            return -1;
    if (o->config)
        compare_layers(o);
    return 0;
}
