/* SPDX-License-Identifier: Apache-2.0 */
/* Resolving the names of targets to rules and to the names of sources. */
#include "recipe/apply/resolve.h"

#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"

enum { MAX_STACK = 1 << 20 };

/* ---- index ---- */

static int index_add(struct ckpt_resolver *rs, struct ckpt_name_index *ix,
                     const struct ckpt_name *n, uint32_t rule, uint32_t side, uint32_t spelling)
{
    struct ckpt_name_entry *e;
    const uint32_t at = (uint32_t)ix->entry.len;
    uint32_t old;

    ckpt_str_clear(&rs->buf);
    ckpt_name_template_skeleton(n, &rs->buf);
    char *key = rs->buf.failed ? NULL : ckpt_arena_strdup(&rs->keys, ckpt_str_get(&rs->buf));
    if (!key || ckpt_vec_add(&ix->entry, &e) < 0 ||
        (old = ckpt_map_add(&ix->map, key, at)) == CKPT_NONE)
        return ckpt_nomem(rs->err);
    *e = (struct ckpt_name_entry){
        .rule = rule, .side = side, .spelling = spelling, .next = UINT32_MAX};
    if (old == at)
        return 0;
    while (ix->entry.ptr[old].next != UINT32_MAX) /* keep the order of the file */
        old = ix->entry.ptr[old].next;
    ix->entry.ptr[old].next = at;
    return 0;
}

/* Find the first entry that a name may match, or UINT32_MAX. */
static uint32_t index_find(struct ckpt_resolver *rs, const struct ckpt_name_index *ix,
                           const char *name, size_t len)
{
    ckpt_str_clear(&rs->buf);
    ckpt_name_skeleton(name, len, &rs->buf);
    return ckpt_map_find(&ix->map, ckpt_str_get(&rs->buf));
}

static int build_indices(struct ckpt_resolver *rs)
{
    const struct ckpt_expr_env env = {ckpt_settings_after, rs->set, rs->src};

    rs->state = calloc(rs->recipe->rules.len + 1, sizeof *rs->state);
    if (!rs->state)
        return ckpt_nomem(rs->err);
    for (uint32_t r = 0; r < rs->recipe->rules.len; r++) {
        const struct ckpt_rule *rule = &rs->recipe->rules.ptr[r];
        rs->state[r].active = true;
        for (uint32_t w = 0; w < rule->nwhen; w++)
            rs->state[r].active &= ckpt_expr_truth(rule->when[w], &env) != CKPT_FALSE;
        ckpt_settings_sizes(rs->set, rule->scope, &rs->state[r].sizes);
        for (uint32_t i = 0; i < rule->nto; i++)
            if (index_add(rs, &rs->targets, rule->to[i].name, r, i, 0) < 0)
                return -1;
        for (uint32_t i = 0; i < rule->nfrom; i++)
            for (uint32_t k = 0; k < rule->from[i].nname; k++)
                if (index_add(rs, &rs->sources, &rule->from[i].name[k], r, i, k) < 0)
                    return -1;
    }
    return 0;
}

/* ---- numbers in names ---- */

/* Get the number that is added to the axis: {k+layers}. False: it is not known. */
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

/* Compute the values of the axes from a number in a name. False: no value is possible (out of
 * range, not in the list, sizes unknown). */
static bool bind_number(struct ckpt_resolver *rs, const struct ckpt_name_part *part, uint64_t value,
                        const struct ckpt_sizes *sizes, uint64_t *at)
{
    uint64_t plus, size;

    if (!offset_of(part, sizes, &plus) || value < plus)
        return false;
    value -= plus;
    if (part->list) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *list = ckpt_settings_after(rs->set, part->list);
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

/* Compute the number from the values of the axes. False: there is none. */
static bool number_of(struct ckpt_resolver *rs, const struct ckpt_name_part *part,
                      const struct ckpt_sizes *sizes, const uint64_t *at, uint64_t *ret)
{
    uint64_t v = at[part->axis[0]], plus, size;

    if (part->list) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *list = ckpt_settings_after(rs->set, part->list);
        const json_t *item = json_array_get(list, v);
        if (!json_is_integer(item) || json_integer_value(item) < 0)
            return false;
        v = (uint64_t)json_integer_value(item);
    }
    for (uint8_t k = 1; k < part->naxis; k++) {
        if (!ckpt_axis_size(sizes, part->axis[k], &size) || ckd_mul(&v, v, size) ||
            ckd_add(&v, v, at[part->axis[k]]))
            return false;
    }
    return offset_of(part, sizes, &plus) && !ckd_add(ret, v, plus);
}

bool ckpt_resolver_render(struct ckpt_resolver *rs, const struct ckpt_name *n,
                          const struct ckpt_sizes *sizes, const uint64_t *at, struct ckpt_str *out)
{
    uint64_t value[CKPT_NAME_NUMBERS];
    size_t k = 0;

    for (uint32_t p = 0; p < n->npart; p++)
        if (!n->part[p].text && !number_of(rs, &n->part[p], sizes, at, &value[k++]))
            return false;
    ckpt_str_clear(out);
    ckpt_name_render(n, value, out);
    return true;
}

static bool match(struct ckpt_resolver *rs, const struct ckpt_name *n, const char *name, size_t len,
                  const struct ckpt_sizes *sizes, uint64_t *at)
{
    uint64_t value[CKPT_NAME_NUMBERS];
    size_t k = 0;

    if (!ckpt_name_match(n, name, len, value))
        return false;
    for (uint32_t p = 0; p < n->npart; p++)
        if (!n->part[p].text && !bind_number(rs, &n->part[p], value[k++], sizes, at))
            return false;
    return true;
}

/* ---- sizes of numbers, from the names there are ---- */

static int survey(struct ckpt_resolver *rs)
{
    uint64_t value[CKPT_NAME_NUMBERS];

    for (size_t i = 0; i < rs->src->tensors.len; i++) {
        const char *name = rs->src->tensors.ptr[i].name;
        size_t len = strlen(name);
        for (uint32_t e = index_find(rs, &rs->sources, name, len); e != UINT32_MAX;) {
            struct ckpt_name_entry *x = &rs->sources.entry.ptr[e];
            const struct ckpt_name *n =
                &rs->recipe->rules.ptr[x->rule].from[x->side].name[x->spelling];
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
    return rs->buf.failed ? ckpt_nomem(rs->err) : 0;
}

/* Numbers from 0 to max determine the only unknown size of the number's factors. */
static void count_axes(const struct ckpt_name_part *part, uint64_t max, struct ckpt_sizes *sizes)
{
    const struct ckpt_scope *sc = sizes->scope;
    uint64_t plus, size, known = 1;
    int open = -1;

    if (part->list || !offset_of(part, sizes, &plus) || max < plus)
        return;
    for (uint8_t k = 0; k < part->naxis; k++) {
        if (ckpt_axis_size(sizes, part->axis[k], &size)) {
            if (size == 0 || ckd_mul(&known, known, size))
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

/* Determine sizes from numbers in names. Several entries of one rule may determine the same size:
 * the largest counts, so each starts from the sizes that are known without the others. */
static void count_numbers(struct ckpt_resolver *rs)
{
    for (size_t i = 0; i < rs->sources.entry.len; i++) {
        const struct ckpt_name_entry *x = &rs->sources.entry.ptr[i];
        const struct ckpt_name *n = &rs->recipe->rules.ptr[x->rule].from[x->side].name[x->spelling];
        if (!x->found)
            continue;
        for (uint32_t p = 0, k = 0; p < n->npart; p++)
            if (!n->part[p].text)
                count_axes(&n->part[p], x->max[k++], &rs->state[x->rule].sizes);
    }
}

/* ---- finding the sources of a target ---- */

/* Collect the tensors of one spelling of a side: one tensor, or several if it has unbound axes. */
static int collect(struct ckpt_resolver *rs, struct ckpt_instance *in, uint32_t side,
                   uint32_t spelling, enum ckpt_presence *ret, char **ret_missing)
{
    const struct ckpt_name *n = &in->rule->from[side].name[spelling];
    const struct ckpt_scope *sc = in->rule->scope;
    uint32_t axis[CKPT_SCOPE_AXES], naxis = 0;
    uint64_t size[CKPT_SCOPE_AXES], total = 1, found = 0;
    struct ckpt_source_use use = {
        .side = side, .spelling = spelling, .bound = n->axes & ~in->bound};

    *ret = CKPT_ABSENT;
    memcpy(use.at, in->at, sizeof use.at);
    for (uint32_t a = 0; a < sc->naxis; a++)
        if (use.bound >> a & 1) {
            if (!ckpt_axis_size(&in->sizes, a, &size[naxis]))
                return 0;
            if (ckd_mul(&total, total, size[naxis]) || total > MAX_STACK)
                return ckpt_fail(rs->err, CKPT_LIMIT, "'%s' would be made of more than %d tensors",
                                 in->target, MAX_STACK);
            use.at[a] = 0;
            axis[naxis++] = a;
        }
    for (uint64_t i = 0; i < total; i++) {
        for (uint64_t k = naxis, rest = i; k-- > 0; rest /= size[k])
            use.at[axis[k]] = rest % size[k];
        if (!ckpt_resolver_render(rs, n, &in->sizes, use.at, &rs->buf))
            continue;
        if (rs->buf.failed)
            return ckpt_nomem(rs->err);
        if (!(use.tensor = ckpt_catalog_find(rs->src, ckpt_str_get(&rs->buf)))) {
            if (!*ret_missing && !(*ret_missing = strdup(ckpt_str_get(&rs->buf))))
                return ckpt_nomem(rs->err);
            continue;
        }
        if (ckpt_vec_push(&in->use, use) < 0)
            return ckpt_nomem(rs->err);
        found++;
    }
    *ret = total > 0 && found == total ? CKPT_PRESENT : found ? CKPT_PARTIAL : CKPT_ABSENT;
    return 0;
}

/* Collect one side, in the spelling that is stored. *missing keeps the first name that was not
 * found. */
static int collect_side(struct ckpt_resolver *rs, struct ckpt_instance *in, uint32_t side,
                        enum ckpt_presence *ret, char **missing)
{
    const size_t base = in->use.len;
    size_t keep = base;

    *ret = CKPT_ABSENT;
    for (uint32_t k = 0; k < in->rule->from[side].nname; k++) {
        ckpt_cleanup(ckpt_freep) char *lost = NULL;
        enum ckpt_presence p;
        if (collect(rs, in, side, k, &p, &lost) < 0)
            return -1;
        if (lost && (!*missing || (p == CKPT_PARTIAL && *ret == CKPT_ABSENT))) {
            free(*missing);
            *missing = ckpt_steal(&lost);
        }
        if (p == CKPT_PRESENT && *ret == CKPT_PRESENT)
            return ckpt_fail(rs->err, CKPT_CONFLICT, "'%s' has two sources: '%s' and '%s'",
                             in->target, in->use.ptr[base].tensor->name,
                             in->use.ptr[keep].tensor->name);
        if (p == CKPT_PRESENT)
            keep = in->use.len;
        in->use.len = keep;
        *ret = p > *ret ? p : *ret;
    }
    return 0;
}

static int collect_all(struct ckpt_resolver *rs, struct ckpt_instance *in, enum ckpt_presence *ret,
                       char **missing)
{
    uint32_t present = 0, absent = 0;

    in->use.len = 0;
    for (uint32_t i = 0; i < in->rule->nfrom; i++) {
        enum ckpt_presence p;
        if (collect_side(rs, in, i, &p, missing) < 0)
            return -1;
        present += p == CKPT_PRESENT;
        absent += p == CKPT_ABSENT;
    }
    *ret = present == in->rule->nfrom  ? CKPT_PRESENT
           : absent == in->rule->nfrom ? CKPT_ABSENT
                                       : CKPT_PARTIAL;
    return 0;
}

/* Make the instance of entry x's rule for this target, without sources. False: the name does not
 * match. */
static bool instantiate(struct ckpt_resolver *rs, const struct ckpt_name_entry *x, const char *name,
                        size_t len, struct ckpt_instance *in)
{
    in->rule = &rs->recipe->rules.ptr[x->rule];
    in->side = x->side;
    in->target = name;
    in->sizes = rs->state[x->rule].sizes;
    in->bound = in->rule->to[x->side].name->axes;
    memset(in->at, 0, sizeof in->at);
    return match(rs, in->rule->to[x->side].name, name, len, &in->sizes, in->at);
}

int ckpt_resolve(struct ckpt_resolver *rs, const char *name, size_t len, bool all,
                 struct ckpt_instance *in, struct ckpt_resolution *ret)
{
    const struct ckpt_name_entry *winner = NULL, *last = NULL;

    *ret = (struct ckpt_resolution){CKPT_ABSENT, NULL};
    for (uint32_t e = index_find(rs, &rs->targets, name, len); e != UINT32_MAX;) {
        const struct ckpt_name_entry *x = &rs->targets.entry.ptr[e];
        enum ckpt_presence p;
        e = x->next;
        if (!rs->state[x->rule].active && !all)
            continue;
        last = x;
        if (!instantiate(rs, x, name, len, in))
            continue;
        if (collect_all(rs, in, &p, &ret->missing) < 0)
            return -1;
        if (p == CKPT_PRESENT && ret->presence == CKPT_PRESENT)
            return ckpt_fail(rs->err, CKPT_CONFLICT, "two rules give '%s': %s and %s", name,
                             rs->recipe->rules.ptr[winner->rule].where, in->rule->where);
        if (p > ret->presence) {
            ret->presence = p;
            winner = x;
        }
        if (p == CKPT_PRESENT && all)
            return 0;
    }
    if (ret->presence != CKPT_PRESENT || winner == last)
        return 0;
    /* A later candidate has overwritten the instance: make the chosen one again. */
    enum ckpt_presence p;
    (void)instantiate(rs, winner, name, len, in);
    return collect_all(rs, in, &p, &ret->missing);
}

/* Does a number of the name begin behind others ({k+layers})? Such a rule goes before one that
 * takes all numbers. */
static bool is_offset(const struct ckpt_name *n)
{
    for (uint32_t i = 0; i < n->npart; i++)
        if (!n->part[i].text && (n->part[i].plus_var >= 0 || n->part[i].plus))
            return true;
    return false;
}

bool ckpt_resolver_next_side(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                             struct ckpt_source_side *at)
{
    const size_t len = strlen(t->name);

    if (!at->begun)
        at->next = index_find(rs, &rs->sources, t->name, len);
    at->begun = true;
    while (at->next != UINT32_MAX) {
        const struct ckpt_name_entry *x = &rs->sources.entry.ptr[at->next];
        const struct ckpt_rule *rule = &rs->recipe->rules.ptr[x->rule];
        at->next = x->next;
        if (!rs->state[x->rule].active || !match(rs, &rule->from[x->side].name[x->spelling],
                                                 t->name, len, &rs->state[x->rule].sizes, at->at))
            continue;
        at->rule = rule;
        at->sizes = &rs->state[x->rule].sizes;
        at->side = x->side;
        at->spelling = x->spelling;
        return true;
    }
    return false;
}

int ckpt_resolve_source(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                        struct ckpt_instance *in, bool *ret_found)
{
    struct ckpt_source_side at = {0};
    bool offset = false;

    *ret_found = false;
    while (ckpt_resolver_next_side(rs, t, &at)) {
        const struct ckpt_name *n = &at.rule->from[at.side].name[at.spelling];
        struct ckpt_source_use use = {
            .tensor = t, .side = at.side, .spelling = at.spelling, .bound = n->axes};
        if (*ret_found && offset && !is_offset(n))
            continue;
        if (*ret_found && offset == is_offset(n))
            return ckpt_fail(rs->err, CKPT_CONFLICT, "two rules take '%s': %s and %s", t->name,
                             in->rule->where, at.rule->where);
        *ret_found = true;
        offset = is_offset(n);
        memcpy(use.at, at.at, sizeof use.at);
        in->rule = at.rule;
        in->sizes = *at.sizes;
        in->use.len = 0;
        if (ckpt_vec_push(&in->use, use) < 0)
            return ckpt_nomem(rs->err);
    }
    return 0;
}

void ckpt_resolution_release(struct ckpt_resolution *r) { free(r->missing); }

/* ---- life ---- */

int ckpt_resolver_init(struct ckpt_resolver *rs, const struct ckpt_recipe *recipe,
                       const struct ckpt_catalog *src, struct ckpt_settings *set,
                       struct ckpt_err *err)
{
    rs->recipe = recipe;
    rs->src = src;
    rs->set = set;
    rs->err = err;
    if (build_indices(rs) < 0 || survey(rs) < 0)
        return -1;
    count_numbers(rs);
    return 0;
}

void ckpt_resolver_release(struct ckpt_resolver *rs)
{
    free(rs->state);
    ckpt_map_release(&rs->targets.map);
    ckpt_map_release(&rs->sources.map);
    ckpt_vec_release(&rs->targets.entry);
    ckpt_vec_release(&rs->sources.entry);
    ckpt_str_release(&rs->buf);
    ckpt_arena_release(&rs->keys);
}
