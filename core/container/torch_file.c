/* SPDX-License-Identifier: Apache-2.0 */
/* From an archive to tensors and values. */
#include "container/torch_file.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

int ckpt_torch_file_read(struct ckpt_source *s, struct ckpt_torch_file *ret, struct ckpt_err *err)
{
    ret->source = ckpt_source_ref(s);
    if (ckpt_torch_open(s, 0, s->size, &ret->archive, err) < 0)
        return -1;
    if (ret->archive.pickle->len > CKPT_TORCH_MAX_PICKLE)
        return ckpt_fail(err, CKPT_LIMIT, "its pickle has %" PRIu64 " bytes",
                         ret->archive.pickle->len);
    return ckpt_torch_pickle(&ret->archive, &ret->p, err);
}

int ckpt_torch_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_torch_file *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_file_new(dir, name, pool, &s, err) < 0)
        return -1;
    return ckpt_torch_file_read(s, ret, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), name)
               : 0;
}

void ckpt_torch_file_release(struct ckpt_torch_file *f)
{
    ckpt_pickle_release(&f->p);
    ckpt_torch_release(&f->archive);
    ckpt_source_unref(f->source);
}

int ckpt_torch_file_tensor(const struct ckpt_torch_file *f, ckpt_pv v,
                           struct ckpt_torch_tensor *ret, struct ckpt_err *err)
{
    struct ckpt_torch_layout l = {0};

    return ckpt_torch_layout_of(&f->p, v, &l, err) < 0
               ? -1
               : ckpt_torch_locate(&f->archive, &l, ret, err);
}

/* ---- values ---- */

/* Does only an attack need this global? */
static bool is_attack(const char *module, const char *name)
{
    static const char *const modules[] = {"os",     "posix",    "nt",     "subprocess", "shutil",
                                          "socket", "runpy",    "ctypes", "importlib",  "pty",
                                          "code",   "commands", NULL};
    static const char *const builtins[] = {"builtins", "__builtin__", NULL};
    static const char *const calls[] = {"eval",       "exec", "execfile", "compile",
                                        "__import__", "open", "input",    NULL};

    return ckpt_one_of(module, modules) ||
           (ckpt_one_of(module, builtins) && ckpt_one_of(name, calls));
}

int ckpt_torch_refuse_attack(const struct ckpt_pickle *p, struct ckpt_err *err)
{
    for (size_t i = 0; i < p->globals.len; i++) {
        const char *module = p->strs.ptr[p->globals.ptr[i].module].ptr;
        const char *name = p->strs.ptr[p->globals.ptr[i].name].ptr;
        if (is_attack(module, name))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "its pickle asks for %s.%s, which no checkpoint needs: refused "
                             "(nothing of it was run)",
                             module, name);
    }
    return 0;
}

int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_torch_file_release) struct ckpt_torch_file f = {0};
    json_t *value = NULL;

    if (ckpt_torch_file_read(s, &f, err) < 0 || ckpt_torch_refuse_attack(&f.p, err) < 0)
        return -1;
    const ckpt_pv root =
        ckpt_pv_len(&f.p, f.p.root) == 1 ? ckpt_pv_at(&f.p, f.p.root, 0) : f.p.root;
    if (leaves && ckpt_pickle_leaves(&f.p, root, name, out, err) < 0)
        return -1;
    if (!leaves && ckpt_pickle_value(&f.p, f.p.root, &value, err) < 0)
        return -1;
    return value && json_object_set_new(out, name, value) < 0 ? ckpt_nomem(err)
                                                              : ckpt_source_check(s, err);
}

int ckpt_torch_objects_of(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                          const char *prefix, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_file_new(dir, file, pool, &s, err) < 0)
        return -1;
    return ckpt_torch_object(s, prefix, true, out, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), file)
               : 0;
}

/* ---- the pickle's values as JSON, within a budget and without dropping anything silently ---- */

struct walk {
    const struct ckpt_pickle *p;
    size_t count, bytes;
    unsigned depth;
    struct ckpt_err *err;
};

static json_t *convert(struct walk *w, ckpt_pv v);

/* NULL, and why, if v and `bytes` of text are more than the budget. */
static bool spend(struct walk *w, size_t bytes)
{
    if (++w->count > CKPT_VALUE_MAX_COUNT)
        (void)ckpt_fail(w->err, CKPT_LIMIT, "its pickle holds more than %d values",
                        CKPT_VALUE_MAX_COUNT);
    else if (bytes > CKPT_VALUE_MAX_BYTES - w->bytes)
        (void)ckpt_fail(w->err, CKPT_LIMIT, "its pickle holds more than %d bytes of text",
                        CKPT_VALUE_MAX_BYTES);
    else
        w->bytes += bytes;
    return !w->err->code;
}

/* {"$key": value}; takes value. */
static json_t *tagged(const char *key, json_t *value)
{
    return value ? json_pack("{s:o}", key, value) : NULL;
}

static json_t *hexadecimal(const char *key, const struct ckpt_pickle_str *s)
{
    static const char digits[] = "0123456789abcdef";
    ckpt_cleanup(ckpt_freep) char *out = malloc(2 * (size_t)s->len + 1);

    if (!out)
        return NULL;
    for (size_t i = 0; i < s->len; i++) {
        out[2 * i] = digits[(unsigned char)s->ptr[i] >> 4];
        out[2 * i + 1] = digits[(unsigned char)s->ptr[i] & 15];
    }
    return tagged(key, json_stringn(out, 2 * (size_t)s->len));
}

static json_t *text(struct walk *w, ckpt_pv v)
{
    const struct ckpt_pickle_str *s = &w->p->strs.ptr[ckpt_pv_id(v)];
    const char *plain = ckpt_pv_str(w->p, v);

    if (!spend(w, 2 * (size_t)s->len))
        return NULL;
    if (ckpt_pv_kind(v) == CKPT_PV_BYTES)
        return hexadecimal("$bytes", s);
    return plain && ckpt_utf8_ok(plain) ? json_string(plain) : hexadecimal("$text", s);
}

static json_t *number(double d)
{
    if (isfinite(d))
        return json_real(d);
    return tagged("$float", json_string(isnan(d) ? "nan" : d > 0 ? "inf" : "-inf"));
}

/* The key as a JSON key, unless it begins with our mark '$'; else NULL. */
static const char *plain_key(const struct ckpt_pickle *p, ckpt_pv key)
{
    const char *s = ckpt_pv_str(p, key);

    return s && *s != '$' && ckpt_utf8_ok(s) ? s : NULL;
}

static json_t *sequence(struct walk *w, ckpt_pv v)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();

    for (size_t i = 0; i < ckpt_pv_len(w->p, v); i++)
        if (!list || json_array_append_new(list, convert(w, ckpt_pv_at(w->p, v, i))) < 0)
            return NULL;
    return ckpt_steal(&list);
}

static json_t *pairs(struct walk *w, ckpt_pv v)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();

    for (size_t i = 0; i < ckpt_pv_npair(w->p, v); i++) {
        json_t *key = convert(w, ckpt_pv_key(w->p, v, i));
        json_t *value = key ? convert(w, ckpt_pv_value(w->p, v, i)) : NULL;
        if (!list || !value) {
            json_decref(key);
            json_decref(value);
            return NULL;
        }
        if (json_array_append_new(list, json_pack("[o, o]", key, value)) < 0)
            return NULL;
    }
    return tagged("$dict", ckpt_steal(&list));
}

static json_t *dict(struct walk *w, ckpt_pv v)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *obj = json_object();

    for (size_t i = 0; i < ckpt_pv_npair(w->p, v); i++)
        if (!plain_key(w->p, ckpt_pv_key(w->p, v, i)))
            return pairs(w, v);
    for (size_t i = 0; i < ckpt_pv_npair(w->p, v); i++) {
        const char *key = plain_key(w->p, ckpt_pv_key(w->p, v, i));
        if (!obj || !spend(w, strlen(key)) ||
            json_object_set_new(obj, key, convert(w, ckpt_pv_value(w->p, v, i))) < 0)
            return NULL;
    }
    return ckpt_steal(&obj);
}

/* encode("\u00ff", "latin1"), as protocol 2 writes bytes: each character is one. */
static json_t *encoded(struct walk *w, ckpt_pv args)
{
    const char *codec = ckpt_pv_str(w->p, ckpt_pv_at(w->p, args, 1));
    const ckpt_pv v = ckpt_pv_at(w->p, args, 0);
    ckpt_cleanup(ckpt_freep) char *bytes = NULL;
    size_t n = 0;

    if (!codec || strcmp(codec, "latin1") != 0 || ckpt_pv_kind(v) != CKPT_PV_STR)
        return tagged("$object", json_string("_codecs.encode"));
    const struct ckpt_pickle_str *s = &w->p->strs.ptr[ckpt_pv_id(v)];
    if (!spend(w, 2 * (size_t)s->len) || !(bytes = malloc((size_t)s->len + 1)))
        return NULL;
    for (size_t i = 0; i < s->len; i++) {
        const unsigned char c = (unsigned char)s->ptr[i];
        if (c < 0x80)
            bytes[n++] = (char)c;
        else if (c <= 0xc3 && i + 1 < s->len) /* two bytes: up to U+00FF */
            bytes[n++] = (char)(c << 6 | (s->ptr[++i] & 0x3f));
        else
            return tagged("$object", json_string("_codecs.encode"));
    }
    return hexadecimal("$bytes", &(struct ckpt_pickle_str){bytes, (uint32_t)n});
}

/* Tensors and everything else that only calling something would make. */
static json_t *object(struct walk *w, ckpt_pv v)
{
    const struct ckpt_pv_text text = ckpt_pv_text(w->p, v);
    const char *name = *ckpt_pv_name(w->p, v) ? text.text : "?";
    const bool made = ckpt_pv_kind(v) == CKPT_PV_OBJ;
    const ckpt_pv state = made ? ckpt_pv_slot(w->p, v, 1) : 0;
    json_t *out, *member;

    if (made && ckpt_pv_rule(w->p, v) == CKPT_TORCH_BYTES)
        return encoded(w, ckpt_pv_slot(w->p, v, 0));
    if (made && ckpt_pv_rule(w->p, v) == CKPT_TORCH_SET)
        return sequence(w, ckpt_pv_at(w->p, ckpt_pv_slot(w->p, v, 0), 0));
    if (!spend(w, strlen(name)))
        return NULL;
    out = tagged("$object", json_string(ckpt_utf8_ok(name) ? name : "?"));
    if (!out || ckpt_pv_kind(state) != CKPT_PV_DICT)
        return out;
    if ((member = convert(w, state)) && json_object_set_new(out, "state", member) == 0)
        return out;
    json_decref(out);
    return NULL;
}

static json_t *value(struct walk *w, ckpt_pv v)
{
    int64_t i = 0;

    switch (ckpt_pv_kind(v)) {
    case CKPT_PV_ABSENT:
    case CKPT_PV_NONE:
        return json_null();
    case CKPT_PV_BOOL:
        return json_boolean(ckpt_pv_id(v) != 0);
    case CKPT_PV_INT:
        (void)ckpt_pv_int(v, &i);
        return json_integer(i);
    case CKPT_PV_FLOAT:
        return number(w->p->floats.ptr[ckpt_pv_id(v)]);
    case CKPT_PV_STR:
    case CKPT_PV_BYTES:
        return text(w, v);
    case CKPT_PV_INTS:
    case CKPT_PV_INTS1:
    case CKPT_PV_TUPLE:
        return tagged("$tuple", sequence(w, v));
    case CKPT_PV_LIST:
        return sequence(w, v);
    case CKPT_PV_DICT:
        return dict(w, v);
    case CKPT_PV_GLOBAL:
    case CKPT_PV_OBJ:
    case CKPT_PV_OPAQUE:
        return object(w, v);
    }
    return NULL;
}

/* NULL with w->err set, or without: no memory. */
static json_t *convert(struct walk *w, ckpt_pv v)
{
    json_t *j;

    if (w->depth == CKPT_VALUE_MAX_DEPTH) {
        (void)ckpt_fail(w->err, CKPT_LIMIT, "its pickle nests deeper than %d",
                        CKPT_VALUE_MAX_DEPTH);
        return NULL;
    }
    if (!spend(w, 0))
        return NULL;
    w->depth++;
    j = value(w, v);
    w->depth--;
    return j;
}

static int fail_walk(const struct walk *w, struct ckpt_err *err)
{
    return w->err->code ? ckpt_err_move(err, w->err) : ckpt_nomem(err);
}

int ckpt_pickle_value(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err)
{
    struct ckpt_err own = {0};
    struct walk w = {.p = p, .err = &own};
    json_t *j = convert(&w, v);

    if (!j)
        return fail_walk(&w, err);
    *ret = j;
    return 0;
}

/* ---- configurations ---- */

static json_t *plain(const json_t *j);

/* An object, which may stand for a value that is none in JSON. */
static json_t *plain_object(const json_t *j)
{
    const json_t *state = json_object_get(j, "state"), *pairs = json_object_get(j, "$dict"),
                 *tuple = json_object_get(j, "$tuple");
    const char *name = ckpt_json_str(j, "$object"), *key;
    json_t *value, *out;
    size_t i;

    if (name && !state)
        return strcmp(name, "?") == 0 ? json_null() : json_string(name);
    if (name || tuple)
        return plain(name ? state : tuple);
    if (!pairs && json_object_size(j) &&
        *json_object_iter_key(json_object_iter((json_t *)j)) == '$')
        return json_null(); /* a float, bytes or text that JSON cannot hold */
    out = json_object();
    json_array_foreach(pairs, i, value)
        if ((key = json_string_value(json_array_get(value, 0))))
            ckpt_json_set(&out, key, plain(json_array_get(value, 1)));
    json_object_foreach((json_t *)(pairs ? NULL : j), key, value)
        ckpt_json_set(&out, key, plain(value));
    return out;
}

/* The value for a configuration; new. NULL: no memory. */
static json_t *plain(const json_t *j)
{
    json_t *value, *out;
    size_t i;

    if (json_is_object(j))
        return plain_object(j);
    if (!json_is_array(j))
        return json_incref((json_t *)j);
    out = json_array();
    json_array_foreach(j, i, value)
        ckpt_json_append(&out, plain(value));
    return out;
}

int ckpt_pickle_plain(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;

    if (ckpt_pickle_value(p, v, &j, err) < 0)
        return -1;
    return (*ret = plain(j)) ? 0 : ckpt_nomem(err);
}

/* ---- nested dicts ---- */

enum {
    MOST_NESTED = 8,       /* dicts in each other */
    MOST_ENTRIES = 1 << 20 /* of them all, as often as they are referenced */
};

struct nest {
    const struct ckpt_pickle *p;
    bool strict;
    const char *file;
    ckpt_pickle_value_fn *fn;
    void *ctx;
    struct ckpt_str path;
    size_t nentry; /* entries that were read */
};

static int walk_dict(struct nest *n, ckpt_pv dict, int depth, struct ckpt_err *err)
{
    const size_t len = n->path.len;

    for (size_t i = 0; i < ckpt_pv_npair(n->p, dict); i++) {
        const char *key = ckpt_pv_str(n->p, ckpt_pv_key(n->p, dict, i));
        const ckpt_pv v = ckpt_pv_value(n->p, dict, i);
        if (!key && !n->strict)
            continue;
        if (!key || !ckpt_utf8_ok(key))
            return ckpt_fail(err, CKPT_FORMAT, "'%s': a key of the module is not a string%s",
                             n->file, key ? " in UTF-8" : "");
        if (++n->nentry > MOST_ENTRIES || depth > MOST_NESTED)
            return ckpt_fail(err, CKPT_LIMIT, "'%s': the module has too many or too deep dicts",
                             n->file);
        n->path.len = len;
        ckpt_str_printf(&n->path, "%s%s", len ? "." : "", key);
        if (n->path.failed)
            return ckpt_nomem(err);
        if ((ckpt_pv_kind(v) == CKPT_PV_DICT ? walk_dict(n, v, depth + 1, err)
                                             : n->fn(n->ctx, ckpt_str_get(&n->path), v, err)) < 0)
            return -1;
    }
    return 0;
}

int ckpt_pickle_each(const struct ckpt_pickle *p, ckpt_pv dict, bool strict, const char *file,
                     ckpt_pickle_value_fn *fn, void *ctx, struct ckpt_err *err)
{
    struct nest n = {.p = p, .strict = strict, .file = file, .fn = fn, .ctx = ctx};
    const int result = walk_dict(&n, dict, 0, err);

    ckpt_str_release(&n.path);
    return result;
}

/* ---- leaves ---- */

static bool is_tensor(const struct ckpt_pickle *p, ckpt_pv v)
{
    const int rule = ckpt_pv_kind(v) == CKPT_PV_OBJ ? ckpt_pv_rule(p, v) : CKPT_PICKLE_OTHER;

    return rule == CKPT_PICKLE_PERSID ||
           (rule >= CKPT_TORCH_TENSOR_V2 && rule <= CKPT_TORCH_WRAPPER) ||
           rule == CKPT_TORCH_LOCAL_SHARD;
}

/* Is there a tensor in it? Bounded by the budget: then it is one value, which says so. */
static bool has_tensors(struct walk *w, ckpt_pv v, unsigned depth)
{
    const bool is_dict = ckpt_pv_kind(v) == CKPT_PV_DICT;
    const size_t n = is_dict ? ckpt_pv_npair(w->p, v) : ckpt_pv_len(w->p, v);

    if (depth == CKPT_VALUE_MAX_DEPTH || !spend(w, 0))
        return false;
    if (ckpt_pv_kind(v) == CKPT_PV_INTS || ckpt_pv_kind(v) == CKPT_PV_INTS1)
        return false;
    for (size_t i = 0; i < n; i++)
        if (has_tensors(w, is_dict ? ckpt_pv_value(w->p, v, i) : ckpt_pv_at(w->p, v, i), depth + 1))
            return true;
    return is_tensor(w->p, v);
}

/* Are the elements of a list or tuple separate entries? In torch they are if there are dicts or
 * tensors among them. */
static bool is_open(struct walk *w, ckpt_pv v, unsigned depth)
{
    const size_t n = ckpt_pv_kind(v) == CKPT_PV_LIST ? ckpt_pv_len(w->p, v) : 0;

    if (depth == CKPT_VALUE_MAX_DEPTH || !spend(w, 0))
        return false;
    for (size_t i = 0; i < n; i++) {
        const ckpt_pv member = ckpt_pv_at(w->p, v, i);
        if (ckpt_pv_kind(member) == CKPT_PV_DICT || is_open(w, member, depth + 1))
            return true;
    }
    return has_tensors(w, v, depth);
}

static int add_leaves(struct walk *w, ckpt_pv v, const char *name, json_t *out);

static int add_member(struct walk *w, const char *name, const char *key, ckpt_pv v, json_t *out)
{
    ckpt_cleanup(ckpt_freep) char *full = ckpt_asprintf("%s%s%s", name, *name ? "." : "", key);

    return full && spend(w, strlen(full)) ? add_leaves(w, v, full, out) : -1;
}

/* A key as Python's str() writes it; NULL: it cannot be a part of a name. */
static const char *key_text(const struct ckpt_pickle *p, ckpt_pv key, char *buf, size_t cap)
{
    const char *s = ckpt_pv_str(p, key);
    int64_t i;

    if (s)
        return ckpt_utf8_ok(s) ? s : NULL;
    if (!ckpt_pv_int(key, &i))
        return NULL;
    (void)snprintf(buf, cap, "%" PRId64, i);
    return buf;
}

static int add_dict(struct walk *w, ckpt_pv v, const char *name, json_t *out)
{
    char digits[24];

    for (size_t i = 0; i < ckpt_pv_npair(w->p, v); i++) {
        const char *key = key_text(w->p, ckpt_pv_key(w->p, v, i), digits, sizeof digits);
        if (key && add_member(w, name, key, ckpt_pv_value(w->p, v, i), out) < 0)
            return -1;
    }
    return 0;
}

static int add_list(struct walk *w, ckpt_pv v, const char *name, json_t *out)
{
    char digits[24];

    for (size_t i = 0; i < ckpt_pv_len(w->p, v); i++) {
        (void)snprintf(digits, sizeof digits, "%zu", i);
        if (add_member(w, name, digits, ckpt_pv_at(w->p, v, i), out) < 0)
            return -1;
    }
    return 0;
}

/* -1 with w->err set, or without: no memory. */
static int add_leaves(struct walk *w, ckpt_pv v, const char *name, json_t *out)
{
    int result;

    if (is_tensor(w->p, v))
        return 0;
    if (w->depth == CKPT_VALUE_MAX_DEPTH)
        return ckpt_fail(w->err, CKPT_LIMIT, "its pickle nests deeper than %d",
                         CKPT_VALUE_MAX_DEPTH);
    w->depth++;
    if (ckpt_pv_kind(v) == CKPT_PV_DICT)
        result = add_dict(w, v, name, out);
    else if (ckpt_pv_is_seq(v) && is_open(w, v, w->depth))
        result = add_list(w, v, name, out);
    else
        result = w->err->code ? -1 : json_object_set_new(out, name, convert(w, v));
    w->depth--;
    return result;
}

int ckpt_pickle_leaves(const struct ckpt_pickle *p, ckpt_pv v, const char *prefix, json_t *out,
                       struct ckpt_err *err)
{
    struct ckpt_err own = {0};
    struct walk w = {.p = p, .err = &own};

    return add_leaves(&w, v, prefix, out) < 0 ? fail_walk(&w, err) : 0;
}
