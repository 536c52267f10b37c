/* SPDX-License-Identifier: Apache-2.0 */
/* Every rule of every recipe, and a table of mappings that recipes must be able to say, on random
 * arrays cut at random: mapped, compared with a naive reading of the patterns element by element,
 * computed where the rule names a value, and mapped back. */
#include <stdlib.h>

#include "sanitized.h"
#include "test.h"

#include "base/str.h"
#include "recipe/library/recipes.h"
#include "tensor/catalog.h"
#include "tensor/read.h"

enum { ROUNDS = SANITIZED ? 2 : 8 }; /* there are many rules */
enum { AXES = CKPT_SCOPE_AXES + CKPT_MAX_RANK, MAX_NUMEL = 200000 };

/* ---- random ---- */

static uint32_t seed;

static uint32_t rnd(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return n ? (seed >> 8) % n : 0;
}

/* ---- a rule with sizes ---- */

/* One element's place in the space of axes: -1 for axes that it does not have. */
struct place {
    int16_t at[AXES];
};

struct trial {
    const struct ckpt_rule *rule;
    uint64_t var[CKPT_SCOPE_VARS];
    uint64_t rest[3];
    uint32_t nrest;
    uint32_t spelling[CKPT_RULE_SIDES]; /* of the sources */
    uint64_t list[16];                  /* what any {list:axis} is */
    const char *value;                  /* of what the targets are computed; or NULL */
};

/* What is stored for the element with this number. */
static uint32_t element(const struct trial *t, uint32_t id)
{
    const float x = (float)id;
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return t->value ? bits : id;
}

static bool is_value(const struct trial *t, const char *name)
{
    return t->value && strcmp(t->value, name) == 0;
}

static bool takes_number(const struct trial *t)
{
    return is_value(t, "times") || is_value(t, "over");
}

static enum ckpt_dtype element_dtype(const struct trial *t)
{
    return t->value ? CKPT_F32 : CKPT_U32;
}

static uint64_t axis_size(const struct trial *t, uint32_t a)
{
    const struct ckpt_scope_axis *ax = &t->rule->scope->axis[a];
    return ax->var < 0 ? ax->size : t->var[ax->var];
}

static uint64_t factor_size(const struct trial *t, const struct ckpt_factor *f)
{
    uint64_t n = f->kind == CKPT_FACTOR_SUM ? 0 : 1;

    if (f->kind == CKPT_FACTOR_AXIS)
        return axis_size(t, f->axis);
    for (uint16_t c = 0; c < f->nchild; c++)
        n = f->kind == CKPT_FACTOR_SUM ? n + factor_size(t, &f->child[c])
                                       : n * factor_size(t, &f->child[c]);
    return n;
}

/* The naive reading: which axes, with which values, is index `i` of factor f? */
static void decode(const struct trial *t, const struct ckpt_factor *f, uint64_t i, struct place *p)
{
    switch (f->kind) {
    case CKPT_FACTOR_ONE:
        return;
    case CKPT_FACTOR_AXIS:
        assert_int_equal(p->at[f->axis], -1);
        p->at[f->axis] = (int16_t)i;
        return;
    case CKPT_FACTOR_PRODUCT:
        for (uint16_t c = f->nchild; c-- > 0;) {
            uint64_t n = factor_size(t, &f->child[c]);
            decode(t, &f->child[c], i % n, p);
            i /= n;
        }
        return;
    case CKPT_FACTOR_SUM:
        for (uint16_t c = 0; c < f->nchild; c++) {
            uint64_t n = factor_size(t, &f->child[c]);
            if (i < n) {
                decode(t, &f->child[c], i, p);
                return;
            }
            i -= n;
        }
        fail();
    }
}

struct shape {
    uint64_t dim[CKPT_MAX_RANK];
    const struct ckpt_factor *f[CKPT_MAX_RANK]; /* NULL: of "..." */
    uint32_t rank;
    struct ckpt_factor lead;
};

static void shape_of(const struct trial *t, const struct ckpt_side *s, uint32_t spelling,
                     struct shape *out)
{
    const int8_t lead = s->name[spelling].lead;
    uint32_t n = 0, rest = 0;

    memset(out, 0, sizeof *out);
    if (lead >= 0) {
        out->lead = (struct ckpt_factor){.kind = CKPT_FACTOR_AXIS, .axis = (uint8_t)lead};
        out->f[n++] = &out->lead;
    }
    for (uint32_t i = 0; i <= s->pattern.ndim; i++) {
        if (s->pattern.rest_at == (int32_t)i)
            for (uint32_t k = 0; k < t->nrest; k++)
                out->dim[n++] = t->rest[k];
        if (i < s->pattern.ndim)
            out->f[n++] = &s->pattern.dim[i];
    }
    for (uint32_t d = 0; d < n; d++)
        if (out->f[d])
            out->dim[d] = factor_size(t, out->f[d]);
    out->rank = n;
    (void)rest;
}

/* Axes of element `lin` of a tensor whose name fixes `named`. */
static void place_of(const struct trial *t, const struct shape *sh, const struct place *named,
                     uint64_t lin, struct place *out)
{
    uint32_t rest = t->nrest;

    *out = *named;
    for (uint32_t d = sh->rank; d-- > 0;) {
        uint64_t i = lin % sh->dim[d];
        lin /= sh->dim[d];
        if (sh->f[d])
            decode(t, sh->f[d], i, out);
        else
            out->at[CKPT_SCOPE_AXES + --rest] = (int16_t)i;
    }
}

static uint64_t numel(const struct shape *sh)
{
    uint64_t n = 1;
    for (uint32_t d = 0; d < sh->rank; d++)
        n *= sh->dim[d];
    return n;
}

/* ---- names ---- */

static uint64_t part_count(const struct trial *t, const struct ckpt_name_part *p)
{
    uint64_t n = 1;
    for (uint8_t k = 0; k < p->naxis; k++)
        n *= axis_size(t, p->axis[k]);
    return n;
}

static uint64_t part_plus(const struct trial *t, const struct ckpt_name_part *p)
{
    return p->plus_var >= 0 ? t->var[p->plus_var] : p->plus;
}

/* The i-th of all names of a template, and the axes that it fixes. */
static void name_at(const struct trial *t, const struct ckpt_name *n, uint64_t i,
                    struct ckpt_str *text, struct place *named)
{
    uint64_t value[CKPT_NAME_NUMBERS], index[CKPT_NAME_PARTS];
    uint32_t k = 0;

    memset(named, -1, sizeof *named);
    for (uint32_t p = n->npart; p-- > 0;)
        if (!n->part[p].text) {
            uint64_t count = part_count(t, &n->part[p]);
            index[p] = i % count;
            i /= count;
        }
    for (uint32_t p = 0; p < n->npart; p++) {
        const struct ckpt_name_part *part = &n->part[p];
        if (part->text)
            continue;
        uint64_t v = index[p];
        value[k++] = (part->list ? t->list[v] : v) + part_plus(t, part);
        for (uint8_t a = part->naxis; a-- > 0;) {
            if (t->rule->scope->axis[part->axis[a]].name[0] != '_') /* free: all are equal */
                named->at[part->axis[a]] = (int16_t)(v % axis_size(t, part->axis[a]));
            v /= axis_size(t, part->axis[a]);
        }
    }
    ckpt_str_clear(text);
    ckpt_name_render(n, value, text);
}

static uint64_t name_count(const struct trial *t, const struct ckpt_name *n)
{
    uint64_t total = 1;
    for (uint32_t p = 0; p < n->npart; p++)
        if (!n->part[p].text)
            total *= part_count(t, &n->part[p]);
    return total;
}

/* ---- text of the rule ---- */

static void put_factor(const struct trial *t, const struct ckpt_factor *f, bool explicit,
                       struct ckpt_str *s)
{
    const struct ckpt_scope *sc = t->rule->scope;

    if (f->kind == CKPT_FACTOR_ONE) {
        ckpt_str_puts(s, "1");
    } else if (f->kind == CKPT_FACTOR_AXIS) {
        const struct ckpt_scope_axis *a = &sc->axis[f->axis];
        ckpt_str_puts(s, a->name);
        if (explicit || a->var < 0)
            ckpt_str_printf(s, "=%llu", (unsigned long long)axis_size(t, f->axis));
        else if (strcmp(sc->var[a->var].name, a->name) != 0)
            ckpt_str_printf(s, "=%s", sc->var[a->var].name);
    } else {
        ckpt_str_puts(s, "(");
        for (uint16_t c = 0; c < f->nchild; c++) {
            if (c)
                ckpt_str_puts(s, f->kind == CKPT_FACTOR_SUM ? " + " : " ");
            put_factor(t, &f->child[c], explicit, s);
        }
        ckpt_str_puts(s, ")");
    }
}

static json_t *side_text(const struct trial *t, const struct ckpt_side *side, uint32_t spelling,
                         bool explicit)
{
    struct ckpt_str s = {0};
    struct shape sh;

    ckpt_str_printf(&s, "%s ", side->name[spelling].text);
    shape_of(t, side, spelling, &sh);
    bool rest = false;
    for (uint32_t d = 0; d < sh.rank; d++) {
        if (sh.f[d]) {
            ckpt_str_puts(&s, " ");
            put_factor(t, sh.f[d], explicit, &s);
        } else if (!rest) {
            ckpt_str_puts(&s, " ...");
            rest = true;
        }
    }
    if (side->pattern.rest_at >= 0 && !rest)
        ckpt_str_puts(&s, " ...");
    json_t *j = json_string(ckpt_str_get(&s));
    ckpt_str_release(&s);
    return j;
}

/* A model file's entry for a target: loops over its numbers around its name and shape. */
static json_t *model_entry(const struct trial *t, const struct ckpt_side *side, uint32_t spelling,
                           uint32_t id, json_t *dims, json_t *config)
{
    const struct ckpt_name *n = &side->name[spelling];
    struct ckpt_str s = {0};
    struct shape sh;
    char word[32], key[40];

    for (uint32_t p = 0; p < n->npart; p++) {
        const struct ckpt_name_part *part = &n->part[p];
        if (part->text) {
            ckpt_str_append(&s, part->text, part->len);
            continue;
        }
        (void)snprintf(word, sizeof word, "num%u_%u", id, p);
        (void)snprintf(key, sizeof key, "k_%s", word);
        json_object_set_new(dims, word, json_string(key));
        json_object_set_new(config, key, json_integer((json_int_t)part_count(t, part)));
        ckpt_str_printf(&s, "{%s%s%s+%llu}", part->list ? part->list : "", part->list ? ":" : "",
                        word, (unsigned long long)part_plus(t, part));
    }
    shape_of(t, side, spelling, &sh);
    ckpt_str_puts(&s, " ");
    for (uint32_t d = 0; d < sh.rank; d++) {
        (void)snprintf(word, sizeof word, "dim%u_%u", id, d);
        (void)snprintf(key, sizeof key, "k_%s", word);
        json_object_set_new(dims, word, json_string(key));
        json_object_set_new(config, key, json_integer((json_int_t)sh.dim[d]));
        ckpt_str_printf(&s, " %s", word);
    }
    json_t *entry = json_string(ckpt_str_get(&s));
    ckpt_str_release(&s);
    for (uint32_t p = n->npart; p-- > 0;)
        if (!n->part[p].text) {
            (void)snprintf(word, sizeof word, "num%u_%u", id, p);
            entry = json_pack("{s:s, s:[o]}", "each", word, "tensors", entry);
        }
    return entry;
}

/* Every list that a side's names speak of. */
static void set_lists(const struct ckpt_side *side, json_t *config, json_t *list)
{
    for (uint32_t k = 0; k < side->nname; k++)
        for (uint32_t p = 0; p < side->name[k].npart; p++)
            if (side->name[k].part[p].list)
                json_object_set(config, side->name[k].part[p].list, list);
}

/* The rule as a recipe of its own, with a model file inside. */
static struct ckpt_recipes *recipe_of(const struct trial *t, bool inverse)
{
    const struct ckpt_rule *r = t->rule;
    json_t *dims = json_object(), *config = json_object(), *tensors = json_array(),
           *list = json_array();
    json_t *from = json_array(), *to = json_array();
    struct ckpt_recipes *set;
    struct ckpt_err err = {0};
    char key[64];

    for (uint32_t v = 0; v < r->scope->nvar; v++)
        if (r->scope->var[v].dim) {
            (void)snprintf(key, sizeof key, "k_%s", r->scope->var[v].name);
            json_object_set_new(dims, r->scope->var[v].name, json_string(key));
            json_object_set_new(config, key, json_integer((json_int_t)t->var[v]));
        }
    for (uint32_t i = 0; i < 16; i++)
        json_array_append_new(list, json_integer((json_int_t)t->list[i]));
    for (uint32_t i = 0; i < r->nfrom + r->nto; i++)
        set_lists(i < r->nfrom ? &r->from[i] : &r->to[i - r->nfrom], config, list);
    json_decref(list);
    for (uint32_t i = 0; i < r->nfrom; i++) {
        json_array_append_new(inverse ? to : from,
                              side_text(t, &r->from[i], t->spelling[i], inverse));
        if (inverse)
            json_array_append_new(tensors,
                                  model_entry(t, &r->from[i], t->spelling[i], i, dims, config));
    }
    for (uint32_t i = 0; i < r->nto; i++) {
        json_array_append_new(inverse ? from : to, side_text(t, &r->to[i], 0, inverse));
        if (!inverse)
            json_array_append_new(tensors, model_entry(t, &r->to[i], 0, i, dims, config));
    }
    json_t *j = json_pack("{s:s, s:{s:o, s:o, s:o}, s:[{s:o, s:o, s:s*, s:s*}]}", "format", "test",
                          "model", "config", config, "dims", dims, "tensors", tensors, "rules",
                          "from", from, "to", to, "value", inverse ? NULL : t->value, "by",
                          !inverse && takes_number(t) ? "sqrt(9) / 2" : NULL);
    char *text = json_dumps(j, 0);
    json_decref(j);
    if (ckpt_recipes_parse("test", text, strlen(text), &set, &err) < 0)
        fail_msg("%s\n%s", err.text, text);
    free(text);
    return set;
}

/* ---- catalogues ---- */

/* Cut a box in two, at random, until it is left alone. */
static void cut(struct ckpt_catalog *cat, const uint64_t *dim, const uint32_t *id,
                struct ckpt_box box, int depth, struct ckpt_piece_draft *out, size_t *nout)
{
    struct ckpt_err err = {0};
    uint32_t d = box.rank ? rnd(box.rank) : 0;

    if (depth > 0 && box.rank && box.n[d] > 1 && rnd(5) > 0) {
        struct ckpt_box lower = box;
        lower.n[d] = 1 + rnd((uint32_t)box.n[d] - 1);
        box.lo[d] += lower.n[d];
        box.n[d] -= lower.n[d];
        cut(cat, dim, id, lower, depth - 1, out, nout);
        cut(cat, dim, id, box, depth - 1, out, nout);
        return;
    }
    uint64_t n = ckpt_box_numel(&box), stride[CKPT_MAX_RANK], own[CKPT_MAX_RANK];
    uint32_t *data = malloc((n + 3) * sizeof *data), pad = rnd(3);
    struct ckpt_source *s;
    ckpt_shape_strides(dim, box.rank, stride);
    ckpt_shape_strides(box.n, box.rank, own);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t lin = 0;
        for (uint32_t k = 0; k < box.rank; k++)
            lin += (box.lo[k] + i / own[k] % box.n[k]) * stride[k];
        data[pad + i] = id[lin];
    }
    if (ckpt_source_mem_new("piece", data, (n + pad) * sizeof *data, &s, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t k = 0; k < box.rank; k++)
        own[k] *= sizeof *data;
    ckpt_piece_from_box(dim, &box, ckpt_catalog_add_source(cat, s, &err), pad * sizeof *data, own,
                        &out[(*nout)++]);
    ckpt_source_unref(s);
    free(data);
}

static void add_cut(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                    const struct shape *sh, const uint32_t *id)
{
    struct ckpt_err err = {0};
    struct ckpt_piece_draft *p = malloc(64 * sizeof *p);
    struct ckpt_box all = {.rank = sh->rank};
    size_t index, n = 0;

    memcpy(all.n, sh->dim, sizeof all.n);
    if (numel(sh) > 0)
        cut(cat, sh->dim, id, all, 4, p, &n);
    if (ckpt_catalog_add(cat, name, dtype, sh->dim, sh->rank, &index, &err) < 0 ||
        ckpt_catalog_set_pieces(cat, index, p, n, &err) < 0)
        fail_msg("%s", err.text);
    free(p);
}

static struct ckpt_catalog *new_catalog(void)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    json_object_set_new(cat->about, "format", json_string("test"));
    return cat;
}

/* Read a tensor by the definition of a piece, counting how often each element is given. */
static uint32_t *brute_force(const struct ckpt_catalog *cat, const struct ckpt_tensor *t)
{
    struct ckpt_err err = {0};
    uint32_t *data = calloc(t->numel + 1, sizeof *data);
    uint8_t *times = calloc(t->numel + 1, 1);

    for (size_t k = 0; k < t->npiece; k++) {
        const struct ckpt_piece *p = &t->piece[k];
        uint64_t n = ckpt_piece_numel(p);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t dst = p->dst, src = p->src, rest = i;
            for (uint32_t a = p->naxis; a-- > 0; rest /= p->axis[a].n) {
                dst += rest % p->axis[a].n * p->axis[a].dst;
                src += rest % p->axis[a].n * p->axis[a].src;
            }
            assert_true(dst < t->numel);
            if (times[dst]++)
                fail_msg("'%s': element %llu is given twice", t->name, (unsigned long long)dst);
            if (ckpt_source_pread(cat->sources.ptr[p->source], &data[dst], sizeof *data, src,
                                  &err) < 0)
                fail_msg("%s", err.text);
        }
    }
    for (uint64_t i = 0; i < t->numel; i++)
        if (!times[i])
            fail_msg("'%s': element %llu is not given", t->name, (unsigned long long)i);
    free(times);
    return data;
}

/* ---- one trial ---- */

struct table {
    struct ckpt_map map;
    struct place *place;
    uint32_t n;
};

/* Fill the sources: every element has its own number, remembered under its place. */
static struct ckpt_catalog *make_sources(const struct trial *t, struct table *tab)
{
    struct ckpt_catalog *cat = new_catalog();
    struct ckpt_str name = {0};
    struct shape sh;
    struct place named;
    bool is_new;
    uint32_t old;

    for (uint32_t i = 0; i < t->rule->nfrom; i++) {
        const struct ckpt_side *side = &t->rule->from[i];
        const struct ckpt_name *n = &side->name[t->spelling[i]];
        shape_of(t, side, t->spelling[i], &sh);
        for (uint64_t k = 0; k < name_count(t, n); k++) {
            uint32_t *id = malloc((numel(&sh) + 1) * sizeof *id);
            name_at(t, n, k, &name, &named);
            for (uint64_t e = 0; e < numel(&sh); e++) {
                struct place *p = &tab->place[tab->n];
                place_of(t, &sh, &named, e, p);
                assert_int_equal(
                    ckpt_map_put(&tab->map, (char *)p, sizeof *p, tab->n, &old, &is_new), 0);
                if (!is_new)
                    fail_msg("%s: two source elements have one place", t->rule->where);
                id[e] = element(t, tab->n++);
            }
            add_cut(cat, ckpt_str_get(&name), element_dtype(t), &sh, id);
            free(id);
        }
    }
    ckpt_str_release(&name);
    return cat;
}

static struct ckpt_model *apply(const struct trial *t, const struct ckpt_catalog *src, bool inverse)
{
    struct ckpt_err err = {0};
    struct ckpt_recipe_options opt = {0};
    struct ckpt_model *m;
    struct ckpt_recipes *set = recipe_of(t, inverse);

    if (ckpt_recipe_apply(set, src, &opt, &m, &err) < 0)
        fail_msg("%s%s: '%s': %s", t->rule->where, inverse ? " (inverse)" : "",
                 t->rule->from[0].text, err.text);
    if (json_array_size(m->catalog->warnings))
        fail_msg("%s: %s", t->rule->where,
                 json_string_value(json_array_get(m->catalog->warnings, 0)));
    ckpt_recipes_free(set);
    return m;
}

/* A computed target: of each element that the patterns gather, x times or over 1.5, x + 1 or
 * x - 1. */
static void check_value(const struct trial *t, const struct ckpt_tensor *x,
                        const uint32_t *gathered)
{
    const float by = strcmp(t->value, "plus_one") == 0 ? 1.0F : -1.0F;
    float *got = malloc((x->numel + 1) * sizeof *got), before;
    struct ckpt_err err = {0};

    assert_non_null(x->value);
    if (ckpt_tensor_pread(x, NULL, got, x->numel * sizeof *got, 0, &err) < 0)
        fail_msg("%s", err.text);
    for (uint64_t e = 0; e < x->numel; e++) {
        memcpy(&before, &gathered[e], sizeof before);
        assert_true(got[e] == (is_value(t, "times")  ? before * 1.5F
                               : is_value(t, "over") ? before / 1.5F
                                                     : before + by));
    }
    free(got);
}

/* Compare all targets with the naive reading; put them, cut anew and before any value is computed,
 * into `back`. */
static void check_targets(const struct trial *t, const struct ckpt_model *m,
                          const struct table *tab, struct ckpt_catalog *back)
{
    struct ckpt_str name = {0};
    struct place named, p;
    struct shape sh;
    uint32_t want;
    size_t n = 0;

    for (uint32_t i = 0; i < t->rule->nto; i++) {
        const struct ckpt_side *side = &t->rule->to[i];
        shape_of(t, side, 0, &sh);
        for (uint64_t k = 0; k < name_count(t, side->name); k++, n++) {
            name_at(t, side->name, k, &name, &named);
            const struct ckpt_tensor *x = ckpt_catalog_find(m->catalog, ckpt_str_get(&name));
            if (!x)
                fail_msg("%s: no target '%s'", t->rule->where, ckpt_str_get(&name));
            assert_int_equal(x->rank, sh.rank);
            for (uint32_t d = 0; d < sh.rank; d++)
                assert_int_equal(x->dim[d], sh.dim[d]);
            uint32_t *got = brute_force(m->catalog, t->value && x->value ? x->value->arg[0] : x);
            if (t->value)
                check_value(t, x, got);
            for (uint64_t e = 0; e < numel(&sh); e++) {
                place_of(t, &sh, &named, e, &p);
                if (!ckpt_map_get(&tab->map, (char *)&p, sizeof p, &want) ||
                    got[e] != element(t, want))
                    fail_msg("%s: '%s' -> '%s': element %llu of '%s' is wrong", t->rule->where,
                             t->rule->from[0].text, side->text, (unsigned long long)e, x->name);
            }
            add_cut(back, x->name, element_dtype(t), &sh, got);
            free(got);
        }
    }
    assert_int_equal(m->catalog->tensors.len, n);
    ckpt_str_release(&name);
}

static void check_back(const struct trial *t, const struct ckpt_model *m,
                       const struct ckpt_catalog *src)
{
    assert_int_equal(m->catalog->tensors.len, src->tensors.len);
    for (size_t i = 0; i < src->tensors.len; i++) {
        const struct ckpt_tensor *a = &src->tensors.ptr[i],
                                 *b = ckpt_catalog_find(m->catalog, a->name);
        if (!b || a->rank != b->rank || memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) != 0)
            fail_msg("%s (inverse): '%s' is not there or has another shape", t->rule->where,
                     a->name);
        uint32_t *x = brute_force(src, a), *y = brute_force(m->catalog, b);
        if (memcmp(x, y, a->numel * sizeof *x) != 0)
            fail_msg("%s (inverse): '%s' does not come back", t->rule->where, a->name);
        free(x);
        free(y);
    }
}

/* Is v the size of a number that a target's name has, and nothing else? */
static bool is_free(const struct ckpt_rule *r, uint32_t v)
{
    for (uint32_t a = 0; a < r->scope->naxis; a++)
        if (r->scope->axis[a].var == (int)v && (r->to[0].name->axes >> a & 1))
            return true;
    return false;
}

/* Chooses random sizes, of which the sources have at most MAX_NUMEL elements; returns how many they
 * have. 0: try others. */
static uint64_t choose_sizes(struct trial *t)
{
    const struct ckpt_rule *r = t->rule;
    uint64_t total = 0, next = 0;
    struct shape sh;

    for (uint32_t v = 0; v < r->scope->nvar; v++)
        t->var[v] = r->scope->var[v].name[0] == '_' && !is_free(r, v) ? rnd(4) : 1 + rnd(4);
    t->nrest = rnd(3);
    for (uint32_t k = 0; k < t->nrest; k++)
        t->rest[k] = 1 + rnd(3);
    for (uint32_t i = 0; i < 16; i++)
        t->list[i] = next += 1 + rnd(3);
    for (uint32_t i = 0; i < r->nfrom; i++) {
        t->spelling[i] = rnd(r->from[i].nname);
        shape_of(t, &r->from[i], t->spelling[i], &sh);
        total += numel(&sh) * name_count(t, &r->from[i].name[t->spelling[i]]);
        for (uint32_t p = 0; p < r->from[i].name[0].npart;
             p++) { /* a list is as long as its axis */
            const struct ckpt_name_part *part = &r->from[i].name[0].part[p];
            if (!part->text && part->list && axis_size(t, part->axis[0]) > 16)
                return 0;
        }
    }
    return total < MAX_NUMEL ? total : 0;
}

static void check_once(const struct ckpt_rule *rule)
{
    struct trial t = {.rule = rule};
    struct table tab = {0};
    bool padded = false;
    uint64_t total;

    while (!(total = choose_sizes(&t)))
        ;
    t.value = rule->value   ? rule->value->name
              : rnd(4) == 0 ? "plus_one"
              : rnd(4) == 0 ? "times"
                            : NULL;
    for (uint32_t a = 0; a < rule->scope->naxis; a++)
        padded |= rule->scope->axis[a].name[0] == '_';
    tab.place = calloc(total, sizeof *tab.place);
    struct ckpt_catalog *src = make_sources(&t, &tab), *back = new_catalog();
    struct ckpt_model *m = apply(&t, src, false);
    check_targets(&t, m, &tab, back);
    ckpt_model_free(m);
    if (!padded) {
        m = apply(&t, back, true);
        check_back(&t, m, src);
        ckpt_model_free(m);
    }
    ckpt_catalog_free(src);
    ckpt_catalog_free(back);
    ckpt_map_release(&tab.map);
    free(tab.place);
}

/* Does it pad what it makes? Only a recipe that is read backwards can. */
static bool pads(const struct ckpt_rule *r)
{
    for (uint32_t i = 0; i < r->nto; i++)
        for (uint32_t a = 0; a < r->scope->naxis; a++)
            if ((r->to[i].pattern.axes >> a & 1) && r->scope->axis[a].name[0] == '_')
                return true;
    return false;
}

static void check_rules(const struct ckpt_rule *rule, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (int k = 0; k < ROUNDS && !pads(&rule[i]); k++)
            check_once(&rule[i]);
}

TEST(recipe_inverse, every_rule_of_every_recipe)
{
    static const char *const format[] = {"megatron",     "nanotron",  "dcp",
                                         "transformers", "deepspeed", "vllm",
                                         "olmo_core",    "litgpt",    "orbax"};
    struct ckpt_err err = {0};
    struct ckpt_recipes *all;
    const struct ckpt_recipe_folder *set;
    size_t nfile = 0;

    seed = 1;
    CHECK_OK(ckpt_recipes_load(NULL, &all, &err));
    for (size_t k = 0; k < sizeof format / sizeof *format; k++) {
        CHECK_OK(ckpt_recipes_of(all, format[k], &set, &err));
        for (size_t i = 0; i < set->recipes.len; i++) {
            struct ckpt_recipe *r = set->recipes.ptr[i];
            const bool back = r->backwards;
            CHECK_OK(ckpt_recipes_finish(all, r, &err));
            CHECK(!r->format || back || strcmp(r->format, format[k]) == 0);
            nfile += !back;
            if (r->format)
                check_rules(r->rules.ptr, r->rules.len);
        }
    }
    for (size_t i = 0; i < ckpt_recipe_nblobs; i++)
        nfile -= strncmp(ckpt_recipe_blobs[i].name, "models/", 7) != 0 &&
                 strncmp(ckpt_recipe_blobs[i].name, "types/", 6) != 0;
    CHECK_EQ(nfile, 0); /* no folder is left out */
    ckpt_recipes_free(all);
}

/* What recipes must be able to say: sources and targets, up to a NULL each. */
static const struct mapping {
    const char *what;
    const char *from[9], *to[6];
} mappings[] = {
    {"rename", {"a.weight"}, {"b.weight"}},
    {"transpose", {"a  i o"}, {"b  o i"}},
    {"q, k, v concatenated",
     {"qkv  (q=heads head_dim + k=kv_heads head_dim + v=kv_heads head_dim) ..."},
     {"q  (q head_dim) ...", "k  (k head_dim) ...", "v  (v head_dim) ..."}},
    {"per query group",
     {"qkv  (kv_heads (q=share + k=1 + v=1) head_dim)/tp ..."},
     {"q  (kv_heads q head_dim) ...", "k  (kv_heads k head_dim) ...",
      "v  (kv_heads v head_dim) ..."}},
    {"to Phi-3",
     {"qkv  (kv_heads (q=share + k=1 + v=1) head_dim)/tp h"},
     {"p  (kv_heads q head_dim + kv_heads k head_dim + kv_heads v head_dim) h"}},
    {"gated q",
     {"qkv  (kv_heads (a=2 share + k=1 + v=1) head_dim) h"},
     {"q  (kv_heads share a head_dim) h", "k  (kv_heads k head_dim) h",
      "v  (kv_heads v head_dim) h"}},
    {"pre-mcore qkv, version 0",
     {"qkv  (q=n/tp + k=n/tp + v=n/tp) h"},
     {"q  q h", "k  k h", "v  v h"}},
    {"pre-mcore qkv, version 1",
     {"qkv  (heads head_dim (q=1 + k=1 + v=1))/tp h"},
     {"q  (heads head_dim q) h", "k  (heads head_dim k) h", "v  (heads head_dim v) h"}},
    {"gate and up", {"fc1  (gate=f + up=f) h"}, {"gate  gate h", "up  up h"}},
    {"gate and up per rank", {"fc1  (gate=f/tp + up=f/tp) h"}, {"gate  gate h", "up  up h"}},
    {"row-parallel", {"fc2  h f/tp"}, {"down"}},
    {"RoPE pairs to halves", {"q  (n i=half p=2) h"}, {"q2  (n p i) h"}},
    {"partial RoPE", {"q  (n (i=rot p=2 + s=rest)) h"}, {"q2  (n (p i + s)) h"}},
    {"vocabulary padding", {"e  (vocab + _pad)/tp h"}, {"f  vocab h"}},
    {"experts, axis or name", {"experts[.{expert}].X  f h"}, {"experts.{expert}.Y  f h"}},
    {"local experts", {"local_experts.{expert/ep}.X"}, {"experts.{expert}.Y"}},
    {"expert rank inside",
     {"X{j}  (r (gate=moe_ffn + up=moe_ffn)) h"},
     {"experts.{r j}.gate  gate h", "experts.{r j}.up  up h"}},
    {"experts [in, out]",
     {"x  expert h (gate=f + up=f)"},
     {"experts.{expert}.gate  gate h", "experts.{expert}.up  up h"}},
    {"experts fused in memory",
     {"x  expert (gate=f + up=f) h"},
     {"experts.{expert}.gate  gate h", "experts.{expert}.up  up h"}},
    {"gpt-oss", {"X[.{expert}]  (p=2 f/tp) h"}, {"Y  expert h (f p)"}},
    {"Mamba, split",
     {"z  z h", "x  x h", "B  B h", "C  C h", "t  t h"},
     {"in  (z + x + B + C + t) h"}},
    {"Mamba, per rank",
     {"in  (z=inner/tp + x=inner/tp + B=state/tp + C=state/tp + t=heads/tp) h"},
     {"out  (z + x + B + C + t) h"}},
    {"Mamba, interleaved", {"in  (i p=2)/tp h"}, {"out  (p i) h"}},
    {"GDN qkvz",
     {"q  (key_heads q) h", "k  (key_heads k) h", "v  (key_heads v) h", "z  (key_heads z) h"},
     {"qkvz  (key_heads (q + k + v + z)) h"}},
    {"conv1d", {"x  x ...", "B  B ...", "C  C ..."}, {"conv  (x + B + C) ..."}},
    {"halves swapped", {"a  o (a=f + b=f)"}, {"b  o (b + a)"}},
    {"unflatten", {"a  o (channels rows cols)"}, {"b  o channels rows cols"}},
    {"squeeze", {"a  1 n"}, {"b  n"}},
    {"MTP", {"mtp_layers.{k}.X"}, {"layers.{k+layers}.Y"}},
    {"renumbered layers", {"layers.{attention:layer}.X"}, {"layers.{layer}.Y"}},
    {"layers as an axis",
     {"layers[.{layer}].<fc1.norm_|input_norm.>weight"},
     {"layers.{layer}.norm.weight"}},
};

TEST(recipe_inverse, the_table_of_mappings)
{
    struct ckpt_err err = {0};

    seed = 7;
    for (size_t i = 0; i < sizeof mappings / sizeof *mappings; i++) {
        const struct mapping *m = &mappings[i];
        struct ckpt_arena arena = {0};
        struct ckpt_rule_context cx = {
            .arena = &arena, .where = m->what, .from_at = "", .to_at = ""};
        ckpt_rules rules = {0};
        uint32_t nfrom = 0, nto = 0;
        while (m->from[nfrom])
            nfrom++;
        while (nto < 6 && m->to[nto])
            nto++;
        CHECK_OK(ckpt_rule_parse(&cx, m->from, nfrom, m->to, nto, &rules, &err));
        check_rules(rules.ptr, rules.len);
        ckpt_vec_release(&rules);
        ckpt_arena_release(&arena);
    }
}

TESTS(T(recipe_inverse, every_rule_of_every_recipe), T(recipe_inverse, the_table_of_mappings))
