/* SPDX-License-Identifier: Apache-2.0 */
/* Reading configuration files. */
#include "container/config.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>

#include "base/mem.h"
#include "base/sort.h"
#include "container/stand_in.h"

/* ---- YAML: libyaml's events, made into JSON values by recursive descent ---- */

enum { MAX_DEPTH = 64, MAX_NODES = 1000 * 1000, MAX_ANCHORS = 10000 };

struct reader {
    yaml_parser_t parser;
    const char *what;
    json_t *anchors; /* {anchor: finished value} */
    unsigned depth, nodes;
};

static void event_release(yaml_event_t *e) { yaml_event_delete(e); }

static int next(struct reader *r, yaml_event_t *e, struct ckpt_err *err)
{
    if (yaml_parser_parse(&r->parser, e))
        return 0;
    memset(e, 0, sizeof *e);
    return ckpt_fail(err, r->parser.error == YAML_MEMORY_ERROR ? CKPT_NOMEM : CKPT_FORMAT,
                     "%s: not valid YAML: %s (line %zu)", r->what,
                     r->parser.problem ? r->parser.problem : "?", r->parser.problem_mark.line + 1);
}

/* [-+]? digits [. digits*] [e[-+]digits], with at least one digit; *ret_real tells a float from an
 * integer. */
static bool is_number(const char *s, bool *ret_real)
{
    size_t before, after = 0;

    s += *s == '-' || *s == '+';
    before = strspn(s, "0123456789");
    s += before;
    *ret_real = *s == '.';
    if (*s == '.') {
        after = strspn(++s, "0123456789");
        s += after;
    }
    if (before + after == 0)
        return false;
    if (*s == 'e' || *s == 'E') {
        *ret_real = true;
        s++;
        s += *s == '-' || *s == '+';
        size_t n = strspn(s, "0123456789");
        if (n == 0)
            return false;
        s += n;
    }
    return *s == '\0';
}

static json_t *plain_scalar(const char *s)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const trues[] = {"true", "True", "TRUE", NULL};
    static const char *const falses[] = {"false", "False", "FALSE", NULL};
    bool real;

    if (ckpt_one_of(s, nulls))
        return json_null();
    if (ckpt_one_of(s, trues))
        return json_true();
    if (ckpt_one_of(s, falses))
        return json_false();
    if (is_number(s, &real)) {
        errno = 0;
        long long i = real ? 0 : strtoll(s, NULL, 10);
        double d = real ? strtod(s, NULL) : 0;
        if (!real && errno == 0)
            return json_integer(i);
        if (real && isfinite(d))
            return json_real(d);
    }
    return json_string(s);
}

static int scalar(struct reader *r, const yaml_event_t *e, json_t **ret, struct ckpt_err *err)
{
    const char *s = (const char *)e->data.scalar.value;

    if (strlen(s) != e->data.scalar.length)
        return ckpt_fail(err, CKPT_FORMAT, "%s: NUL in a string (line %zu)", r->what,
                         e->start_mark.line + 1);
    *ret = e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE ? plain_scalar(s) : json_string(s);
    return *ret ? 0 : ckpt_nomem(err);
}

static unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

/* Nodes of a value, and how deep it nests (a scalar: 1). */
static unsigned measure(const json_t *j, unsigned *ret_depth)
{
    unsigned n = 1, depth = 0, d;
    const char *key;
    json_t *v;
    size_t i;

    json_object_foreach((json_t *)j, key, v) {
        n += measure(v, &d);
        depth = max(depth, d);
    }
    json_array_foreach(j, i, v) {
        n += measure(v, &d);
        depth = max(depth, d);
    }
    *ret_depth = depth + 1;
    return n;
}

/* Resolve an alias by copying the value, which counts against both limits: against exponential
 * growth ("billion laughs") and against deep nesting. An anchor inside its own value (a cycle) is
 * not defined yet. */
static int alias(struct reader *r, const yaml_event_t *e, json_t **ret, struct ckpt_err *err)
{
    const char *name = (const char *)e->data.alias.anchor;
    const json_t *value = json_object_get(r->anchors, name);
    unsigned depth;

    if (!value)
        return ckpt_fail(err, CKPT_FORMAT, "%s: alias '%s' has no anchor (line %zu)", r->what, name,
                         e->start_mark.line + 1);
    r->nodes += measure(value, &depth);
    if (r->nodes > MAX_NODES || r->depth - 1 + depth > MAX_DEPTH)
        return ckpt_fail(err, CKPT_LIMIT, "%s: more than %d nodes, or deeper than %d", r->what,
                         MAX_NODES, MAX_DEPTH);
    *ret = json_deep_copy(value);
    return *ret ? 0 : ckpt_nomem(err);
}

static int value(struct reader *r, yaml_event_t *e, json_t **ret, struct ckpt_err *err);

static int element(struct reader *r, yaml_event_t *e, json_t *array, struct ckpt_err *err)
{
    json_t *v;

    if (value(r, e, &v, err) < 0)
        return -1;
    return json_array_append_new(array, v) < 0 ? ckpt_nomem(err) : 0;
}

/* Keys of other types than strings keep their spelling. */
static int member(struct reader *r, yaml_event_t *key, json_t *object, struct ckpt_err *err)
{
    ckpt_cleanup(event_release) yaml_event_t e = {0};
    json_t *v;

    if (key->type != YAML_SCALAR_EVENT)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "%s: a key that is not a scalar (line %zu)",
                         r->what, key->start_mark.line + 1);
    const char *name = (const char *)key->data.scalar.value;
    if (strlen(name) != key->data.scalar.length)
        return ckpt_fail(err, CKPT_FORMAT, "%s: NUL in a key (line %zu)", r->what,
                         key->start_mark.line + 1);
    if (json_object_get(object, name))
        return ckpt_fail(err, CKPT_FORMAT, "%s: duplicate key '%s' (line %zu)", r->what, name,
                         key->start_mark.line + 1);
    if (next(r, &e, err) < 0 || value(r, &e, &v, err) < 0)
        return -1;
    return json_object_set_new(object, name, v) < 0
               ? ckpt_fail(err, CKPT_FORMAT, "%s: a key is not UTF-8", r->what)
               : 0;
}

/* A sequence or a mapping, after its first event. */
static int collection(struct reader *r, bool is_mapping, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *all = is_mapping ? json_object() : json_array();

    for (;;) {
        ckpt_cleanup(event_release) yaml_event_t e = {0};
        if (!all)
            return ckpt_nomem(err);
        if (next(r, &e, err) < 0)
            return -1;
        if (e.type == (is_mapping ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT))
            break;
        if ((is_mapping ? member(r, &e, all, err) : element(r, &e, all, err)) < 0)
            return -1;
    }
    *ret = ckpt_steal(&all);
    return 0;
}

static int remember(struct reader *r, const char *anchor, json_t *v, struct ckpt_err *err)
{
    if (json_object_size(r->anchors) >= MAX_ANCHORS)
        return ckpt_fail(err, CKPT_LIMIT, "%s: more than %d anchors", r->what, MAX_ANCHORS);
    return json_object_set(r->anchors, anchor, v) < 0 ? ckpt_nomem(err) : 0;
}

static int value(struct reader *r, yaml_event_t *e, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = NULL;
    const char *anchor = NULL;
    int result;

    if (++r->nodes > MAX_NODES || r->depth >= MAX_DEPTH)
        return ckpt_fail(err, CKPT_LIMIT, "%s: more than %d nodes, or deeper than %d", r->what,
                         MAX_NODES, MAX_DEPTH);
    r->depth++;
    switch (e->type) {
    case YAML_SCALAR_EVENT:
        anchor = (const char *)e->data.scalar.anchor;
        result = scalar(r, e, &v, err);
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = (const char *)e->data.sequence_start.anchor;
        result = collection(r, false, &v, err);
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = (const char *)e->data.mapping_start.anchor;
        result = collection(r, true, &v, err);
        break;
    case YAML_ALIAS_EVENT:
        result = alias(r, e, &v, err);
        break;
    default:
        result = ckpt_fail(err, CKPT_FORMAT, "%s: the file ends unexpectedly", r->what);
    }
    r->depth--;
    if (result == 0 && anchor)
        result = remember(r, anchor, v, err);
    if (result == 0)
        *ret = ckpt_steal(&v);
    return result;
}

/* Check that nothing follows the document. */
static int end(struct reader *r, struct ckpt_err *err)
{
    for (;;) {
        ckpt_cleanup(event_release) yaml_event_t e = {0};
        if (next(r, &e, err) < 0)
            return -1;
        if (e.type == YAML_STREAM_END_EVENT)
            return 0;
        if (e.type != YAML_DOCUMENT_END_EVENT)
            return ckpt_fail(err, CKPT_FORMAT, "%s: more than one document (line %zu)", r->what,
                             e.start_mark.line + 1);
    }
}

static int document(struct reader *r, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = NULL;

    while (!v) {
        ckpt_cleanup(event_release) yaml_event_t e = {0};
        if (next(r, &e, err) < 0)
            return -1;
        if (e.type == YAML_STREAM_END_EVENT)
            return ckpt_fail(err, CKPT_FORMAT, "%s: empty", r->what);
        if (e.type != YAML_STREAM_START_EVENT && e.type != YAML_DOCUMENT_START_EVENT &&
            value(r, &e, &v, err) < 0)
            return -1;
    }
    if (end(r, err) < 0)
        return -1;
    *ret = ckpt_steal(&v);
    return 0;
}

int ckpt_yaml_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err)
{
    struct reader r = {.what = what, .anchors = json_object()};
    int result = -1;

    if (!r.anchors || !yaml_parser_initialize(&r.parser)) {
        json_decref(r.anchors);
        return ckpt_nomem(err);
    }
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, len);
    result = document(&r, ret, err);
    yaml_parser_delete(&r.parser);
    json_decref(r.anchors);
    return result;
}

/* ---- writing ---- */

static void put_value(const json_t *j, int depth, bool in_list, struct ckpt_str *out);

/* Would PyYAML read the word as a string, and write it without quotes? */
static bool is_plain(const char *s)
{
    static const char *const words[] = {"null", "true", "false", "yes", "no",
                                        "on",   "off",  "y",     "n"};
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./";

    if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_/", *s) || !*s ||
        s[strspn(s, letters)])
        return false;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcasecmp(words[i], s) == 0)
            return false;
    return true;
}

/* PyYAML writes 1.0e-05, since YAML 1.1 has no number 1e-05. */
static void put_real(const json_t *j, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &text, &len, NULL) < 0) {
        out->failed = true;
        return;
    }
    const char *e = strchr(text, 'e');
    if (e && !strchr(text, '.'))
        ckpt_str_printf(out, "%.*s.0%s", (int)(e - text), text, e);
    else
        ckpt_str_puts(out, text);
}

static void put_scalar(const json_t *j, struct ckpt_str *out)
{
    const char *s = json_string_value(j);

    if (s && is_plain(s))
        ckpt_str_puts(out, s);
    else if (s)
        ckpt_json_put_string(out, s);
    else if (json_is_real(j))
        put_real(j, out);
    else if (json_is_integer(j))
        ckpt_str_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(j));
    else
        ckpt_str_puts(out, json_is_true(j) ? "true" : json_is_false(j) ? "false" : "null");
}

/* The first key of an object in a list stands behind the dash. */
static void put_object(const json_t *j, int depth, bool in_list, struct ckpt_str *out)
{
    const size_t n = json_object_size(j);
    const char **key = malloc((n + 1) * sizeof *key), *k;
    size_t i = 0;
    json_t *value;

    if (!key) {
        out->failed = true;
        return;
    }
    json_object_foreach((json_t *)j, k, value)
        key[i++] = k;
    qsort(key, n, sizeof *key, ckpt_strings_cmp);
    for (i = 0; i < n; i++) {
        ckpt_str_printf(out, "%*s%s:", in_list && i == 0 ? 0 : 2 * depth, "", key[i]);
        put_value(json_object_get(j, key[i]), depth, false, out);
    }
    free(key);
}

/* Writes what follows "key:" or "-", with the end of the line. */
static void put_value(const json_t *j, int depth, bool in_list, struct ckpt_str *out)
{
    const bool object = json_is_object(j) && json_object_size(j),
               list = json_is_array(j) && json_array_size(j);

    if (object) {
        ckpt_str_puts(out, in_list ? " " : "\n");
        put_object(j, depth + 1, in_list, out);
        return;
    }
    if (!list) {
        ckpt_str_putc(out, ' ');
        if (json_is_object(j) || json_is_array(j))
            ckpt_str_puts(out, json_is_object(j) ? "{}" : "[]");
        else
            put_scalar(j, out);
        ckpt_str_putc(out, '\n');
        return;
    }
    ckpt_str_puts(out, in_list ? " " : "\n");
    for (size_t i = 0; i < json_array_size(j); i++) {
        ckpt_str_printf(out, "%*s-", in_list && i == 0 ? 0 : 2 * (depth + in_list), "");
        put_value(json_array_get(j, i), depth + in_list, true, out);
    }
}

void ckpt_yaml_out(const json_t *j, struct ckpt_str *out) { put_object(j, 0, false, out); }

static int parse(const char *name, const char *what, const char *text, size_t len, json_t **ret,
                 struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    bool yaml = ckpt_has_suffix(name, ".yaml") || ckpt_has_suffix(name, ".yml");

    if ((yaml ? ckpt_yaml_parse(text, len, what, &j, err)
              : ckpt_json_parse(text, len, what, &j, err)) < 0)
        return -1;
    if (!json_is_object(j))
        return ckpt_fail(err, CKPT_FORMAT, "%s is not %s", what,
                         yaml ? "a mapping" : "a JSON object");
    *ret = ckpt_steal(&j);
    return 0;
}

int ckpt_config_read(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_freep) char *what = ckpt_asprintf("'%s/%s'", ckpt_dir_path(dir), name);
    size_t len;

    if (!what)
        return ckpt_nomem(err);
    if (ckpt_dir_read_file(dir, name, max_len, &text, &len, err) < 0)
        return -1;
    if (ckpt_refuse_stand_in(text, len, err) < 0)
        return ckpt_err_in(err, "%s", what);
    return parse(name, what, text, len, ret, err);
}

int ckpt_config_read_if(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                        struct ckpt_err *err)
{
    struct ckpt_err e = {0};

    if (ckpt_config_read(dir, name, max_len, ret, &e) == 0 || e.code == CKPT_MISSING)
        return 0;
    return ckpt_err_move(err, &e);
}
