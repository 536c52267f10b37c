/* SPDX-License-Identifier: Apache-2.0 */
/* Finding a tensor's item in a model file by its name, and computing sharding annotations from the
 * item's pattern. */
#include "recipe/apply/sharding.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/library/recipes.h"
#include "recipe/library/settings.h"

/* A model file bound to the numbers of a config; settings.family is NULL if there is none. */
struct bound_file {
    struct ckpt_settings settings;
    CKPT_VEC(const struct ckpt_model_item *) items; /* tensors */
};

struct ckpt_annotations {
    const struct ckpt_catalog *cat;
    const json_t *config;
    const struct ckpt_type *type;
    struct bound_file own;    /* the model type's own file */
    struct bound_file common; /* the names that most types give the parts of layers */
    bool has_head;
};

/* ---- shares ---- */

struct walk {
    struct ckpt_sizes *sizes;
    const char *tensor;
    struct ckpt_shares *out;
    struct ckpt_err *err;
};

static int factor_size(struct walk *w, const struct ckpt_factor *f, uint64_t *ret)
{
    uint32_t var = 0;

    if (ckpt_factor_size(f, w->sizes, ret, &var) == CKPT_SIZE_KNOWN)
        return 0;
    return ckpt_fail(w->err, CKPT_MISSING,
                     "tensor '%s': how it is divided is not known, since config.json lacks a size",
                     w->tensor);
}

bool ckpt_factor_is_marked(const struct ckpt_factor *f)
{
    for (uint16_t i = 0; !f->rank && i < f->nchild; i++)
        if (ckpt_factor_is_marked(&f->child[i]))
            return true;
    return f->rank != NULL;
}

static int add_share(struct walk *w, const struct ckpt_share *s)
{
    struct ckpt_shares *out = w->out;
    struct ckpt_share *last = out->n ? &out->share[out->n - 1] : NULL;

    if (last && s->way == CKPT_WAYS && last->way == CKPT_WAYS && last->lo + last->n == s->lo) {
        last->n += s->n;
        return 0;
    }
    if (out->n == CKPT_SHARES)
        return ckpt_fail(w->err, CKPT_UNSUPPORTED, "tensor '%s' is divided into too many parts",
                         w->tensor);
    out->share[out->n++] = *s;
    return 0;
}

/* The name of an axis, or of its size where it has one of its own. */
static const char *axis_name(const struct walk *w, const struct ckpt_factor *f)
{
    const struct ckpt_scope *sc = w->sizes->scope;

    if (f->kind != CKPT_FACTOR_AXIS)
        return "";
    const struct ckpt_scope_axis *a = &sc->axis[f->axis];
    return a->var >= 0 ? sc->var[a->var].name : a->name;
}

static int add_marked(struct walk *w, const struct ckpt_factor *f, uint64_t lo, uint64_t size,
                      uint64_t inner)
{
    struct ckpt_share s = {.lo = lo, .n = size * inner, .way = CKPT_WAYS};
    const struct ckpt_factor *g = f; /* the content of the parentheses */

    s.of_experts = strcmp(f->rank, "etp") == 0;
    if (s.of_experts || strcmp(f->rank, "tp") == 0)
        s.way = CKPT_TP;
    if (strcmp(f->rank, "ep") == 0)
        s.way = CKPT_EP;
    while (g->kind == CKPT_FACTOR_PRODUCT && g->nchild == 1)
        g = &g->child[0];
    const struct ckpt_factor *lead = g->kind == CKPT_FACTOR_PRODUCT ? &g->child[0] : g;
    s.what = axis_name(w, lead);
    s.shared = f->shared;
    if (g->kind == CKPT_FACTOR_PRODUCT && factor_size(w, lead, &s.groups) < 0)
        return -1;
    if (g->kind != CKPT_FACTOR_PRODUCT && inner > 1)
        s.groups = size;
    return add_share(w, &s);
}

/* Add a factor that begins at lo, each element of which represents `inner` elements of the
 * dimension. */
static int add_factor(struct walk *w, const struct ckpt_factor *f, uint64_t lo, uint64_t inner)
{
    uint64_t size, outer = 1, within = inner;
    uint16_t marked = 0;

    if (factor_size(w, f, &size) < 0)
        return -1;
    if (f->rank)
        return add_marked(w, f, lo, size, inner);
    if (!ckpt_factor_is_marked(f))
        return add_share(w, &(struct ckpt_share){.lo = lo, .n = size * inner, .way = CKPT_WAYS});
    if (f->kind == CKPT_FACTOR_SUM) {
        for (uint16_t i = 0; i < f->nchild; i++) {
            if (add_factor(w, &f->child[i], lo, inner) < 0 ||
                factor_size(w, &f->child[i], &size) < 0)
                return -1;
            lo += size * inner;
        }
        return 0;
    }
    while (!ckpt_factor_is_marked(&f->child[marked]))
        marked++;
    for (uint16_t i = 0; i < f->nchild; i++) {
        if (i != marked && ckpt_factor_is_marked(&f->child[i]))
            return ckpt_fail(w->err, CKPT_UNSUPPORTED, "tensor '%s' is divided twice", w->tensor);
        if (factor_size(w, &f->child[i], &size) < 0)
            return -1;
        if (i < marked)
            outer *= size;
        if (i > marked)
            within *= size;
    }
    if (factor_size(w, &f->child[marked], &size) < 0)
        return -1;
    for (uint64_t o = 0; o < outer; o++)
        if (add_factor(w, &f->child[marked], lo + o * size * within, within) < 0)
            return -1;
    return 0;
}

int ckpt_shares_of(const struct ckpt_factor *f, uint64_t n, struct ckpt_sizes *sizes,
                   const char *tensor, struct ckpt_shares *ret, struct ckpt_err *err)
{
    struct walk w = {.sizes = sizes, .tensor = tensor, .out = ret, .err = err};

    ret->n = 0;
    if (!f || !ckpt_factor_is_marked(f))
        return add_share(&w, &(struct ckpt_share){.n = n, .way = CKPT_WAYS});
    (void)ckpt_factor_solve(f, sizes, n, true); /* for a size that the config does not give */
    if (add_factor(&w, f, 0, 1) < 0)
        return -1;
    const struct ckpt_share *last = ret->n ? &ret->share[ret->n - 1] : NULL;
    if (last && last->lo + last->n == n)
        return 0;
    /* the sizes come from config.json, the tensor from the checkpoint */
    return ckpt_fail(err, CKPT_CONFLICT,
                     "tensor '%s' has a dimension of %" PRIu64 ", config.json makes it %" PRIu64,
                     tensor, n, last ? last->lo + last->n : 0);
}

uint32_t ckpt_share_parts(const struct ckpt_share *s, uint32_t tp)
{
    if (s->groups == 0 || s->groups % tp == 0)
        return tp;
    return s->shared && tp % s->groups == 0 ? (uint32_t)s->groups : 0;
}

/* ---- model files ---- */

static bool bound_dim(const struct bound_file *b, const char *name, uint64_t *ret)
{
    return b->settings.family && ckpt_settings_dim(&b->settings, name, ret);
}

static int collect_items(struct bound_file *b, const struct ckpt_model_items *list,
                         struct ckpt_err *err)
{
    for (size_t i = 0; i < list->n; i++) {
        const struct ckpt_model_item *it = &list->item[i];
        if (it->scope && ckpt_vec_push(&b->items, it) < 0)
            return ckpt_nomem(err);
        for (size_t k = 0; k < it->nlist; k++)
            if (collect_items(b, &it->list[k], err) < 0)
                return -1;
    }
    return 0;
}

static int bind_file(struct bound_file *b, const json_t *config, const struct ckpt_family *f,
                     struct ckpt_err *err)
{
    return ckpt_settings_of_config(&b->settings, f, config, err) < 0
               ? -1
               : collect_items(b, &f->tensors, err);
}

static void bound_release(struct bound_file *b)
{
    ckpt_settings_release(&b->settings);
    ckpt_vec_release(&b->items);
}

int ckpt_annotations_new(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                         const json_t *config, struct ckpt_annotations **ret, struct ckpt_err *err)
{
    const char *type = ckpt_json_str(config, "model_type");
    const struct ckpt_family *own = NULL, *common = NULL;
    ckpt_cleanup(ckpt_annotations_freep) struct ckpt_annotations *m = calloc(1, sizeof *m);

    if (!m)
        return ckpt_nomem(err);
    m->cat = cat;
    m->config = config;
    m->type = ckpt_types_find(ckpt_recipes_types(set), type);
    for (size_t i = 0; i < cat->tensors.len; i++)
        m->has_head |= ckpt_texts_in(&m->type->stages.last, cat->tensors.ptr[i].name);
    if (type && (ckpt_recipes_family(set, type, &own, err) < 0 ||
                 ckpt_recipes_common(set, &common, err) < 0 ||
                 (own && bind_file(&m->own, config, own, err) < 0) ||
                 bind_file(&m->common, config, common, err) < 0))
        return -1;
    *ret = ckpt_steal(&m);
    return 0;
}

void ckpt_annotations_free(struct ckpt_annotations *m)
{
    if (!m)
        return;
    bound_release(&m->own);
    bound_release(&m->common);
    free(m);
}

bool ckpt_annotations_has_head(const struct ckpt_annotations *m) { return m->has_head; }

/* ---- names ---- */

/* How a tensor of scales or codes is divided like the weight with the same name except for the
 * suffix. */
struct follower {
    const char *end;
    uint32_t from[4]; /* for each dimension the corresponding one of the weight */
    uint32_t block[4];
    bool by_config; /* blocks as config.json says */
};

static const struct follower followers[] = {
    {"_scale_inv", {0, 1, 2, 3}, {0}, true},
    {"_scale", {0, 1, 2, 3}, {0}, true},
    {"_blocks", {0, 2, 1, 3}, {1, 1, 32, 1}, false}, /* MXFP4: 32 codes share a scale */
    {"_scales", {0, 2, 1, 3}, {1, 1, 32, 1}, false},
};

/* The result of looking up a tensor's name. */
struct entry {
    const struct bound_file *file;
    const struct ckpt_model_item *item; /* NULL: not found */
    uint64_t number[CKPT_NAME_NUMBERS];
    const struct follower *follower; /* NULL: the tensor is the item's own */
};

/* Match a common name with the end of a tensor's name, because prefixes differ. In addition to
 * names in layers, there are common names of parts outside of any layer. */
static bool match_end(const struct ckpt_model_item *it, const char *name, size_t len,
                      uint64_t *number)
{
    const bool in_layer = it->name->axes != 0;

    for (const char *at = name; at && at < name + len;) {
        if (ckpt_name_match(it->name, at, len - (size_t)(at - name), number))
            return true;
        if (!in_layer && *at >= '0' && *at <= '9')
            return false;
        at = memchr(at, '.', len - (size_t)(at - name));
        if (at)
            at++;
    }
    return false;
}

static bool find_in(const struct bound_file *b, bool ends, const char *name, size_t len,
                    uint32_t rank, struct entry *ret)
{
    for (size_t i = 0; i < b->items.len; i++) {
        const struct ckpt_model_item *it = b->items.ptr[i];
        if (rank && it->shape.ndim != rank)
            continue;
        if (ends ? match_end(it, name, len, ret->number)
                 : ckpt_name_match(it->name, name, len, ret->number)) {
            ret->file = b;
            ret->item = it;
            return true;
        }
    }
    return false;
}

/* Does the tensor belong to an encoder of another modality, or to layers for multi-token
 * prediction, which are not counted as layers? */
static bool is_beside(const struct ckpt_annotations *m, const char *name)
{
    return ckpt_texts_in(&m->type->stages.beside, name);
}

/* rank 0: any rank matches */
static bool find_name(const struct ckpt_annotations *m, const char *name, size_t len, uint32_t rank,
                      struct entry *ret)
{
    return find_in(&m->own, false, name, len, rank, ret) ||
           (!is_beside(m, name) && find_in(&m->common, true, name, len, rank, ret));
}

static void find_entry(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                       struct entry *ret)
{
    const size_t len = strlen(t->name);

    *ret = (struct entry){0};
    if (find_name(m, t->name, len, t->rank, ret))
        return;
    for (size_t i = 0; i < sizeof followers / sizeof *followers; i++) {
        const struct follower *f = &followers[i];
        if (ckpt_has_suffix(t->name, f->end) &&
            find_name(m, t->name, len - strlen(f->end), 0, ret)) {
            ret->follower = f;
            return;
        }
    }
}

/* The number of an axis in a tensor's name. */
static bool name_number(const struct entry *e, const char *axis, uint64_t *ret)
{
    size_t k = 0;

    for (uint32_t p = 0; e->item && p < e->item->name->npart; p++) {
        const struct ckpt_name_part *part = &e->item->name->part[p];
        if (part->text)
            continue;
        if (part->naxis == 1 && strcmp(e->item->scope->axis[part->axis[0]].name, axis) == 0) {
            *ret = e->number[k];
            return true;
        }
        k++;
    }
    return false;
}

/* Find a layer's number in a name that no file describes: "...layers.3....". */
static bool loose_layer(const struct ckpt_texts *before, const char *name, uint64_t *ret)
{
    for (const char *at = name;; at++) {
        for (size_t i = 0; i < before->n; i++) {
            unsigned long long n;
            if (!ckpt_has_prefix(at, before->text[i]))
                continue;
            const char *digits = at + strlen(before->text[i]);
            if (ckpt_parse_u64(digits, strspn(digits, "0123456789"), &n)) {
                *ret = n;
                return true;
            }
        }
        at = strchr(at, '.');
        if (!at)
            return false;
    }
}

/* ---- scales and codes ---- */

/* The division of a dimension in which one element represents `block` elements of the weight's
 * dimension: as for the weight if all cuts are between blocks, else every rank has the whole. */
static bool shrink(const struct ckpt_shares *of, uint64_t block, uint64_t n, uint32_t tp,
                   uint32_t ep, struct ckpt_shares *out)
{
    *out = *of;
    for (size_t i = 0; i < of->n; i++) {
        struct ckpt_share *s = &out->share[i];
        const uint32_t parts = s->way == CKPT_TP   ? ckpt_share_parts(s, tp)
                               : s->way == CKPT_EP ? ep
                                                   : 1;
        if (parts == 0 || s->lo % block || (parts > 1 && ((s->n + parts - 1) / parts) % block != 0))
            return false;
        s->lo /= block;
        s->n = (s->n + block - 1) / block;
    }
    return of->n && out->share[of->n - 1].lo + out->share[of->n - 1].n == n;
}

/* The block of one scale in rows and columns; 0: the config does not say it. */
static uint64_t config_block(const json_t *config, uint32_t back)
{
    const json_t *list = ckpt_json_at(config, "quantization_config.weight_block_size");

    if (!json_is_array(list) || json_array_size(list) != 2 || back > 1)
        return 0;
    const json_t *n = json_array_get(list, 1 - back);
    return json_is_integer(n) && json_integer_value(n) > 0 ? (uint64_t)json_integer_value(n) : 0;
}

/* The weight's size in one dimension: from its pattern, or from the stored tensor if the config
 * does not give it. */
static uint64_t weight_dim(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                           const struct entry *e, const struct ckpt_sizes *sizes, uint32_t d)
{
    const size_t len = strlen(t->name) - strlen(e->follower->end);
    uint32_t i;
    uint64_t n = 0;
    uint32_t var;

    if (ckpt_map_get(&m->cat->by_name, t->name, len, &i) && d < m->cat->tensors.ptr[i].rank)
        return m->cat->tensors.ptr[i].dim[d];
    return ckpt_factor_size(&e->item->shape.dim[d], sizes, &n, &var) == CKPT_SIZE_KNOWN ? n : 0;
}

static int follow(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                  const struct entry *e, uint32_t tp, uint32_t ep, struct ckpt_sharding *ret,
                  struct ckpt_err *err)
{
    const uint32_t ndim = e->item->shape.ndim;
    struct ckpt_sizes sizes = {0};
    ckpt_cleanup(ckpt_freep) struct ckpt_shares *of = calloc(1, sizeof *of);

    if (!of)
        return ckpt_nomem(err);
    ckpt_settings_sizes(&e->file->settings, e->item->scope, &sizes);
    for (uint32_t d = 0; d < t->rank; d++) {
        const uint32_t from = d < 4 ? e->follower->from[d] : d;
        uint64_t n = from < ndim ? weight_dim(m, t, e, &sizes, from) : 0, block = 1;
        if (n > t->dim[d] && t->dim[d]) {
            block = e->follower->by_config && ndim >= 1 ? config_block(m->config, ndim - 1 - from)
                                                        : e->follower->block[d < 4 ? d : 3];
            if (block == 0 && n % t->dim[d] == 0)
                block = n / t->dim[d];
        }
        if (n && block && ckpt_factor_is_marked(&e->item->shape.dim[from])) {
            if (ckpt_shares_of(&e->item->shape.dim[from], n, &sizes, t->name, of, err) < 0)
                return -1;
            if (shrink(of, block, t->dim[d], tp, ep, &ret->dim[d]))
                continue;
        }
        if (ckpt_shares_of(NULL, t->dim[d], &sizes, t->name, &ret->dim[d], err) < 0)
            return -1;
    }
    return 0;
}

/* ---- all of it ---- */

static void find_place(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                       const struct entry *e, struct ckpt_sharding *ret)
{
    const struct ckpt_stages *stages = &m->type->stages;
    const struct bound_file *b = e->file ? e->file : m->own.settings.family ? &m->own : &m->common;
    const bool beside = is_beside(m, t->name);

    ret->has_layer = name_number(e, "layer", &ret->layer) ||
                     (!e->item && !beside && loose_layer(&stages->layers, t->name, &ret->layer));
    ret->has_layer = ret->has_layer && bound_dim(b, "layer", &ret->layers);
    ret->has_expert =
        name_number(e, "expert", &ret->expert) && bound_dim(b, "expert", &ret->experts);
    ret->embedding = !ckpt_texts_in(&stages->last, t->name) && !beside &&
                     ckpt_texts_in(&stages->embedding, t->name);
    ret->first = ret->embedding || beside || ckpt_texts_in(&stages->first, t->name);
}

int ckpt_annotations_find(const struct ckpt_annotations *m, const struct ckpt_tensor *t,
                          uint32_t tp, uint32_t ep, struct ckpt_sharding *ret, struct ckpt_err *err)
{
    struct ckpt_sizes sizes = {0};
    struct entry e;

    *ret = (struct ckpt_sharding){.dim = calloc((size_t)t->rank + 1, sizeof *ret->dim)};
    if (!ret->dim)
        return ckpt_nomem(err);
    find_entry(m, t, &e);
    ret->found = e.item != NULL;
    find_place(m, t, &e, ret);
    const bool divided = e.item && (tp > 1 || ep > 1);
    if (divided && e.follower)
        return follow(m, t, &e, tp, ep, ret, err);
    if (divided)
        ckpt_settings_sizes(&e.file->settings, e.item->scope, &sizes);
    for (uint32_t d = 0; d < t->rank; d++) {
        if (ckpt_shares_of(divided ? &e.item->shape.dim[d] : NULL, t->dim[d], &sizes, t->name,
                           &ret->dim[d], err) < 0)
            return -1;
    }
    return 0;
}

void ckpt_sharding_release(struct ckpt_sharding *m)
{
    free(m->dim);
    m->dim = NULL;
}
