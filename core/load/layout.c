/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: what one rank of tp x ep x fsdp x dp x pp needs, by the marks of the model file. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "load/load_inner.h"
#include "recipe/recipes.h"

enum { MAX_SEGMENTS = 64, MAX_WAYS = 1 << 20 };

enum way { TP, EP, FSDP, DP, PP, NWAY }; /* the first varies fastest among ranks */

struct layout {
    uint32_t n[NWAY], at[NWAY]; /* ranks along each, and where this rank stands */
};

/* ---- the text ---- */

static int parse_layout(const char *text, uint32_t rank, uint32_t nrank, struct layout *ret,
                        struct ckpt_err *err)
{
    static const char *const name[NWAY] = {"tp", "ep", "fsdp", "dp", "pp"};
    uint64_t product = 1;
    bool seen[NWAY] = {false};

    for (int k = 0; k < NWAY; k++)
        ret->n[k] = 1;
    for (const char *at = text; *at;) {
        size_t len = strcspn(at, ",");
        const char *equals = memchr(at, '=', len);
        unsigned long long n;
        int k = 0;
        while (equals && k < NWAY &&
               !(strlen(name[k]) == (size_t)(equals - at) &&
                 strncmp(name[k], at, strlen(name[k])) == 0))
            k++;
        if (!equals || k == NWAY || seen[k] ||
            !ckpt_parse_u64(equals + 1, len - (size_t)(equals + 1 - at), &n) || n < 1 ||
            n > MAX_WAYS)
            return ckpt_fail(err, CKPT_USAGE,
                             "layout '%s': expected tp=N, pp=N, ep=N, dp=N, fsdp=N, each at most "
                             "once, with commas between",
                             text);
        seen[k] = true;
        ret->n[k] = (uint32_t)n;
        at += len + (at[len] == ',');
    }
    for (int k = 0; k < NWAY; k++) {
        ret->at[k] = rank % ret->n[k];
        rank /= ret->n[k];
        if (ckd_mul(&product, product, ret->n[k]))
            product = UINT64_MAX;
    }
    if (product != nrank)
        return ckpt_fail(err, CKPT_USAGE,
                         "layout '%s' is for %" PRIu64 " ranks (tp x pp x ep x dp x fsdp), but "
                         "there are %" PRIu32,
                         text, product, nrank);
    return 0;
}

/* ---- the model file ---- */

struct model {
    const struct ckpt_family *family; /* NULL: not known */
    const json_t *config;
    uint64_t dim[CKPT_FAMILY_DIMS];
    bool known[CKPT_FAMILY_DIMS];
    size_t ndim;
    CKPT_VEC(const struct ckpt_item *) items; /* tensors */
    bool has_head;                            /* an output matrix of its own */
};

/* Keys of dims: earlier dims, the config, what the family fixes. */
static json_t *dim_key(void *ctx, const char *key)
{
    const struct model *m = ctx;
    json_t *v;

    for (size_t i = 0; i < m->ndim; i++)
        if (m->known[i] && strcmp(m->family->dim[i].name, key) == 0)
            return json_integer((json_int_t)m->dim[i]);
    v = json_incref(ckpt_json_at(m->config, key));
    if (!v || json_is_null(v)) {
        json_decref(v);
        v = json_incref(ckpt_json_at(m->family->config, key));
    }
    return v;
}

static void eval_dims(struct model *m)
{
    const struct ckpt_expr_env env = {dim_key, m, NULL};

    for (size_t i = 0; i < m->family->ndim; i++) {
        const struct ckpt_dim *d = &m->family->dim[i];
        m->known[i] = false;
        for (size_t k = 0; k < d->nexpr && !m->known[i]; k++) {
            ckpt_cleanup(ckpt_json_decrefp) json_t *v = ckpt_expr_eval(d->expr[k], &env);
            if (json_is_integer(v) && json_integer_value(v) >= 0) {
                m->dim[i] = (uint64_t)json_integer_value(v);
                m->known[i] = true;
            }
        }
        m->ndim++;
    }
}

static bool model_dim(const struct model *m, const char *name, uint64_t *ret)
{
    for (size_t i = 0; i < m->ndim; i++)
        if (m->known[i] && strcmp(m->family->dim[i].name, name) == 0) {
            *ret = m->dim[i];
            return true;
        }
    return false;
}

static int collect_items(struct model *m, const struct ckpt_items *list, struct ckpt_err *err)
{
    for (size_t i = 0; i < list->n; i++) {
        const struct ckpt_item *it = &list->item[i];
        if (it->kind == CKPT_ITEM_TENSOR && ckpt_vec_push(&m->items, it) < 0)
            return ckpt_nomem(err);
        for (size_t k = 0; it->kind != CKPT_ITEM_TENSOR && k < it->nlist; k++)
            if (collect_items(m, &it->list[k], err) < 0)
                return -1;
    }
    return 0;
}

static bool is_head(const char *name)
{
    return strstr(name, "lm_head") || strstr(name, "embed_out");
}

static int find_model(const struct ckpt_view *view, struct model *m, struct ckpt_err *err)
{
    const char *type = ckpt_json_str(view->config, "model_type");
    const struct ckpt_recipes *set;

    if (ckpt_recipes_models(view->shared->recipes, &set, err) < 0)
        return -1;
    for (size_t i = 0; i < set->families.len && type && !view->shared->opt->raw; i++)
        if (!set->families.ptr[i]->open && ckpt_family_has_type(set->families.ptr[i], type))
            m->family = set->families.ptr[i];
    for (size_t i = 0; i < view->cat->tensors.len; i++)
        m->has_head |= is_head(view->cat->tensors.ptr[i].name);
    if (!m->family)
        return 0;
    m->config = view->config;
    (void)pthread_mutex_lock(&view->shared->eval);
    eval_dims(m);
    (void)pthread_mutex_unlock(&view->shared->eval);
    return collect_items(m, &m->family->tensors, err);
}

/* The item that a tensor is an instance of, and the numbers in its name; NULL. */
static const struct ckpt_item *find_item(const struct model *m, const struct ckpt_tensor *t,
                                         uint64_t number[CKPT_NAME_NUMBERS])
{
    for (size_t i = 0; i < m->items.len; i++) {
        const struct ckpt_item *it = m->items.ptr[i];
        if (it->shape.ndim == t->rank &&
            ckpt_name_match(it->name, t->name, strlen(t->name), number))
            return it;
    }
    return NULL;
}

/* The number of an axis in a tensor's name. */
static bool name_number(const struct ckpt_item *it, const uint64_t *number, const char *axis,
                        uint64_t *ret)
{
    size_t k = 0;

    for (uint32_t p = 0; p < it->name->npart; p++) {
        const struct ckpt_name_part *part = &it->name->part[p];
        if (part->text)
            continue;
        if (part->naxis == 1 && strcmp(it->scope->axis[part->axis[0]].name, axis) == 0) {
            *ret = number[k];
            return true;
        }
        k++;
    }
    return false;
}

/* ---- the parts of a dimension ---- */

/* [lo, lo+n) is divided over `way`, or (NWAY) not at all. `groups` is a number of equal groups that
 * must not be torn apart (heads), or 0; several ranks may have the same one if they are key heads.
 */
struct segment {
    uint64_t lo, n, groups;
    enum way way;
    bool shared;
};

struct segments {
    const struct ckpt_sizes *sizes;
    const char *tensor;
    struct segment seg[MAX_SEGMENTS];
    size_t n;
    struct ckpt_err *err;
};

static int factor_size(struct segments *s, const struct ckpt_factor *f, uint64_t *ret)
{
    uint32_t var = 0;

    if (ckpt_factor_size(f, s->sizes, ret, &var) == CKPT_SIZE_KNOWN)
        return 0;
    return ckpt_fail(s->err, CKPT_MISSING,
                     "tensor '%s': how it is divided is not known, since config.json lacks a size",
                     s->tensor);
}

static bool has_mark(const struct ckpt_factor *f)
{
    for (uint16_t i = 0; !f->rank && i < f->nchild; i++)
        if (has_mark(&f->child[i]))
            return true;
    return f->rank != NULL;
}

static int add_segment(struct segments *s, uint64_t lo, uint64_t n, uint64_t groups, enum way way)
{
    struct segment *last = s->n ? &s->seg[s->n - 1] : NULL;

    if (last && way == NWAY && last->way == NWAY && last->lo + last->n == lo) {
        last->n += n;
        return 0;
    }
    if (s->n == MAX_SEGMENTS)
        return ckpt_fail(s->err, CKPT_UNSUPPORTED, "tensor '%s' is divided into too many parts",
                         s->tensor);
    s->seg[s->n++] = (struct segment){lo, n, groups, way, false};
    return 0;
}

/* Is it an axis of key and value heads, by its name or its size's? */
static bool is_kv(const struct segments *s, const struct ckpt_factor *f)
{
    const struct ckpt_scope *sc = s->sizes->scope;

    if (f->kind != CKPT_FACTOR_AXIS)
        return false;
    const struct ckpt_scope_axis *a = &sc->axis[f->axis];
    return strstr(a->name, "kv") || (a->var >= 0 && strstr(sc->var[a->var].name, "kv"));
}

/* The factor begins at lo; each of its elements stands for `inner` of the dimension's. */
static int add_factor(struct segments *s, const struct ckpt_factor *f, uint64_t lo, uint64_t inner)
{
    uint64_t size, groups = 0, outer = 1, within = inner;
    uint16_t marked = 0;

    if (factor_size(s, f, &size) < 0)
        return -1;
    if (f->rank) {
        enum way way = strcmp(f->rank, "tp") == 0 ? TP : strcmp(f->rank, "ep") == 0 ? EP : NWAY;
        const struct ckpt_factor *g = f; /* what is in the parentheses */
        while (g->kind == CKPT_FACTOR_PRODUCT && g->nchild == 1)
            g = &g->child[0];
        if (g->kind == CKPT_FACTOR_PRODUCT && factor_size(s, &g->child[0], &groups) < 0)
            return -1;
        if (g->kind != CKPT_FACTOR_PRODUCT && inner > 1)
            groups = size;
        if (add_segment(s, lo, size * inner, groups, way) < 0)
            return -1;
        s->seg[s->n - 1].shared = is_kv(s, g->kind == CKPT_FACTOR_PRODUCT ? &g->child[0] : g);
        return 0;
    }
    if (!has_mark(f))
        return add_segment(s, lo, size * inner, 0, NWAY);
    if (f->kind == CKPT_FACTOR_SUM) {
        for (uint16_t i = 0; i < f->nchild; i++) {
            if (add_factor(s, &f->child[i], lo, inner) < 0 ||
                factor_size(s, &f->child[i], &size) < 0)
                return -1;
            lo += size * inner;
        }
        return 0;
    }
    while (!has_mark(&f->child[marked]))
        marked++;
    for (uint16_t i = 0; i < f->nchild; i++) {
        if (i != marked && has_mark(&f->child[i]))
            return ckpt_fail(s->err, CKPT_UNSUPPORTED, "tensor '%s' is divided twice", s->tensor);
        if (factor_size(s, &f->child[i], &size) < 0)
            return -1;
        if (i < marked)
            outer *= size;
        if (i > marked)
            within *= size;
    }
    if (factor_size(s, &f->child[marked], &size) < 0)
        return -1;
    for (uint64_t o = 0; o < outer; o++)
        if (add_factor(s, &f->child[marked], lo + o * size * within, within) < 0)
            return -1;
    return 0;
}

/* The sizes come from config.json, the tensor from the checkpoint. */
static int check_extent(const struct segments *s, uint64_t n)
{
    const struct segment *last = &s->seg[s->n - 1];

    if (s->n && last->lo + last->n == n)
        return 0;
    return ckpt_fail(s->err, CKPT_CONFLICT,
                     "tensor '%s' has a dimension of %" PRIu64 ", config.json makes it %" PRIu64,
                     s->tensor, n, s->n ? last->lo + last->n : 0);
}

/* ---- wants ---- */

struct lay {
    const struct model *model;
    size_t nfound; /* tensors that the model file speaks of */
    struct layout l;
    struct ckpt_wants *w;
    struct ckpt_err *err;
};

/* The ranks of this rank's stage (and, for an expert of its own, of its place in ep): dp x fsdp x
 * ep x groups x copies; groups x copies is tp. */
static uint32_t stage_grid(struct lay *y, bool one_ep, uint32_t groups)
{
    const struct layout *l = &y->l;
    const uint32_t nep = one_ep ? 1 : l->n[EP];
    const uint32_t dim[5] = {l->n[DP], l->n[FSDP], nep, groups, l->n[TP] / groups};
    const uint32_t n = l->n[DP] * l->n[FSDP] * nep * l->n[TP];
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc(n * sizeof *rank);
    uint32_t at = 0;

    if (!rank)
        return (void)ckpt_nomem(y->err), CKPT_NONE;
    for (uint32_t d = 0; d < l->n[DP]; d++)
        for (uint32_t f = 0; f < l->n[FSDP]; f++)
            for (uint32_t e = 0; e < nep; e++)
                for (uint32_t t = 0; t < l->n[TP]; t++)
                    rank[at++] = (((l->at[PP] * l->n[DP] + d) * l->n[FSDP] + f) * l->n[EP] +
                                  (one_ep ? l->at[EP] : e)) *
                                     l->n[TP] +
                                 t;
    return ckpt_wants_grid(y->w, 5, dim, rank, y->err);
}

/* In how many groups of ranks tp falls: fewer than tp where there are fewer heads than ranks. */
static int tp_groups(struct lay *y, const struct ckpt_tensor *t, const struct segment *s,
                     uint32_t *ret)
{
    const uint32_t tp = y->l.n[TP];

    *ret = tp;
    if (s->groups == 0 || s->groups % tp == 0)
        return 0;
    if (s->shared && tp % s->groups == 0) {
        *ret = (uint32_t)s->groups;
        return 0;
    }
    if (!s->shared && s->n % tp == 0) /* more ranks than heads: equal parts of them */
        return 0;
    return ckpt_fail(y->err, CKPT_USAGE,
                     "tp=%" PRIu32 ": tensor '%s' has %" PRIu64 " heads, which is no multiple of "
                     "it%s",
                     tp, t->name, s->groups, s->shared ? ", nor a divisor" : "");
}

/* One want for each product of segments, one of each dimension. */
static int add_products(struct lay *y, uint32_t tensor, const struct ckpt_tensor *t,
                        const struct segments *seg, uint32_t d, const struct segment **pick,
                        bool one_ep)
{
    if (d < t->rank) {
        for (size_t i = 0; i < seg[d].n; i++) {
            pick[d] = &seg[d].seg[i];
            if (add_products(y, tensor, t, seg, d + 1, pick, one_ep) < 0)
                return -1;
        }
        return 0;
    }
    struct ckpt_spec spec = {0};
    struct ckpt_box box = {.rank = t->rank};
    uint32_t groups = y->l.n[TP];
    bool whole = true;
    for (uint32_t k = 0; k < t->rank; k++) {
        box.lo[k] = pick[k]->lo;
        box.n[k] = pick[k]->n;
        whole &= box.n[k] == t->dim[k];
        if (pick[k]->way == TP && y->l.n[TP] > 1 && tp_groups(y, t, pick[k], &groups) < 0)
            return -1;
    }
    for (uint32_t k = 0; k < t->rank; k++) {
        if (pick[k]->way == TP && y->l.n[TP] > 1)
            spec.cut[spec.ncut++] = (struct ckpt_cut){k, 3};
        if (pick[k]->way == EP && y->l.n[EP] > 1)
            spec.cut[spec.ncut++] = (struct ckpt_cut){k, 2};
        if (spec.ncut > CKPT_SPEC_CUTS - 2)
            return ckpt_fail(y->err, CKPT_UNSUPPORTED, "tensor '%s' is divided too often", t->name);
    }
    if (t->rank > 0 && y->l.n[FSDP] > 1)
        spec.cut[spec.ncut++] = (struct ckpt_cut){0, 1};
    uint32_t number = CKPT_NONE;
    if (spec.ncut && ((spec.grid = stage_grid(y, one_ep, groups)) == CKPT_NONE ||
                      (number = ckpt_wants_spec(y->w, &spec, y->err)) == CKPT_NONE))
        return -1;
    return ckpt_wants_add(y->w, tensor, number, whole ? NULL : &box, y->err);
}

/* Layers are shared out as evenly as can be, the first stages get one more. */
static uint32_t stage_of_layer(uint64_t layer, uint64_t layers, uint32_t stages)
{
    const uint64_t base = layers / stages, more = layers % stages;

    if (layer < more * (base + 1))
        return (uint32_t)(layer / (base + 1));
    if (base == 0)
        return stages - 1;
    uint64_t s = more + (layer - more * (base + 1)) / base;
    return s < stages ? (uint32_t)s : stages - 1;
}

/* Is a tensor of this item on this rank's stage? */
static bool on_stage(const struct lay *y, const struct ckpt_item *it, const char *name,
                     const uint64_t *number)
{
    const uint32_t pp = y->l.n[PP], at = y->l.at[PP];
    uint64_t layer, layers;

    if (pp == 1)
        return true;
    if (name_number(it, number, "layer", &layer) && model_dim(y->model, "layer", &layers))
        return stage_of_layer(layer, layers, pp) == at;
    if (!is_head(name) && (strstr(name, "embed") || strstr(name, "wte") || strstr(name, "wpe")))
        return at == 0 || (at == pp - 1 && !y->model->has_head); /* tied: it is the head too */
    return at == pp - 1;
}

/* Is a tensor of one expert on this rank? *ret_one: it is one. */
static bool on_ep(const struct lay *y, const struct ckpt_item *it, const uint64_t *number,
                  bool *ret_one)
{
    const uint32_t ep = y->l.n[EP];
    uint64_t expert, experts;

    *ret_one = ep > 1 && name_number(it, number, "expert", &expert) &&
               model_dim(y->model, "expert", &experts);
    if (!*ret_one)
        return true;
    uint64_t chunk = (experts + ep - 1) / ep;
    return expert / chunk == y->l.at[EP];
}

static void item_sizes(const struct model *m, const struct ckpt_item *it, struct ckpt_sizes *out)
{
    *out = (struct ckpt_sizes){.scope = it->scope};
    for (uint32_t v = 0; v < it->scope->nvar; v++)
        if (model_dim(m, it->scope->var[v].name, &out->var[v]))
            out->known |= 1u << v;
}

static int want_tensor(struct lay *y, uint32_t tensor, const struct ckpt_tensor *t)
{
    ckpt_cleanup(ckpt_freep) struct segments *seg = calloc((size_t)t->rank + 1, sizeof *seg);
    uint64_t number[CKPT_NAME_NUMBERS] = {0};
    const struct ckpt_item *it = y->model->family ? find_item(y->model, t, number) : NULL;
    const struct segment *pick[CKPT_MAX_RANK];
    struct ckpt_sizes sizes;
    bool one_ep = false;

    if (!seg)
        return ckpt_nomem(y->err);
    y->nfound += it != NULL;
    if (it && (!on_stage(y, it, t->name, number) || !on_ep(y, it, number, &one_ep)))
        return 0;
    if (it)
        item_sizes(y->model, it, &sizes);
    for (uint32_t d = 0; d < t->rank; d++) {
        seg[d].tensor = t->name;
        seg[d].sizes = &sizes;
        seg[d].err = y->err;
        if (it && (y->l.n[TP] > 1 || y->l.n[EP] > 1) && has_mark(&it->shape.dim[d])) {
            if (add_factor(&seg[d], &it->shape.dim[d], 0, 1) < 0 ||
                check_extent(&seg[d], t->dim[d]) < 0)
                return -1;
        } else if (add_segment(&seg[d], 0, t->dim[d], 0, NWAY) < 0) {
            return -1;
        }
    }
    return add_products(y, tensor, t, seg, 0, pick, one_ep);
}

int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err)
{
    struct model m = {0};
    struct lay y = {.model = &m, .w = w, .err = err};
    int rc = parse_layout(layout, rank, nrank, &y.l, err);

    if (rc == 0)
        rc = find_model(view, &m, err);
    if (rc == 0 && !m.family && (y.l.n[TP] > 1 || y.l.n[EP] > 1 || y.l.n[PP] > 1)) {
        const char *type = ckpt_json_str(view->config, "model_type");
        rc = ckpt_fail(err, CKPT_UNSUPPORTED,
                       "layout '%s': no model file says how %s%s is divided over tp, ep or pp; dp "
                       "and fsdp work",
                       layout, type ? "model_type " : "this view", type ? type : "");
    }
    for (uint32_t t = 0; t < view->cat->tensors.len && rc == 0; t++)
        rc = want_tensor(&y, t, &view->cat->tensors.ptr[t]);
    if (rc == 0 && y.nfound == 0 && (y.l.n[TP] > 1 || y.l.n[EP] > 1 || y.l.n[PP] > 1))
        rc = ckpt_fail(err, CKPT_UNSUPPORTED,
                       "layout '%s': %s, which says what tp, ep and pp divide, knows none of the "
                       "view's names",
                       layout, m.family->name);
    ckpt_vec_release(&m.items);
    return rc;
}

int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err)
{
    struct layout l;

    if (parse_layout(layout, rank, nrank, &l, err) < 0)
        return -1;
    *ret = l.at[PP] * l.n[EP] + l.at[EP];
    return 0;
}
