/* SPDX-License-Identifier: Apache-2.0 */
/* Finding tensors that were not used by a recipe. */
#include "recipe/apply/apply.h"

#include <stdlib.h>

#include "base/regex.h"
#include "base/str.h"
#include "tensor/read.h"

enum { MAX_SHOWN = 3 };

/* ---- tensors that nobody asked for ---- */

/* Remove from left[] the tensors that match pattern g (NULL: those that match no pattern): their
 * number, and their first names. */
static int take(const struct ckpt_catalog *src, bool *left, const struct ckpt_ignored *g,
                size_t *ret_n, struct ckpt_str *ret_names, struct ckpt_err *err)
{
    *ret_n = 0;
    for (size_t i = 0; i < src->tensors.len; i++) {
        ckpt_cleanup(ckpt_freep) char *replaced = NULL;
        const char *name = src->tensors.ptr[i].name;
        if (!left[i])
            continue;
        if (g && ckpt_regex_sub(g->names, name, &replaced, err) < 0)
            return -1;
        if (g && !replaced)
            continue;
        left[i] = false;
        if (*ret_n < MAX_SHOWN)
            ckpt_str_printf(ret_names, "%s'%.200s'", ret_names->len ? ", " : "", name);
        else if (*ret_n == MAX_SHOWN)
            ckpt_str_puts(ret_names, " ...");
        ++*ret_n;
    }
    return 0;
}

static int take_ignored(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
                        bool *left, struct ckpt_catalog *model, struct ckpt_err *err)
{
    for (size_t i = 0; i < recipe->ignores.len; i++) {
        const struct ckpt_ignored *g = &recipe->ignores.ptr[i];
        ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
        size_t n;
        if (recipe->backwards) {
            ckpt_catalog_warn(model, "there are no tensors '%s': %s", g->text, g->why);
            continue;
        }
        if (take(src, left, g, &n, &names, err) < 0)
            return ckpt_err_in(err, "%s: ignores[%zu]", recipe->name, i);
        if (n)
            ckpt_catalog_warn(model, "%zu tensors are left out: %s: %s", n, g->why,
                              ckpt_str_get(&names));
    }
    return 0;
}

int ckpt_leftover_check(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
                        const bool *used, bool allow, struct ckpt_catalog *model,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    ckpt_cleanup(ckpt_freep) bool *left = calloc(src->tensors.len + 1, sizeof *left);
    size_t n;

    if (!left)
        return ckpt_nomem(err);
    for (size_t i = 0; i < src->tensors.len; i++)
        left[i] = !used[i];
    if (take_ignored(recipe, src, left, model, err) < 0 ||
        take(src, left, NULL, &n, &names, err) < 0)
        return -1;
    if (n == 0)
        return 0;
    if (!allow)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "%zu tensors of the checkpoint are not part of the model that its config "
                         "describes (%s): %s; is a number of the config wrong, or base= another "
                         "model's? allow_leftover leaves them out",
                         n, recipe->name, ckpt_str_get(&names));
    ckpt_catalog_warn(model, "%zu tensors of the checkpoint are not part of the model: %s", n,
                      ckpt_str_get(&names));
    return 0;
}

/* ---- copies of tied tensors ---- */

void ckpt_tied_copies_release(struct ckpt_tied_copies *c)
{
    ckpt_catalog_free(c->cat);
    ckpt_vec_release(&c->original);
}

int ckpt_copy_differs(struct ckpt_catalog *cat, const char *copy, const char *original, bool allow,
                      struct ckpt_err *err)
{
    if (!allow)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "the config ties '%s' to '%s', but the checkpoint stores other values for "
                         "it: tie_word_embeddings=false keeps both, allow_leftover leaves it out",
                         copy, original);
    ckpt_catalog_warn(cat,
                      "'%s' is left out: the config ties it to '%s', though the checkpoint stores "
                      "other values for it",
                      copy, original);
    return 0;
}

/* Why the recipe leaves a copy out though its values differ; *ret is NULL if it does not say it. */
static int find_ignored(const struct ckpt_recipe *recipe, const char *name, const char **ret,
                        struct ckpt_err *err)
{
    *ret = NULL;
    for (size_t i = 0; i < recipe->ignores.len && !*ret; i++) {
        const struct ckpt_ignored *g = &recipe->ignores.ptr[i];
        ckpt_cleanup(ckpt_freep) char *replaced = NULL;
        if (ckpt_regex_sub(g->names, name, &replaced, err) < 0)
            return -1;
        *ret = replaced ? g->why : NULL;
    }
    return 0;
}

int ckpt_tied_copies_check(const struct ckpt_tied_copies *c, const struct ckpt_recipe *recipe,
                           bool allow, struct ckpt_catalog *model, struct ckpt_err *err)
{
    for (size_t i = 0; i < c->original.len; i++) {
        const struct ckpt_tensor *copy = &c->cat->tensors.ptr[i];
        const char *of = c->original.ptr[i];
        const struct ckpt_tensor *original = ckpt_catalog_find(model, of);
        const char *why;
        bool same = false;
        if (original && ckpt_tensor_same(copy, original, &same, err) < 0)
            return ckpt_err_in(err, "comparing '%s' with '%s', to which the config ties it",
                               copy->name, of);
        if (find_ignored(recipe, copy->name, &why, err) < 0)
            return -1;
        if (!same && why)
            ckpt_catalog_warn(model, "'%s' is left out: %s", copy->name, why);
        else if (!same && ckpt_copy_differs(model, copy->name, of, allow, err) < 0)
            return -1;
    }
    return 0;
}
