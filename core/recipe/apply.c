/* SPDX-License-Identifier: Apache-2.0 */
/* Applying a recipe: the model file says which tensors there are, the rules say where each comes
 * from. */
#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "recipe/lower.h"
#include "recipe/recipes.h"
#include "recipe/settings.h"

enum { MAX_TARGETS = 1 << 24, MAX_STACK = 1 << 20, MAX_SHOWN_UNUSED = 3 };

/* A side of a rule as an entry of an index by skeleton. */
struct entry {
    uint32_t rule, side, spelling;
    uint32_t next;                   /* UINT32_MAX: none */
    uint64_t max[CKPT_NAME_NUMBERS]; /* sources: the greatest numbers found */
    bool found;
};

struct index {
    struct ckpt_map map;
    CKPT_VEC(struct entry) entry;
};

/* A rule with the sizes that are known before any tensor is looked at. */
struct rule_state {
    struct ckpt_sizes sizes;
    bool active;
};

struct apply {
    const struct ckpt_recipe *recipe;
    const struct ckpt_catalog *src;
    const struct ckpt_recipe_options *opt;
    struct ckpt_settings set;
    struct rule_state *state;
    struct index targets, sources;
    struct ckpt_catalog *cat;
    bool *used; /* tensors of src */
    struct ckpt_instance in;
    ckpt_drafts drafts;
    struct ckpt_str name, buf;
    struct ckpt_arena keys; /* of the indices */
    struct {
        const char *name;
        uint64_t at;
    } loop[CKPT_FAMILY_LOOPS];
    size_t nloop;
    uint32_t blocks, block; /* given so far; of the tensors being added, or 0 */
    size_t ntarget;
    const char *explain; /* the target to explain, or NULL */
    json_t *explanation;
    struct ckpt_err *err;
};

/* ---- index ---- */

static int index_add(struct apply *ap, struct index *ix, const struct ckpt_name *n, uint32_t rule,
                     uint32_t side, uint32_t spelling)
{
    struct entry *e;
    uint32_t at = (uint32_t)ix->entry.len, old;
    bool is_new;

    ckpt_str_clear(&ap->buf);
    ckpt_name_template_skeleton(n, &ap->buf);
    char *key = ap->buf.failed ? NULL : ckpt_arena_strdup(&ap->keys, ckpt_str_get(&ap->buf));
    if (!key || ckpt_vec_add(&ix->entry, &e) < 0 ||
        ckpt_map_put(&ix->map, key, strlen(key), at, &old, &is_new) < 0)
        return ckpt_nomem(ap->err);
    *e = (struct entry){.rule = rule, .side = side, .spelling = spelling, .next = UINT32_MAX};
    if (is_new)
        return 0;
    while (ix->entry.ptr[old].next != UINT32_MAX) /* keep the order of the file */
        old = ix->entry.ptr[old].next;
    ix->entry.ptr[old].next = at;
    return 0;
}

/* The first entry that a name may fit, or UINT32_MAX. */
static uint32_t index_find(struct apply *ap, const struct index *ix, const char *name, size_t len)
{
    uint32_t at = UINT32_MAX;

    ckpt_str_clear(&ap->buf);
    ckpt_name_skeleton(name, len, &ap->buf);
    (void)ckpt_map_get(&ix->map, ckpt_str_get(&ap->buf), ap->buf.len, &at);
    return at;
}

static int build_indices(struct apply *ap)
{
    const struct ckpt_expr_env env = {ckpt_settings_after, &ap->set, ap->src};

    ap->state = calloc(ap->recipe->rules.len + 1, sizeof *ap->state);
    if (!ap->state)
        return ckpt_nomem(ap->err);
    for (uint32_t r = 0; r < ap->recipe->rules.len; r++) {
        const struct ckpt_rule *rule = &ap->recipe->rules.ptr[r];
        ap->state[r].active = true;
        for (uint32_t w = 0; w < rule->nwhen; w++)
            ap->state[r].active &= ckpt_expr_truth(rule->when[w], &env) != CKPT_FALSE;
        ckpt_settings_sizes(&ap->set, rule->scope, &ap->state[r].sizes);
        for (uint32_t i = 0; i < rule->nto; i++)
            if (index_add(ap, &ap->targets, rule->to[i].name, r, i, 0) < 0)
                return -1;
        for (uint32_t i = 0; i < rule->nfrom; i++)
            for (uint32_t k = 0; k < rule->from[i].nname; k++)
                if (index_add(ap, &ap->sources, &rule->from[i].name[k], r, i, k) < 0)
                    return -1;
    }
    return 0;
}

/* ---- numbers in names ---- */

/* The list of {list:axis}, or NULL. Borrowed from *keep, which the caller releases. */
static const json_t *list_of(struct apply *ap, const struct ckpt_name_part *part, json_t **keep)
{
    *keep = ckpt_settings_after(&ap->set, part->list);
    return json_is_array(*keep) ? *keep : NULL;
}

/* What is added to the axis: {k+layers}. */
static bool offset_of(const struct ckpt_name_part *part, const struct ckpt_sizes *sizes,
                      uint64_t *ret)
{
    *ret = part->plus;
    if (part->plus_var >= 0) {
        *ret = sizes->var[part->plus_var];
        return sizes->known >> part->plus_var & 1;
    }
    return true;
}

/* The axes that a number in a name means. False: it means none (out of range, not in the list,
 * sizes unknown). */
static bool bind_number(struct apply *ap, const struct ckpt_name_part *part, uint64_t value,
                        const struct ckpt_sizes *sizes, uint64_t *at)
{
    uint64_t plus, size;

    if (!offset_of(part, sizes, &plus) || value < plus)
        return false;
    value -= plus;
    if (part->list) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *keep = NULL;
        const json_t *list = list_of(ap, part, &keep);
        for (size_t i = 0; i < json_array_size(list); i++)
            if (json_is_integer(json_array_get(list, i)) &&
                (uint64_t)json_integer_value(json_array_get(list, i)) == value) {
                at[part->axis[0]] = i;
                return true;
            }
        return false;
    }
    for (uint8_t k = part->naxis; k-- > 1; value /= size) {
        if (!ckpt_axis_size(sizes, part->axis[k], &size) || size == 0)
            return false;
        at[part->axis[k]] = value % size;
    }
    at[part->axis[0]] = value;
    return !ckpt_axis_size(sizes, part->axis[0], &size) || value < size;
}

/* The inverse. False: there is no such number. */
static bool number_of(struct apply *ap, const struct ckpt_name_part *part,
                      const struct ckpt_sizes *sizes, const uint64_t *at, uint64_t *ret)
{
    uint64_t v = at[part->axis[0]], plus, size;

    if (part->list) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *keep = NULL;
        const json_t *list = list_of(ap, part, &keep), *item = json_array_get(list, v);
        if (!json_is_integer(item) || json_integer_value(item) < 0)
            return false;
        v = (uint64_t)json_integer_value(item);
    }
    for (uint8_t k = 1; k < part->naxis; k++) {
        if (!ckpt_axis_size(sizes, part->axis[k], &size) || __builtin_mul_overflow(v, size, &v) ||
            __builtin_add_overflow(v, at[part->axis[k]], &v))
            return false;
    }
    return offset_of(part, sizes, &plus) && !__builtin_add_overflow(v, plus, ret);
}

static bool render(struct apply *ap, const struct ckpt_name *n, const struct ckpt_sizes *sizes,
                   const uint64_t *at, struct ckpt_str *out)
{
    uint64_t value[CKPT_NAME_NUMBERS];
    size_t k = 0;

    for (uint32_t p = 0; p < n->npart; p++)
        if (!n->part[p].text && !number_of(ap, &n->part[p], sizes, at, &value[k++]))
            return false;
    ckpt_str_clear(out);
    ckpt_name_render(n, value, out);
    return true;
}

static bool match(struct apply *ap, const struct ckpt_name *n, const char *name, size_t len,
                  const struct ckpt_sizes *sizes, uint64_t *at)
{
    uint64_t value[CKPT_NAME_NUMBERS];
    size_t k = 0;

    if (!ckpt_name_match(n, name, len, value))
        return false;
    for (uint32_t p = 0; p < n->npart; p++)
        if (!n->part[p].text && !bind_number(ap, &n->part[p], value[k++], sizes, at))
            return false;
    return true;
}

/* ---- sizes of numbers, from the names there are ---- */

static int survey(struct apply *ap)
{
    uint64_t value[CKPT_NAME_NUMBERS];

    for (size_t i = 0; i < ap->src->tensors.len; i++) {
        const char *name = ap->src->tensors.ptr[i].name;
        size_t len = strlen(name);
        for (uint32_t e = index_find(ap, &ap->sources, name, len); e != UINT32_MAX;) {
            struct entry *x = &ap->sources.entry.ptr[e];
            const struct ckpt_name *n =
                &ap->recipe->rules.ptr[x->rule].from[x->side].name[x->spelling];
            if (ckpt_name_match(n, name, len, value)) {
                for (uint32_t p = 0, k = 0; p < n->npart; p++)
                    if (!n->part[p].text) {
                        x->max[k] = x->found && x->max[k] > value[k] ? x->max[k] : value[k];
                        k++;
                    }
                x->found = true;
            }
            e = x->next;
        }
    }
    return ap->buf.failed ? ckpt_nomem(ap->err) : 0;
}

/* A number counted 0..max tells the one size that its factors leave open. */
static void count_axes(const struct ckpt_name_part *part, uint64_t max, struct ckpt_sizes *sizes)
{
    const struct ckpt_scope *sc = sizes->scope;
    uint64_t plus, size, known = 1;
    int open = -1;

    if (part->list || !offset_of(part, sizes, &plus) || max < plus)
        return;
    for (uint8_t k = 0; k < part->naxis; k++) {
        if (ckpt_axis_size(sizes, part->axis[k], &size)) {
            if (size == 0 || __builtin_mul_overflow(known, size, &known))
                return;
        } else if (open >= 0) {
            return;
        } else {
            open = sc->axis[part->axis[k]].var;
        }
    }
    if (open < 0)
        return;
    uint64_t count = (max - plus) / known + 1;
    if (!(sizes->known >> open & 1) || sizes->var[open] < count) {
        sizes->var[open] = count;
        sizes->known |= 1u << open;
    }
}

/* Entries of one rule may tell the same size: the greatest counts, so start from what is known
 * without them. */
static void count_numbers(struct apply *ap)
{
    for (size_t i = 0; i < ap->sources.entry.len; i++) {
        const struct entry *x = &ap->sources.entry.ptr[i];
        const struct ckpt_name *n = &ap->recipe->rules.ptr[x->rule].from[x->side].name[x->spelling];
        if (!x->found)
            continue;
        for (uint32_t p = 0, k = 0; p < n->npart; p++)
            if (!n->part[p].text)
                count_axes(&n->part[p], x->max[k++], &ap->state[x->rule].sizes);
    }
}

/* ---- finding the sources of a target ---- */

enum presence { ABSENT, PARTIAL, PRESENT };

/* All tensors of one spelling of a side: one, or as many as its unbound axes make. */
static int collect(struct apply *ap, struct ckpt_instance *in, uint32_t side, uint32_t spelling,
                   enum presence *ret, char **ret_missing)
{
    const struct ckpt_name *n = &in->rule->from[side].name[spelling];
    const struct ckpt_scope *sc = in->rule->scope;
    uint32_t axis[CKPT_SCOPE_AXES], naxis = 0;
    uint64_t size[CKPT_SCOPE_AXES], total = 1, found = 0;
    struct ckpt_use use = {.side = side, .spelling = spelling, .bound = n->axes & ~in->bound};

    *ret = ABSENT;
    memcpy(use.at, in->at, sizeof use.at);
    for (uint32_t a = 0; a < sc->naxis; a++)
        if (use.bound >> a & 1) {
            if (!ckpt_axis_size(&in->sizes, a, &size[naxis]))
                return 0;
            if (__builtin_mul_overflow(total, size[naxis], &total) || total > MAX_STACK)
                return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' would be made of more than %d tensors",
                                 in->target, MAX_STACK);
            use.at[a] = 0;
            axis[naxis++] = a;
        }
    for (uint64_t i = 0; i < total; i++) {
        uint32_t index;
        for (uint64_t k = naxis, rest = i; k-- > 0; rest /= size[k])
            use.at[axis[k]] = rest % size[k];
        if (!render(ap, n, &in->sizes, use.at, &ap->buf))
            continue;
        if (ap->buf.failed)
            return ckpt_nomem(ap->err);
        if (!ckpt_map_get(&ap->src->by_name, ckpt_str_get(&ap->buf), ap->buf.len, &index)) {
            if (!*ret_missing && !(*ret_missing = strdup(ckpt_str_get(&ap->buf))))
                return ckpt_nomem(ap->err);
            continue;
        }
        use.tensor = &ap->src->tensors.ptr[index];
        if (ckpt_vec_push(&in->use, use) < 0)
            return ckpt_nomem(ap->err);
        found++;
    }
    *ret = total > 0 && found == total ? PRESENT : found ? PARTIAL : ABSENT;
    return 0;
}

/* One side: the spelling that is there. *missing keeps the first name that was looked for in vain.
 */
static int collect_side(struct apply *ap, struct ckpt_instance *in, uint32_t side,
                        enum presence *ret, char **missing)
{
    const size_t base = in->use.len;
    size_t keep = base;

    *ret = ABSENT;
    for (uint32_t k = 0; k < in->rule->from[side].nname; k++) {
        ckpt_cleanup(ckpt_freep) char *lost = NULL;
        enum presence p;
        if (collect(ap, in, side, k, &p, &lost) < 0)
            return -1;
        if (lost && (!*missing || (p == PARTIAL && *ret == ABSENT))) {
            free(*missing);
            *missing = ckpt_steal(&lost);
        }
        if (p == PRESENT && *ret == PRESENT)
            return ckpt_fail(ap->err, CKPT_CONFLICT, "'%s' has two sources: '%s' and '%s'",
                             in->target, in->use.ptr[base].tensor->name,
                             in->use.ptr[keep].tensor->name);
        if (p == PRESENT)
            keep = in->use.len;
        in->use.len = keep;
        *ret = p > *ret ? p : *ret;
    }
    return 0;
}

static int collect_all(struct apply *ap, struct ckpt_instance *in, enum presence *ret,
                       char **missing)
{
    uint32_t present = 0, absent = 0;

    in->use.len = 0;
    for (uint32_t i = 0; i < in->rule->nfrom; i++) {
        enum presence p;
        if (collect_side(ap, in, i, &p, missing) < 0)
            return -1;
        present += p == PRESENT;
        absent += p == ABSENT;
    }
    *ret = present == in->rule->nfrom ? PRESENT : absent == in->rule->nfrom ? ABSENT : PARTIAL;
    return 0;
}

struct resolution {
    enum presence presence;
    char *missing; /* the caller frees it; NULL if no rule speaks of the target */
};

static void resolution_release(struct resolution *r) { free(r->missing); }

/* Find the rule that delivers ap->name; ap->in becomes its instance. `all`: also rules whose
 * condition is false. */
static int resolve(struct apply *ap, bool all, struct resolution *ret)
{
    const char *name = ckpt_str_get(&ap->name);
    struct ckpt_instance *in = &ap->in;
    uint32_t winner = UINT32_MAX;

    *ret = (struct resolution){ABSENT, NULL};
    for (uint32_t e = index_find(ap, &ap->targets, name, ap->name.len); e != UINT32_MAX;
         e = ap->targets.entry.ptr[e].next) {
        const struct entry *x = &ap->targets.entry.ptr[e];
        enum presence p;
        if (!ap->state[x->rule].active && !all)
            continue;
        in->rule = &ap->recipe->rules.ptr[x->rule];
        in->side = x->side;
        in->target = name;
        in->sizes = ap->state[x->rule].sizes;
        in->bound = in->rule->to[x->side].name->axes;
        memset(in->at, 0, sizeof in->at);
        if (!match(ap, in->rule->to[x->side].name, name, ap->name.len, &in->sizes, in->at))
            continue;
        if (collect_all(ap, in, &p, &ret->missing) < 0)
            return -1;
        if (p == PRESENT && ret->presence == PRESENT && !all)
            return ckpt_fail(ap->err, CKPT_CONFLICT, "two rules give '%s': %s and %s", name,
                             ap->recipe->rules.ptr[ap->targets.entry.ptr[winner].rule].where,
                             in->rule->where);
        if (p > ret->presence || (p == PRESENT && all)) {
            ret->presence = p;
            winner = e;
        }
        if (p == PRESENT && (all || ap->targets.entry.ptr[e].next == UINT32_MAX))
            return 0; /* ap->in is the winner's */
    }
    if (ret->presence != PRESENT)
        return 0;
    /* A later candidate overwrote the instance: make the winner's again. */
    const struct entry *x = &ap->targets.entry.ptr[winner];
    enum presence p;
    in->rule = &ap->recipe->rules.ptr[x->rule];
    in->side = x->side;
    in->sizes = ap->state[x->rule].sizes;
    in->bound = in->rule->to[x->side].name->axes;
    memset(in->at, 0, sizeof in->at);
    (void)match(ap, in->rule->to[x->side].name, name, ap->name.len, &in->sizes, in->at);
    return collect_all(ap, in, &p, &ret->missing);
}

/* ---- one target ---- */

/* ap->name: the name of a model's tensor, with the numbers of the loops around it. */
static int name_target(struct apply *ap, const struct ckpt_item *it, struct ckpt_sizes *sizes)
{
    uint64_t at[CKPT_SCOPE_AXES] = {0};

    ckpt_settings_sizes(&ap->set, it->scope, sizes);
    for (uint32_t a = 0; a < it->scope->naxis; a++)
        for (size_t l = 0; l < ap->nloop; l++)
            if ((it->name->axes >> a & 1) && strcmp(it->scope->axis[a].name, ap->loop[l].name) == 0)
                at[a] = ap->loop[l].at;
    if (!render(ap, it->name, sizes, at, &ap->name))
        return ckpt_fail(ap->err, CKPT_MISSING, "the numbers of '%s' are not known", it->text);
    return ap->name.failed ? ckpt_nomem(ap->err) : 0;
}

/* The model file's shape must be what the rule made. */
static int check_shape(struct apply *ap, const struct ckpt_item *it, const struct ckpt_sizes *sizes,
                       const uint64_t *dim, uint32_t rank)
{
    char shape[CKPT_SHAPE_TEXT], hint[128] = "";
    uint64_t want;
    uint32_t var;

    if (it->shape.ndim != rank)
        return ckpt_fail(ap->err, CKPT_CONFLICT,
                         "'%s' has the shape %s, the model has %" PRIu32
                         " dimensions there (from '%s')",
                         ckpt_str_get(&ap->name), ckpt_shape_text(dim, rank, shape, sizeof shape),
                         it->shape.ndim, ap->in.use.ptr[0].tensor->name);
    for (uint32_t d = 0; d < rank; d++) {
        switch (ckpt_factor_size(&it->shape.dim[d], sizes, &want, &var)) {
        case CKPT_SIZE_KNOWN:
            break;
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(ap->err, CKPT_LIMIT, "the size of '%s' overflows",
                             ckpt_str_get(&ap->name));
        case CKPT_SIZE_UNKNOWN:
            return ckpt_fail(
                ap->err, CKPT_MISSING,
                "'%s': dimension %" PRIu32 ": '%s' is no whole number or not known%s",
                ckpt_str_get(&ap->name), d, it->scope->var[var].name,
                ckpt_settings_hint(&ap->set, it->scope->var[var].name, hint, sizeof hint));
        }
        if (want == dim[d])
            continue;
        for (uint32_t a = 0; a < it->scope->naxis && !hint[0]; a++)
            if (it->shape.dim[d].kind == CKPT_FACTOR_AXIS && it->shape.dim[d].axis == a)
                (void)ckpt_settings_hint(&ap->set, it->scope->axis[a].name, hint, sizeof hint);
        return ckpt_fail(ap->err, CKPT_CONFLICT,
                         "dimension %" PRIu32 " of '%s' is %" PRIu64
                         " in the checkpoint ('%s'), but the config makes it %" PRIu64 "%s",
                         d, ckpt_str_get(&ap->name), dim[d], ap->in.use.ptr[0].tensor->name, want,
                         hint);
    }
    return 0;
}

static int check_dtypes(struct apply *ap)
{
    const struct ckpt_instance *in = &ap->in;

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_tensor *t = in->use.ptr[i].tensor, *first = in->use.ptr[0].tensor;
        if (t->value)
            return ckpt_fail(ap->err, CKPT_UNSUPPORTED,
                             "'%s' is a computed tensor: it can't be mapped", t->name);
        if (t->dtype != first->dtype)
            return ckpt_fail(ap->err, CKPT_CONFLICT,
                             "'%s' is made of tensors of different types: '%s' is %s, '%s' is %s",
                             in->target, first->name, ckpt_dtype_name(first->dtype), t->name,
                             ckpt_dtype_name(t->dtype));
    }
    return 0;
}

static void mark_used(struct apply *ap)
{
    for (size_t i = 0; i < ap->in.use.len; i++)
        ap->used[ap->in.use.ptr[i].tensor - ap->src->tensors.ptr] = true;
}

static int explain(struct apply *ap)
{
    const struct ckpt_instance *in = &ap->in;
    json_t *sources = json_array();

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_side *s = &in->rule->from[in->use.ptr[i].side];
        const char *pattern = s->text + ckpt_name_extent(s->text);
        while (*pattern == ' ' || *pattern == '\t')
            pattern++;
        (void)json_array_append_new(sources,
                                    json_pack("{s:s, s:s}", "tensor", in->use.ptr[i].tensor->name,
                                              "pattern", *pattern ? pattern : "..."));
    }
    ap->explanation =
        json_pack("{s:s, s:s, s:s, s:o}", "recipe", ap->recipe->name, "rule", in->rule->where,
                  "target", in->rule->to[in->side].text, "sources", sources);
    return ap->explanation ? 0 : ckpt_nomem(ap->err);
}

static int add_target(struct apply *ap, const struct ckpt_item *it, const struct ckpt_sizes *sizes)
{
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;
    size_t index;

    mark_used(ap);
    if (ap->explain && strcmp(ap->explain, ckpt_str_get(&ap->name)) == 0 && explain(ap) < 0)
        return -1;
    ap->drafts.len = 0;
    if (ckpt_instance_solve(&ap->in, &ap->set, ap->err) < 0 || check_dtypes(ap) < 0 ||
        ckpt_instance_shape(&ap->in, dim, &rank, ap->err) < 0 ||
        check_shape(ap, it, sizes, dim, rank) < 0 ||
        ckpt_instance_lower(&ap->in, dim, rank, &ap->drafts, ap->err) < 0)
        return ckpt_err_in(ap->err, "%s", ap->in.rule->where);
    if (ap->ntarget++ == MAX_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "more than %d tensors", MAX_TARGETS);
    if (ckpt_catalog_add(ap->cat, ckpt_str_get(&ap->name), ap->in.use.ptr[0].tensor->dtype, dim,
                         rank, &index, ap->err) < 0)
        return -1;
    ap->cat->tensors.ptr[index].block = ap->block;
    return ckpt_catalog_set_pieces(ap->cat, index, ap->drafts.ptr, ap->drafts.len, ap->err);
}

static int missing_error(struct apply *ap, const struct resolution *r)
{
    if (!r->missing)
        return ckpt_fail(ap->err, CKPT_MISSING,
                         "the model needs '%s', of which no rule of %s speaks",
                         ckpt_str_get(&ap->name), ap->recipe->name);
    return ckpt_fail(ap->err, CKPT_MISSING,
                     "the model needs '%s', but the checkpoint has no tensor '%s'",
                     ckpt_str_get(&ap->name), r->missing);
}

/* ---- the model file's items ---- */

/* How much of a list the checkpoint can deliver; a cheap look, without sizes. */
struct tally {
    size_t need, have;
};

enum pass { PASS_EMIT, PASS_LEAVE_OUT };

static int probe(struct apply *ap, const struct ckpt_items *list, struct tally *t);
static int walk(struct apply *ap, const struct ckpt_items *list, enum pass pass);

/* Conditions of the model file also see the numbers of the loops. */
static json_t *item_key(void *ctx, const char *key)
{
    struct apply *ap = ctx;

    for (size_t l = ap->nloop; l-- > 0;)
        if (strcmp(ap->loop[l].name, key) == 0)
            return json_integer((json_int_t)ap->loop[l].at);
    return ckpt_settings_after(&ap->set, key);
}

static enum ckpt_truth item_truth(struct apply *ap, const struct ckpt_item *it)
{
    const struct ckpt_expr_env env = {item_key, ap, ap->src};

    return ckpt_expr_truth(it->when, &env);
}

/* Run over an 'each' (or once, if it has no loop), calling fn on the list. */
static int loop(struct apply *ap, const struct ckpt_item *it,
                int (*fn)(struct apply *ap, const struct ckpt_item *it, void *ctx), void *ctx)
{
    const uint32_t outer = ap->block;
    uint64_t n;

    if (!it->loop)
        return fn(ap, it, ctx);
    if (!ckpt_settings_dim(&ap->set, it->loop, &n)) {
        char hint[128];
        return ckpt_fail(ap->err, CKPT_MISSING, "the number of '%s' is not known%s", it->loop,
                         ckpt_settings_hint(&ap->set, it->loop, hint, sizeof hint));
    }
    if (n > MAX_TARGETS)
        return ckpt_fail(ap->err, CKPT_LIMIT, "'%s' is %" PRIu64, it->loop, n);
    if (it->block)
        ap->block = ++ap->blocks;
    ap->loop[ap->nloop].name = it->loop;
    ap->nloop++;
    int rc = 0;
    for (uint64_t i = 0; i < n && rc == 0; i++) {
        ap->loop[ap->nloop - 1].at = i;
        rc = fn(ap, it, ctx);
    }
    ap->nloop--;
    ap->block = outer;
    return rc;
}

static int probe_inside(struct apply *ap, const struct ckpt_item *it, void *ctx)
{
    return probe(ap, it->list, ctx);
}

static int walk_inside(struct apply *ap, const struct ckpt_item *it, void *ctx)
{
    return walk(ap, it->list, *(enum pass *)ctx);
}

static int probe_tensor(struct apply *ap, const struct ckpt_item *it, struct tally *t)
{
    ckpt_cleanup(resolution_release) struct resolution r = {0};
    struct ckpt_sizes sizes;

    if (name_target(ap, it, &sizes) < 0 || resolve(ap, false, &r) < 0)
        return -1;
    t->need += !it->optional;
    t->have += !it->optional && r.presence == PRESENT;
    return 0;
}

/* The list of an 'either' that fits; SIZE_MAX if none does, *ret_best is the one nearest to it
 * then. */
static int fitting_list(struct apply *ap, const struct ckpt_item *it, size_t *ret, size_t *ret_best)
{
    size_t best_have = 0;

    *ret = SIZE_MAX;
    *ret_best = 0;
    for (size_t i = 0; i < it->nlist; i++) {
        struct tally t = {0};
        if (probe(ap, &it->list[i], &t) < 0)
            return -1;
        if (t.have == t.need && *ret != SIZE_MAX)
            return ckpt_fail(ap->err, CKPT_CONFLICT,
                             "%s: the checkpoint fits several choices of the model file",
                             ap->recipe->name);
        if (t.have == t.need)
            *ret = i;
        if (t.have > best_have) {
            best_have = t.have;
            *ret_best = i;
        }
    }
    return 0;
}

static int probe_either(struct apply *ap, const struct ckpt_item *it, struct tally *t)
{
    size_t fit, best;

    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return probe(ap, &it->list[fit != SIZE_MAX ? fit : best], t);
}

static int probe_item(struct apply *ap, const struct ckpt_item *it, struct tally *t)
{
    struct tally inner = {0};

    switch (it->kind) {
    case CKPT_ITEM_TENSOR:
        return probe_tensor(ap, it, t);
    case CKPT_ITEM_EACH:
        return loop(ap, it, probe_inside, t);
    case CKPT_ITEM_EITHER:
        return probe_either(ap, it, t);
    case CKPT_ITEM_WHEN:
        switch (item_truth(ap, it)) {
        case CKPT_TRUE:
            return probe(ap, it->list, t);
        case CKPT_FALSE:
            return 0;
        case CKPT_UNKNOWN: /* all or none */
            if (probe(ap, it->list, &inner) < 0)
                return -1;
            if (inner.have > 0) {
                t->need += inner.need;
                t->have += inner.have;
            }
            return 0;
        }
    }
    return 0;
}

static int probe(struct apply *ap, const struct ckpt_items *list, struct tally *t)
{
    for (size_t i = 0; i < list->n; i++)
        if (probe_item(ap, &list->item[i], t) < 0)
            return -1;
    return 0;
}

static int walk_tensor(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    ckpt_cleanup(resolution_release) struct resolution r = {0};
    struct ckpt_sizes sizes;

    if (name_target(ap, it, &sizes) < 0 || resolve(ap, pass == PASS_LEAVE_OUT, &r) < 0)
        return -1;
    if (pass == PASS_LEAVE_OUT) {
        if (r.presence == PRESENT)
            mark_used(ap);
        return 0;
    }
    if (r.presence == PRESENT)
        return add_target(ap, it, &sizes);
    if (it->optional && r.presence == ABSENT)
        return 0;
    if (!ap->opt->allow_partial || !r.missing)
        return missing_error(ap, &r);
    ckpt_catalog_warn(ap->cat, "'%s' is left out: the checkpoint has no tensor '%s'",
                      ckpt_str_get(&ap->name), r.missing);
    return 0;
}

static int walk_either(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    size_t fit, best;

    if (pass == PASS_LEAVE_OUT) {
        for (size_t i = 0; i < it->nlist; i++)
            if (walk(ap, &it->list[i], pass) < 0)
                return -1;
        return 0;
    }
    if (fitting_list(ap, it, &fit, &best) < 0)
        return -1;
    return walk(ap, &it->list[fit != SIZE_MAX ? fit : best], pass);
}

static int walk_when(struct apply *ap, const struct ckpt_item *it, enum pass pass)
{
    struct tally t = {0};

    switch (item_truth(ap, it)) {
    case CKPT_TRUE:
        return walk(ap, it->list, pass);
    case CKPT_FALSE:
        return walk(ap, it->list, PASS_LEAVE_OUT);
    case CKPT_UNKNOWN:
        if (probe(ap, it->list, &t) < 0)
            return -1;
        return t.have > 0 ? walk(ap, it->list, pass) : 0;
    }
    return 0;
}

static int walk(struct apply *ap, const struct ckpt_items *list, enum pass pass)
{
    int rc = 0;

    for (size_t i = 0; i < list->n && rc == 0; i++) {
        const struct ckpt_item *it = &list->item[i];
        switch (it->kind) {
        case CKPT_ITEM_TENSOR:
            rc = walk_tensor(ap, it, pass);
            break;
        case CKPT_ITEM_EACH:
            rc = loop(ap, it, walk_inside, &pass);
            break;
        case CKPT_ITEM_WHEN:
            rc = walk_when(ap, it, pass);
            break;
        case CKPT_ITEM_EITHER:
            rc = walk_either(ap, it, pass);
            break;
        }
    }
    return rc;
}

/* ---- the whole ---- */

static int start_catalog(struct apply *ap)
{
    size_t i;
    json_t *line;

    if (ckpt_catalog_new(&ap->cat, ap->err) < 0)
        return -1;
    for (size_t s = 0; s < ap->src->sources.len; s++)
        if (ckpt_catalog_add_source(ap->cat, ap->src->sources.ptr[s], ap->err) == UINT32_MAX)
            return -1;
    json_decref(ap->cat->about);
    ap->cat->about = json_deep_copy(ap->src->about);
    json_array_foreach(ap->src->warnings, i, line) if (json_array_append(ap->cat->warnings, line) <
                                                       0) return ckpt_nomem(ap->err);
    return ap->cat->about ? 0 : ckpt_nomem(ap->err);
}

/* Tensors that nobody asked for may be a part of the model that the recipe does not know: say so.
 */
static void warn_unused(struct apply *ap)
{
    struct ckpt_str names = {0};
    size_t n = 0;

    for (size_t i = 0; i < ap->src->tensors.len; i++)
        if (!ap->used[i] && n++ < MAX_SHOWN_UNUSED)
            ckpt_str_printf(&names, "%s'%.200s'", names.len ? ", " : "",
                            ap->src->tensors.ptr[i].name);
    if (n > 0)
        ckpt_catalog_warn(ap->cat, "%zu tensors of the checkpoint are not part of the model: %s%s",
                          n, ckpt_str_get(&names), n > MAX_SHOWN_UNUSED ? " ..." : "");
    ckpt_str_release(&names);
}

static void apply_release(struct apply *ap)
{
    ckpt_settings_release(&ap->set);
    free(ap->state);
    ckpt_map_release(&ap->targets.map);
    ckpt_map_release(&ap->sources.map);
    ckpt_vec_release(&ap->targets.entry);
    ckpt_vec_release(&ap->sources.entry);
    ckpt_catalog_free(ap->cat);
    free(ap->used);
    ckpt_instance_release(&ap->in);
    ckpt_vec_release(&ap->drafts);
    ckpt_str_release(&ap->name);
    ckpt_str_release(&ap->buf);
    ckpt_arena_release(&ap->keys);
    json_decref(ap->explanation);
}

static int run(struct apply *ap, const struct ckpt_recipes *set)
{
    if (ckpt_recipes_choose(set, ap->src, ap->opt, &ap->recipe, ap->err) < 0 ||
        start_catalog(ap) < 0 ||
        ckpt_settings_init(&ap->set, ap->recipe, ap->src, ap->opt, ap->cat, ap->err) < 0)
        return -1;
    ap->used = calloc(ap->src->tensors.len + 1, sizeof *ap->used);
    if (!ap->used)
        return ckpt_nomem(ap->err);
    if (build_indices(ap) < 0 || survey(ap) < 0)
        return -1;
    count_numbers(ap);
    if (walk(ap, &ap->recipe->family->tensors, PASS_EMIT) < 0)
        return -1;
    warn_unused(ap);
    return 0;
}

static int make_model(struct apply *ap, struct ckpt_model **ret)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *m = calloc(1, sizeof *m);

    if (!m || !(m->recipe = strdup(ap->recipe->name)))
        return ckpt_nomem(ap->err);
    m->config = json_incref(ap->set.hf);
    ap->cat->config = json_incref(ap->set.hf);
    m->catalog = ckpt_steal(&ap->cat);
    *ret = ckpt_steal(&m);
    return 0;
}

int ckpt_recipe_apply(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                      const struct ckpt_recipe_options *opt, struct ckpt_model **ret,
                      struct ckpt_err *err)
{
    struct apply ap = {.src = src, .opt = opt, .err = err};
    int rc = run(&ap, r) < 0 ? -1 : make_model(&ap, ret);

    apply_release(&ap);
    return rc;
}

int ckpt_recipe_explain(const struct ckpt_recipes *r, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const char *name, json_t **ret,
                        struct ckpt_err *err)
{
    struct apply ap = {.src = src, .opt = opt, .explain = name, .err = err};
    int rc = run(&ap, r);

    if (rc == 0 && !ap.explanation)
        rc = ckpt_fail(err, CKPT_MISSING, "the model has no tensor '%.200s'", name);
    if (rc == 0)
        *ret = ckpt_steal(&ap.explanation);
    apply_release(&ap);
    return rc;
}

void ckpt_model_free(struct ckpt_model *m)
{
    if (!m)
        return;
    ckpt_catalog_free(m->catalog);
    json_decref(m->config);
    free(m->recipe);
    free(m);
}

void ckpt_model_freep(struct ckpt_model **m)
{
    ckpt_model_free(*m);
    *m = NULL;
}
