/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing of recipe files, their groups of rules and includes. */
#include "recipe/library/file.h"

#include <string.h>

#include "recipe/language/field.h"

enum { MAX_DEPTH = 12, MAX_INCLUDES = 8, MAX_FILES = 64, MAX_RULES = 20000 };

struct reader {
    struct ckpt_arena *arena;
    struct ckpt_recipe *out;
    const struct ckpt_beside *beside;
    int includes;        /* depth */
    int files;           /* in all */
    const char *current; /* the file being read */
    bool backwards;
    struct ckpt_err *err;
};

/* Which parts of a file are wanted. */
enum parts {
    PART_CHOICE = 1, /* by which the recipe is chosen */
    PART_RULES = 2,
    PART_REST = 4,
};

static int read_file(struct reader *r, const struct ckpt_file *file, unsigned parts,
                     const struct ckpt_rule_context *cx);

/* Find an included file. If the including file is from another folder, that folder is searched
 * first. */
static int find(struct reader *r, const char *name, struct ckpt_file *ret, char **ret_free)
{
    const char *slash = r->includes > 0 ? strrchr(r->current, '/') : NULL;
    struct ckpt_err quiet = {0};

    if (slash) {
        const char *near = ckpt_field_text(r->arena, r->err, "%.*s/%s", (int)(slash - r->current),
                                           r->current, name);
        if (!near)
            return -1;
        if (ckpt_beside_find(r->beside, near, ret, ret_free, &quiet) == 0)
            return 0;
    }
    return ckpt_beside_find(r->beside, name, ret, ret_free, r->err);
}

static int include(struct reader *r, const char *where, const char *name, unsigned parts,
                   const struct ckpt_rule_context *cx)
{
    ckpt_cleanup(ckpt_freep) char *owned = NULL;
    struct ckpt_file file;

    if (r->includes == MAX_INCLUDES || r->files++ == MAX_FILES)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: 'include' nested deeper than %d, or more than %d",
                         where, MAX_INCLUDES, MAX_FILES);
    if (find(r, name, &file, &owned) < 0)
        return ckpt_err_in(r->err, "%s: include", where);
    const char *outer = r->current, *slash = strrchr(outer, '/');
    file.name = name;
    if (slash && !strchr(name, '/')) /* for messages: the folder in which it was found */
        file.name = ckpt_field_text(r->arena, r->err, "%.*s/%s", (int)(slash - outer), outer, name);
    if (!file.name)
        return -1;
    r->includes++;
    r->current = file.name;
    int rc = read_file(r, &file, parts, cx);
    r->current = outer;
    r->includes--;
    return rc;
}

/* ---- elements of lists ---- */

typedef int (*read_element)(struct reader *r, const char *where, const json_t *j);

/* Read the elements of the list `key` of a file, if it has one. */
static int read_list(struct reader *r, const char *name, const json_t *file, const char *key,
                     read_element read)
{
    const json_t *list = json_object_get(file, key);
    size_t i;
    json_t *j;

    if (list && !json_is_array(list))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: %s: a list is expected here", name, key);
    json_array_foreach(list, i, j) {
        const char *where = ckpt_field_text(r->arena, r->err, "%s: %s[%zu]", name, key, i);
        if (!where || read(r, where, j) < 0)
            return -1;
    }
    return 0;
}

/* Read a list of two texts. */
static int read_two(struct reader *r, const char *where, const json_t *j, const char **ret_a,
                    const char **ret_b)
{
    const char *a = json_string_value(json_array_get(j, 0)),
               *b = json_string_value(json_array_get(j, 1));

    if (json_array_size(j) != 2 || !a || !b)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: two texts are expected here", where);
    *ret_a = ckpt_arena_strdup(r->arena, a);
    *ret_b = ckpt_arena_strdup(r->arena, b);
    return *ret_a && *ret_b ? 0 : ckpt_nomem(r->err);
}

/* Read a mapping's source and target from a list of two texts; backwards they change places. */
static int read_from_to(struct reader *r, const char *where, const json_t *j, const char **ret_from,
                        const char **ret_to)
{
    return read_two(r, where, j, r->backwards ? ret_to : ret_from,
                    r->backwards ? ret_from : ret_to);
}

/* ---- rules ---- */

static int read_rules(struct reader *r, const char *where, const json_t *list,
                      const struct ckpt_rule_context *cx, int depth);

static int deeper(struct reader *r, const char *where, const json_t *j,
                  struct ckpt_rule_context *cx)
{
    const json_t *at = json_object_get(j, "at");
    const char *when, *from, *to;

    cx->where = where;
    if (ckpt_field_string(r->arena, j, "when", where, &when, r->err) < 0)
        return -1;
    if (when) {
        if (cx->nwhen == CKPT_RULE_WHENS)
            return ckpt_fail(r->err, CKPT_LIMIT, "%s: more than %d conditions", where,
                             CKPT_RULE_WHENS);
        if (ckpt_expr_parse(r->arena, where, when, &cx->when[cx->nwhen++], r->err) < 0)
            return -1;
    }
    if (!at)
        return 0;
    const char *here = ckpt_field_text(r->arena, r->err, "%s.at", where);
    if (!here || read_from_to(r, here, at, &from, &to) < 0)
        return -1;
    cx->from_at = ckpt_field_text(r->arena, r->err, "%s%s", cx->from_at, from);
    cx->to_at = ckpt_field_text(r->arena, r->err, "%s%s", cx->to_at, to);
    return cx->from_at && cx->to_at ? 0 : -1;
}

/* The number that the operator takes. */
static int read_number(struct reader *r, const char *where, const json_t *j,
                       struct ckpt_rule_context *cx)
{
    const char *text;

    if (ckpt_field_string(r->arena, j, "by", where, &text, r->err) < 0)
        return -1;
    if (!text != !(cx->value && cx->value->takes_number))
        return ckpt_fail(r->err, CKPT_FORMAT,
                         text ? "%s: no operator takes the number of 'by'"
                              : "%s: 'by' is missing, the operator's number",
                         where);
    return text ? ckpt_expr_parse(r->arena, where, text, &cx->by, r->err) : 0;
}

/* The operator that computes the targets' values, if the rule names one. */
static int read_value(struct reader *r, const char *where, const json_t *j,
                      struct ckpt_rule_context *cx)
{
    const char *name;

    if (ckpt_field_string(r->arena, j, "value", where, &name, r->err) < 0)
        return -1;
    if (!name)
        return 0;
    if (!json_object_get(j, "from"))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'value' stands beside 'from' and 'to'", where);
    if (!(cx->value = ckpt_value_find(name)))
        return ckpt_fail(r->err, CKPT_UNSUPPORTED, "%s: no operator '%.100s' to compute a value",
                         where, name);
    return 0;
}

static int read_rule(struct reader *r, const char *where, const json_t *j,
                     const struct ckpt_rule_context *outer, int depth)
{
    static const char *const known[] = {"note",    "at",    "when", "from",    "to",   "rules",
                                        "include", "value", "by",   "written", "read", NULL};
    struct ckpt_rule_context cx = *outer;
    const json_t *from = json_object_get(j, "from"), *to = json_object_get(j, "to"),
                 *rules = json_object_get(j, "rules");
    struct ckpt_texts src, dst;
    const char *name;

    if (ckpt_field_object(j, where, known, r->err) < 0 || deeper(r, where, j, &cx) < 0 ||
        read_value(r, where, j, &cx) < 0 || read_number(r, where, j, &cx) < 0 ||
        ckpt_field_string(r->arena, j, "include", where, &name, r->err) < 0)
        return -1;
    if (!!(from && to) + !!rules + !!name != 1 || !from != !to)
        return ckpt_fail(r->err, CKPT_FORMAT,
                         "%s: a rule has 'from' and 'to', or 'rules', or 'include'", where);
    if (json_is_false(json_object_get(j, r->backwards ? "written" : "read")))
        return 0;
    if (name)
        return include(r, where, name, PART_RULES, &cx);
    if (rules) {
        const char *inner = ckpt_field_text(r->arena, r->err, "%s.rules", where);
        return inner ? read_rules(r, inner, rules, &cx, depth + 1) : -1;
    }
    if (ckpt_field_strings(r->arena, j, r->backwards ? "to" : "from", where, &src, r->err) < 0 ||
        ckpt_field_strings(r->arena, j, r->backwards ? "from" : "to", where, &dst, r->err) < 0)
        return -1;
    if (r->backwards && cx.value && !json_is_false(json_object_get(j, "read")))
        return 0; /* what was computed is undone by a rule of its own, or not at all */
    if (src.n > CKPT_RULE_SIDES || dst.n > CKPT_RULE_SIDES)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: more than %d sides", where, CKPT_RULE_SIDES);
    if (r->out->rules.len > MAX_RULES)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: more than %d rules", where, MAX_RULES);
    return ckpt_rule_parse(&cx, src.text, (uint32_t)src.n, dst.text, (uint32_t)dst.n,
                           &r->out->rules, r->err);
}

static int read_rules(struct reader *r, const char *where, const json_t *list,
                      const struct ckpt_rule_context *cx, int depth)
{
    size_t i;
    json_t *j;

    if (!list)
        return 0;
    if (!json_is_array(list))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: a list of rules is expected here", where);
    if (depth > MAX_DEPTH)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: rules nested deeper than %d", where, MAX_DEPTH);
    json_array_foreach(list, i, j) {
        const char *here = ckpt_field_text(r->arena, r->err, "%s[%zu]", where, i);
        if (!here || read_rule(r, here, j, cx, depth) < 0)
            return -1;
    }
    return 0;
}

/* ---- the rest ---- */

static int read_evidence(struct reader *r, const char *name, const json_t *file, const char *key,
                         ckpt_evidence *out)
{
    const char *where = ckpt_field_text(r->arena, r->err, "%s: %s", name, key);
    struct ckpt_texts names;

    if (!where || ckpt_field_strings(r->arena, file, key, where, &names, r->err) < 0)
        return -1;
    for (size_t i = 0; i < names.n; i++) {
        struct ckpt_evidence_name e = {.text = names.text[i]};
        if (ckpt_name_parse_alone(r->arena, where, e.text, &e.name, &e.n, r->err) < 0)
            return -1;
        if (ckpt_vec_push(out, e) < 0)
            return ckpt_nomem(r->err);
    }
    return 0;
}

/* Read a remark, and append it if it is about the direction in which the recipe is read. */
static int read_remark(struct reader *r, const char *where, const json_t *j, ckpt_remarks *out)
{
    static const char *const known[] = {"when", "why", "back", NULL};
    struct ckpt_remark m;
    const char *when;

    if (ckpt_field_object(j, where, known, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "when", where, &when, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "why", where, &m.why, r->err) < 0)
        return -1;
    if (!when || !m.why)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'when' and 'why' belong together", where);
    if (json_is_true(json_object_get(j, "back")) != r->backwards)
        return 0;
    if (ckpt_expr_parse(r->arena, where, when, &m.when, r->err) < 0)
        return -1;
    return ckpt_vec_push(out, m) < 0 ? ckpt_nomem(r->err) : 0;
}

static int read_refusal(struct reader *r, const char *where, const json_t *j)
{
    return read_remark(r, where, j, &r->out->refuse);
}

static int read_warning(struct reader *r, const char *where, const json_t *j)
{
    return read_remark(r, where, j, &r->out->warn);
}

static int read_prefix(struct reader *r, const char *where, const json_t *j)
{
    const char *from, *to;
    struct ckpt_prefix p;

    if (read_from_to(r, where, j, &from, &to) < 0 ||
        ckpt_name_parse_start(r->arena, where, from, &p.from, r->err) < 0 ||
        ckpt_name_parse_start(r->arena, where, to, &p.to, r->err) < 0)
        return -1;
    if (p.from->axes != p.to->axes)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: both prefixes have one number, {l}, or none",
                         where);
    return ckpt_vec_push(&r->out->prefixes, p) < 0 ? ckpt_nomem(r->err) : 0;
}

static int read_ignored(struct reader *r, const char *where, const json_t *j)
{
    static const char *const known[] = {"names", "why", NULL};
    struct ckpt_ignored g;

    if (ckpt_field_object(j, where, known, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "names", where, &g.text, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "why", where, &g.why, r->err) < 0)
        return -1;
    if (!g.text || !g.why)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'names' and 'why' belong together", where);
    if (ckpt_vec_reserve(&r->out->ignores, 1) < 0)
        return ckpt_nomem(r->err);
    if (ckpt_regex_new(g.text, "", &g.names, r->err) < 0)
        return ckpt_err_in(r->err, "%s", where);
    r->out->ignores.ptr[r->out->ignores.len++] = g;
    return 0;
}

static int read_tie(struct reader *r, const char *where, const json_t *j)
{
    struct ckpt_tie tie;

    if (read_two(r, where, j, &tie.copy, &tie.original) < 0)
        return -1;
    return ckpt_vec_push(&r->out->ties, tie) < 0 ? ckpt_nomem(r->err) : 0;
}

/* Set a key. If an included file has set it, its origin is replaced at the same position, because
 * keys are evaluated in order. */
static int set_key(struct reader *r, ckpt_config_keys *keys, const char *where, const char *key,
                   const json_t *v)
{
    struct ckpt_config_key *k = NULL;

    for (size_t i = 0; i < keys->len && !k; i++)
        if (strcmp(keys->ptr[i].key, key) == 0)
            k = &keys->ptr[i];
    if (!k && (ckpt_vec_add(keys, &k) < 0 || !(k->key = ckpt_arena_strdup(r->arena, key))))
        return ckpt_nomem(r->err);
    const char *here = ckpt_field_text(r->arena, r->err, "%s.%s", where, key);
    return here ? ckpt_expr_from_json(r->arena, here, v, r->out->keep, &k->origin, r->err) : -1;
}

/* Read the origins of the keys of `member`. own_only: only of the recipe's own keys, "_x". A recipe
 * that is read backwards starts from a Hugging Face config, which has all others. */
static int read_keys(struct reader *r, ckpt_config_keys *keys, bool own_only, const char *name,
                     const json_t *file, const char *member)
{
    const json_t *list = json_object_get(file, member);
    const char *key, *where = ckpt_field_text(r->arena, r->err, "%s: %s", name, member);
    json_t *v;

    if (!where)
        return -1;
    if (list && !json_is_object(list))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: an object is expected here", where);
    json_object_foreach((json_t *)list, key, v)
        if ((!own_only || key[0] == '_') && set_key(r, keys, where, key, v) < 0)
            return -1;
    return 0;
}

/* A block of "pipeline": ["model.decoder.{layer}.", "4 * hidden * hidden"]. */
static int read_block(struct reader *r, const char *where, const json_t *j)
{
    struct ckpt_pipeline_block b = {0};
    const char *name = json_string_value(json_array_get(j, 0)),
               *cost = json_string_value(json_array_get(j, 1));

    if (!name || json_array_size(j) > 2)
        return ckpt_fail(r->err, CKPT_FORMAT,
                         "%s: the beginning of names, and an expression, are expected here", where);
    if (ckpt_name_parse_start(r->arena, where, name, &b.name, r->err) < 0 ||
        (cost && ckpt_expr_parse(r->arena, where, cost, &b.cost, r->err) < 0))
        return -1;
    return ckpt_vec_push(&r->out->pipeline, b) < 0 ? ckpt_nomem(r->err) : 0;
}

static int read_fused(struct reader *r, const char *where, const json_t *j)
{
    struct ckpt_texts t;

    if (ckpt_field_strings(r->arena, j, NULL, where, &t, r->err) < 0)
        return -1;
    if (t.n != 3 && t.n != 4)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: three or four texts are expected here", where);
    const struct ckpt_fused f = {t.text[0], t.text[1], t.text[2], t.n == 4 ? t.text[3] : NULL};
    return ckpt_vec_push(&r->out->fused, f) < 0 ? ckpt_nomem(r->err) : 0;
}

/* Read conditions; those of included files count too. */
static int read_when(struct reader *r, const char *name, const json_t *j)
{
    const struct ckpt_expr *when;
    const char *text, *where;

    if (ckpt_field_string(r->arena, j, "when", name, &text, r->err) < 0)
        return -1;
    if (!text || r->backwards) /* it is a condition on the framework's config */
        return 0;
    if (!(where = ckpt_field_text(r->arena, r->err, "%s: when", name)) ||
        ckpt_expr_parse(r->arena, where, text, &when, r->err) < 0)
        return -1;
    return ckpt_vec_push(&r->out->when, when) < 0 ? ckpt_nomem(r->err) : 0;
}

static int read_choice(struct reader *r, const char *name, const json_t *j)
{
    return read_when(r, name, j) < 0 || read_evidence(r, name, j, "has", &r->out->has) < 0 ||
                   read_evidence(r, name, j, "lacks", &r->out->lacks) < 0
               ? -1
               : 0;
}

static int read_rest(struct reader *r, const char *name, const json_t *j)
{
    if (read_list(r, name, j, "ties", read_tie) < 0 ||
        read_list(r, name, j, "prefixes", read_prefix) < 0 ||
        read_list(r, name, j, "ignores", read_ignored) < 0)
        return -1;
    if (json_object_get(j, "may_lack") &&
        ckpt_field_strings(r->arena, j, "may_lack", name, &r->out->may_lack, r->err) < 0)
        return -1;
    if (read_keys(r, &r->out->config, r->backwards, name, j, "config") < 0)
        return -1;
    if (r->backwards && (read_keys(r, &r->out->makes, false, name, j, "makes") < 0 ||
                         read_list(r, name, j, "pipeline", read_block) < 0 ||
                         read_list(r, name, j, "fused", read_fused) < 0))
        return -1;
    return read_list(r, name, j, "refuse", read_refusal) < 0 ||
                   read_list(r, name, j, "warn", read_warning) < 0
               ? -1
               : 0;
}

/* Read the members that only the outermost file may have. */
static int read_head(struct reader *r, const char *name, const json_t *j)
{
    json_t *model = json_object_get(j, "model");

    r->out->fallback = json_is_true(json_object_get(j, "fallback"));
    if (json_is_object(model))
        r->out->inline_model = json_incref(model);
    if (ckpt_field_string(r->arena, j, "format", name, &r->out->format, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "back", name, &r->out->back, r->err) < 0 ||
        (!r->out->inline_model &&
         ckpt_field_string(r->arena, j, "model", name, &r->out->model, r->err) < 0))
        return -1;
    if (r->out->format && !model && json_array_size(json_object_get(j, "refuse")) == 0)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'model' is missing", name);
    if (r->backwards)
        r->out->format = r->out->back;
    return 0;
}

static int read_file(struct reader *r, const struct ckpt_file *file, unsigned parts,
                     const struct ckpt_rule_context *cx)
{
    static const char *const known[] = {
        "note",    "format", "model",  "when",  "has",      "lacks",    "include",
        "config",  "rules",  "refuse", "warn",  "fallback", "may_lack", "prefixes",
        "ignores", "back",   "ties",   "makes", "pipeline", "fused",    NULL};
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_incref(file->json);
    const char *name = file->name;
    const char *where = ckpt_field_text(r->arena, r->err, "%s: rules", name);
    struct ckpt_texts included;

    if (!where || (!j && ckpt_json_parse_strict(file->text, file->len, name, &j, r->err) < 0) ||
        ckpt_field_object(j, name, known, r->err) < 0 ||
        ckpt_field_strings(r->arena, j, "include", name, &included, r->err) < 0)
        return -1;
    if ((parts & PART_CHOICE) && r->includes == 0 && read_head(r, name, j) < 0)
        return -1;
    for (size_t i = 0; i < included.n; i++)
        if (include(r, name, included.text[i], parts, cx) < 0)
            return -1;
    if ((parts & PART_CHOICE) && read_choice(r, name, j) < 0)
        return -1;
    if ((parts & PART_REST) && read_rest(r, name, j) < 0)
        return -1;
    return parts & PART_RULES ? read_rules(r, where, json_object_get(j, "rules"), cx, 0) : 0;
}

/* Read those parts of the recipe's file, and of what it includes. */
static int read_recipe(struct ckpt_recipe *out, unsigned parts, struct ckpt_err *err)
{
    struct reader r = {.arena = out->arena,
                       .out = out,
                       .beside = &out->beside,
                       .current = out->name,
                       .backwards = out->backwards,
                       .err = err};
    const struct ckpt_rule_context cx = {.arena = out->arena,
                                         .where = out->name,
                                         .from_at = "",
                                         .to_at = "",
                                         .backwards = out->backwards};

    return read_file(&r, &out->file, parts, &cx);
}

int ckpt_recipe_begin(struct ckpt_arena *arena, const struct ckpt_file *file, bool backwards,
                      const struct ckpt_beside *beside, struct ckpt_recipe **ret,
                      struct ckpt_err *err)
{
    struct ckpt_recipe *out = ckpt_arena_alloc(arena, sizeof *out);

    if (!out)
        return ckpt_nomem(err);
    *out = (struct ckpt_recipe){.given = file->given,
                                .backwards = backwards,
                                .arena = arena,
                                .file = *file,
                                .beside = *beside,
                                .keep = json_array()};
    out->name = out->file.name = ckpt_arena_strdup(arena, file->name);
    if (!out->name || !out->keep || read_recipe(out, PART_CHOICE, err) < 0) {
        ckpt_recipe_release(out);
        return ckpt_nomem(err);
    }
    out->file.json = NULL; /* it is forgotten before ckpt_recipe_finish */
    *ret = out;
    return 0;
}

/* Release what ckpt_recipe_finish parsed. */
static void rest_release(struct ckpt_recipe *r)
{
    ckpt_vec_release(&r->config);
    ckpt_vec_release(&r->makes);
    ckpt_vec_release(&r->pipeline);
    ckpt_vec_release(&r->fused);
    ckpt_vec_release(&r->refuse);
    ckpt_vec_release(&r->warn);
    ckpt_vec_release(&r->rules);
    ckpt_vec_release(&r->prefixes);
    ckpt_vec_release(&r->ties);
    for (size_t i = 0; i < r->ignores.len; i++)
        ckpt_regex_free(r->ignores.ptr[i].names);
    ckpt_vec_release(&r->ignores);
}

/* Every size whose name has two letters or more must be one of the family's dims. */
static int check_dims(const struct ckpt_recipe *r, struct ckpt_err *err)
{
    for (size_t i = 0; i < r->rules.len; i++) {
        const struct ckpt_rule *rule = &r->rules.ptr[i];
        for (uint32_t v = 0; v < rule->scope->nvar; v++)
            if (rule->scope->var[v].dim &&
                !ckpt_family_has_dim(r->family, rule->scope->var[v].name))
                return ckpt_fail(err, CKPT_FORMAT,
                                 "%s: '%.200s': '%s' is not one of the dims of %s", rule->where,
                                 rule->from[0].text, rule->scope->var[v].name, r->family->name);
    }
    return 0;
}

int ckpt_recipe_finish(struct ckpt_recipe *r, struct ckpt_err *err)
{
    if (r->finished)
        return 0;
    if (read_recipe(r, PART_RULES | PART_REST, err) < 0 || (r->family && check_dims(r, err) < 0)) {
        rest_release(r);
        return ckpt_nomem(err);
    }
    r->finished = true;
    return 0;
}

void ckpt_recipe_release(struct ckpt_recipe *r)
{
    if (!r)
        return;
    ckpt_vec_release(&r->when);
    ckpt_vec_release(&r->has);
    ckpt_vec_release(&r->lacks);
    rest_release(r);
    json_decref(r->keep);
    json_decref(r->inline_model);
    r->keep = r->inline_model = NULL;
}
