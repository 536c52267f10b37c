/* SPDX-License-Identifier: Apache-2.0 */
/* Counting, for each prefix, how much of a model is below it. */
#include "model/fit.h"

#include <string.h>

#include "base/str.h"
#include "base/vec.h"

/* ---- the model ---- */

/* The length of a name's part before the last word, without the dot; 0: it is one word. */
static size_t module_len(const char *name)
{
    const char *dot = strrchr(name, '.');

    return dot ? (size_t)(dot - name) : 0;
}

static const char *name_at(const struct ckpt_fit_model *m, size_t i)
{
    return m->cat ? m->cat->tensors.ptr[i].name : m->map->tensors.ptr[i].tensor;
}

int ckpt_fit_model_init(struct ckpt_fit_model *m, struct ckpt_err *err)
{
    uint32_t value;
    bool is_new;

    for (size_t i = 0; m->packed && i < ckpt_fit_model_len(m); i++) {
        const char *name = name_at(m, i);
        if (ckpt_map_put(&m->modules, name, module_len(name), 0, &value, &is_new) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

void ckpt_fit_model_release(struct ckpt_fit_model *m) { ckpt_map_release(&m->modules); }

size_t ckpt_fit_model_len(const struct ckpt_fit_model *m)
{
    return m->cat ? m->cat->tensors.len : m->map ? m->map->tensors.len : 0;
}

/* Has a model that is packed something in the place of the tensor: other tensors of a module in
 * that of its weight, or blocks and their scales? */
static bool has_packed(const struct ckpt_fit_model *m, const char *name)
{
    ckpt_cleanup(ckpt_freep) char *blocks = NULL;
    uint32_t value;

    if (!m->packed)
        return false;
    if (ckpt_has_suffix(name, ".weight"))
        return ckpt_map_get(&m->modules, name, module_len(name), &value);
    return (blocks = ckpt_asprintf("%s_blocks", name)) && m->cat &&
           ckpt_catalog_find(m->cat, blocks);
}

static bool find(const struct ckpt_fit_model *m, const char *name, const struct ckpt_tensor **ret)
{
    *ret = m->cat ? ckpt_catalog_find(m->cat, name) : NULL;
    return *ret || (!m->cat && m->map && ckpt_weight_map_find(m->map, name) != UINT32_MAX) ||
           has_packed(m, name);
}

bool ckpt_fit_model_has(const struct ckpt_fit_model *m, const char *name)
{
    const struct ckpt_tensor *t;

    return find(m, name, &t);
}

bool ckpt_fit_stands_for(const struct ckpt_catalog *cat, const char *packed)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str name = {0};

    for (size_t len = strlen(packed); len; len--) {
        if (packed[len] != '.')
            continue;
        ckpt_str_clear(&name);
        ckpt_str_printf(&name, "%.*s.weight", (int)len, packed);
        if (name.failed)
            return false;
        if (ckpt_catalog_find(cat, ckpt_str_get(&name)))
            return true;
        name.ptr[len] = '\0';
        if (ckpt_catalog_find(cat, name.ptr))
            return true;
    }
    return false;
}

bool ckpt_fit_shape(const struct ckpt_tensor *t, const struct ckpt_tensor *model)
{
    if (ckpt_dtype_is_float(t->dtype) != ckpt_dtype_is_float(model->dtype))
        return true;
    return t->rank == model->rank && memcmp(t->dim, model->dim, t->rank * sizeof *t->dim) == 0;
}

/* ---- places ---- */

struct counting {
    const struct ckpt_fit_model *model;
    struct ckpt_map prefixes; /* their places in the list */
    CKPT_VEC(struct ckpt_fit) places;
};

static void counting_release(struct counting *c)
{
    ckpt_map_release(&c->prefixes);
    ckpt_vec_release(&c->places);
}

static int count(struct counting *c, const char *name, size_t len, bool shaped,
                 struct ckpt_err *err)
{
    uint32_t at;
    bool is_new;

    if (ckpt_map_put(&c->prefixes, name, len, (uint32_t)c->places.len, &at, &is_new) < 0 ||
        (is_new && ckpt_vec_push(&c->places, ((struct ckpt_fit){.at = name, .len = len})) < 0))
        return ckpt_nomem(err);
    c->places.ptr[at].named++;
    c->places.ptr[at].shaped += shaped;
    return 0;
}

/* Count the prefixes below which the tensor is one of the model's. */
static int count_tensor(struct counting *c, const struct ckpt_tensor *t, const char *name,
                        struct ckpt_err *err)
{
    for (const char *at = name; at; at = strchr(at, '.')) {
        const struct ckpt_tensor *theirs;
        at += at > name;
        if (find(c->model, at, &theirs) &&
            count(c, name, (size_t)(at - name), !theirs || ckpt_fit_shape(t, theirs), err) < 0)
            return -1;
    }
    return 0;
}

bool ckpt_fit_better(const struct ckpt_fit *a, const struct ckpt_fit *b)
{
    return a->shaped > b->shaped || (a->shaped == b->shaped && a->named > b->named);
}

/* Are tensors of another shape the only ones that fit? Then the names decide, and who compares the
 * shapes later tells of them. */
static size_t fitting(const struct ckpt_fit *f, bool by_shape)
{
    return by_shape ? f->shaped : f->named;
}

/* Choose the best place, and one that is as good, if there is one. */
static bool choose(const struct counting *c, size_t all, bool by_shape, struct ckpt_fit *ret)
{
    const struct ckpt_fit *best = NULL, *second = NULL;

    for (size_t i = 0; i < c->places.len; i++) {
        const struct ckpt_fit *f = &c->places.ptr[i];
        if (fitting(f, by_shape) * 2 <= all)
            continue;
        if (!best || ckpt_fit_better(f, best)) {
            second = best;
            best = f;
        } else if (!second || ckpt_fit_better(f, second)) {
            second = f;
        }
    }
    if (!best)
        return false;
    *ret = *best;
    ret->two = second ? second->at : NULL;
    ret->two_len = second ? second->len : 0;
    return true;
}

int ckpt_fit_find(const struct ckpt_catalog *cat, const char *const *name,
                  const struct ckpt_fit_model *model, struct ckpt_fit *ret, bool *ret_found,
                  struct ckpt_err *err)
{
    ckpt_cleanup(counting_release) struct counting c = {.model = model};
    size_t own = 0;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        own += name[i] != NULL;
        if (name[i] && count_tensor(&c, &cat->tensors.ptr[i], name[i], err) < 0)
            return -1;
    }
    const size_t theirs = ckpt_fit_model_len(model), all = own < theirs ? own : theirs;
    *ret_found = choose(&c, all, true, ret) || choose(&c, all, false, ret);
    return 0;
}
