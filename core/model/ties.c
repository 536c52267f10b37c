/* SPDX-License-Identifier: Apache-2.0 */
/* Leaving out what a model has twice in memory, and transformers writes once. */
#include <string.h>

#include "base/str.h"
#include "model/bare.h"
#include "model/names.h"
#include "model/search.h"
#include "recipe/apply/apply.h"
#include "tensor/read.h"

size_t ckpt_search_find(const struct ckpt_search *n, const char *name)
{
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (n->name[i] && strcmp(n->name[i], name) == 0)
            return i;
    return SIZE_MAX;
}

/* The tensor that a type's fact names. */
static size_t find_known(const struct ckpt_search *n, const char *name)
{
    return ckpt_search_find(n, n->bare ? ckpt_bare_name(n->type, name) : name);
}

static size_t find_anchor(const struct ckpt_search *n)
{
    return n->anchor ? ckpt_search_find(n, n->anchor) : SIZE_MAX;
}

static int same_values(const struct ckpt_search *n, size_t a, size_t b, bool *ret,
                       struct ckpt_err *err)
{
    const struct ckpt_tensor *t = n->cat->tensors.ptr;

    return ckpt_tensor_same(&t[a], &t[b], ret, err);
}

/* Check that a tied tensor, which is left out, has the same values as the one that it is tied to.
 */
static int check_copy(const struct ckpt_search *n, size_t copy, size_t of, struct ckpt_err *err)
{
    bool same;

    if (same_values(n, copy, of, &same, err) < 0)
        return -1;
    return same ? 0 : ckpt_copy_differs(n->cat, n->name[copy], n->name[of], n->allow_leftover, err);
}

/* Is the tensor `copy` one of the tied tensor `of`? If the config says so, other values are a
 * CONFLICT. */
static int is_copy(const struct ckpt_search *n, size_t copy, size_t of, bool said, bool *ret,
                   struct ckpt_err *err)
{
    *ret = said;
    if (of == SIZE_MAX)
        return 0;
    return said ? check_copy(n, copy, of, err) : same_values(n, copy, of, ret, err);
}

/* Drop the copy, or give it the embedding's name if that is not there. */
static int drop_copy(struct ckpt_search *n, size_t copy, size_t of, struct ckpt_err *err)
{
    n->name[copy] = of == SIZE_MAX ? ckpt_arena_strdup(&n->cat->arena, n->anchor) : NULL;
    return of == SIZE_MAX && !n->name[copy] ? ckpt_nomem(err) : 0;
}

bool ckpt_names_tie(const struct ckpt_type *type, const json_t *config)
{
    const json_t *text = json_object_get(config, "text_config");

    return ckpt_json_bool(config, "tie_word_embeddings",
                          ckpt_json_bool(text, "tie_word_embeddings", type->tied));
}

/* Does config.json alone decide? Not where the base, whose names the checkpoint has, has the tensor
 * as well: some classes do not tie what their config says. */
static bool is_said(const struct ckpt_search *n, size_t copy)
{
    return json_is_boolean(json_object_get(n->config, "tie_word_embeddings")) &&
           !(n->follow && ckpt_fit_model_has(n->follow, n->name[copy]));
}

/* Drop tied tensors. transformers writes them once, under the name of the input embedding; a state
 * dict without duplicates may have the output embedding's name instead. A model of several parts
 * may leave it to the text model's config, which does not tell whether the class heeds it, and a
 * few types tie without saying so: then the values decide. */
int ckpt_search_drop_tied(struct ckpt_search *n, struct ckpt_err *err)
{
    if (!n->anchor || !ckpt_names_tie(n->type, n->config))
        return 0;
    for (size_t i = 0; i < n->type->ties.n; i++) {
        const struct ckpt_text_pair *tie = &n->type->ties.pair[i];
        const size_t copy = find_known(n, tie->from),
                     of = tie->to ? find_known(n, tie->to) : find_anchor(n);
        bool same;
        if (copy == SIZE_MAX || copy == of || (of == SIZE_MAX && tie->to))
            continue;
        if (is_copy(n, copy, of, is_said(n, copy), &same, err) < 0 ||
            (same && drop_copy(n, copy, of, err) < 0))
            return -1;
    }
    return 0;
}

/* ---- a model under the hub's names that has a tied matrix by its other name alone ---- */

/* The last module of a name, with the rest: "embed_tokens.weight" of "model.embed_tokens.weight".
 */
static const char *last_module(const char *name)
{
    const char *at = strrchr(name, '.');

    while (at && at > name && at[-1] != '.')
        at--;
    return at ? at : name;
}

/* Has the model a tensor that is named like one of the type's embeddings, wherever it stands? */
static bool has_embedding(const struct ckpt_type *type, const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < type->embedding.n; i++) {
        const char *tail = last_module(type->embedding.text[i]);
        for (size_t k = 0; k < cat->tensors.len; k++)
            if (ckpt_name_before(cat->tensors.ptr[k].name, tail) != SIZE_MAX)
                return true;
    }
    return false;
}

/* The type's embedding that stands among tensors of this model, to judge by the modules around it;
 * NULL: none does. */
static const char *embedding_of(const struct ckpt_type *type, const struct ckpt_catalog *cat)
{
    const char *best = NULL;
    size_t most = 0;

    for (size_t i = 0; i < type->embedding.n; i++) {
        const char *name = type->embedding.text[i];
        const size_t len = (size_t)(last_module(name) - name);
        size_t n = 0;
        for (size_t k = 0; len && k < cat->tensors.len; k++)
            n += strncmp(cat->tensors.ptr[k].name, name, len) == 0;
        if (n > most || (n && n == most && strlen(name) > strlen(best))) {
            best = name;
            most = n;
        }
    }
    return best;
}

int ckpt_ties_name_embedding(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config;
    const struct ckpt_type *type = ckpt_opening_hub_type(o, &config);
    const char *embedding =
        config && !has_embedding(type, o->cat) ? embedding_of(type, o->cat) : NULL;

    for (size_t i = 0; embedding && ckpt_names_tie(type, config) && i < type->ties.n; i++) {
        const char *from = type->ties.pair[i].from,
                   *to = type->ties.pair[i].to ? type->ties.pair[i].to : embedding;
        const struct ckpt_tensor *only = ckpt_catalog_find(o->cat, from);
        if (!only || ckpt_catalog_find(o->cat, to))
            continue;
        ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(o->cat);
        if (!name)
            return ckpt_nomem(err);
        name[only - o->cat->tensors.ptr] = to;
        ckpt_catalog_note(o->cat, "'%s' is shown as '%s', to which the config ties it", from, to);
        return ckpt_opening_rename(o, name, err);
    }
    return 0;
}

/* ---- copies that nobody has listed ---- */

enum {
    MOST_COPIES = 64, /* so many tensors are looked at that the base has not */
    MOST_PAIRS = 4096 /* so many tensors are compared with them, each by samples */
};

/* Is the beginning of the tensor one value, many times, as that of a fresh norm or bias is? Then
 * equal values do not show a copy. */
static int is_uniform(const struct ckpt_tensor *t, bool *ret, struct ckpt_err *err)
{
    const size_t size = ckpt_dtype_size((enum ckpt_dtype)t->dtype);
    const uint64_t nbytes = ckpt_tensor_nbytes(t);
    unsigned char begin[1024];
    const size_t len = nbytes < sizeof begin ? (size_t)nbytes : sizeof begin;
    struct ckpt_reading rd = {0};

    if (len && ckpt_tensor_pread(t, &rd, begin, len, 0, err) < 0)
        return -1;
    *ret = len <= size || memcmp(begin, begin + size, len - size) == 0;
    return 0;
}

/* Find a tensor that the base has and of which this one is a copy; SIZE_MAX: there is none. */
static int find_original(const struct ckpt_search *n, size_t copy, size_t *pairs, size_t *ret,
                         struct ckpt_err *err)
{
    const struct ckpt_tensor *t = n->cat->tensors.ptr;
    bool same = false, uniform = false;

    *ret = SIZE_MAX;
    for (size_t i = 0; !same && i < n->cat->tensors.len && *pairs; i++) {
        if (i == copy || !n->name[i] || t[i].dtype != t[copy].dtype || t[i].rank != t[copy].rank ||
            memcmp(t[i].dim, t[copy].dim, t[i].rank * sizeof *t[i].dim) != 0 ||
            !ckpt_fit_model_has(n->follow, n->name[i]))
            continue;
        --*pairs;
        if (same_values(n, copy, i, &same, err) < 0)
            return -1;
        *ret = same ? i : SIZE_MAX;
    }
    if (same && is_uniform(&t[copy], &uniform, err) < 0)
        return -1;
    if (same && uniform)
        *ret = SIZE_MAX;
    return 0;
}

int ckpt_search_drop_copies(struct ckpt_search *n, struct ckpt_err *err)
{
    size_t pairs = MOST_PAIRS, looked = 0, dropped = 0;
    const char *first = NULL, *of = NULL;

    for (size_t i = 0; n->follow && i < n->cat->tensors.len && looked < MOST_COPIES; i++) {
        size_t original;
        if (!n->name[i] || ckpt_fit_model_has(n->follow, n->name[i]))
            continue;
        looked++;
        if (find_original(n, i, &pairs, &original, err) < 0)
            return -1;
        if (original == SIZE_MAX)
            continue;
        if (dropped++ == 0) {
            first = n->name[i];
            of = n->name[original];
        }
        n->name[i] = NULL;
    }
    if (dropped)
        ckpt_catalog_warn(n->cat,
                          "left out: %zu tensor%s that the base has not, and that %s of one that "
                          "it has ('%s' is '%s')",
                          dropped, dropped == 1 ? "" : "s",
                          dropped == 1 ? "is a copy" : "are copies", first, of);
    return 0;
}
