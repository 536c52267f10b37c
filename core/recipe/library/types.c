/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing of the files types/NAME.json. */
#include "recipe/library/types.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/library/files.h"

#define FOLDER "types/"
#define COMMON "common"

enum { MAX_LIKE = 4 };

struct ckpt_types {
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_type *) list; /* all types except the common one; given ones first */
    struct ckpt_type common, any;
    struct ckpt_map by_type;               /* place in the list */
    CKPT_VEC(struct ckpt_regex *) regexes; /* owned */
};

/* One file, while it is parsed. */
struct reader {
    struct ckpt_types *types;
    const struct ckpt_files *files;
    const char *name; /* "types/llava" */
    struct ckpt_type *out;
    struct ckpt_err *err;
};

/* ---- texts ---- */

const char *ckpt_config_class(const json_t *config)
{
    return json_string_value(json_array_get(json_object_get(config, "architectures"), 0));
}

static const json_t *quantization_of(const json_t *config)
{
    static const char key[] = "quantization_config";
    const json_t *quant = json_object_get(config, key);

    return quant ? quant : json_object_get(json_object_get(config, "text_config"), key);
}

bool ckpt_config_is_quantized(const json_t *config) { return quantization_of(config) != NULL; }

const char *ckpt_config_dequantized_by(const json_t *config)
{
    const char *method = ckpt_json_str(quantization_of(config), "quant_method");

    return method && strcmp(method, "bitsandbytes") == 0
               ? "transformers dequantises those of bitsandbytes: model = model.dequantize(), then "
                 "model.save_pretrained(DIR, save_original_format=False)"
               : NULL;
}

bool ckpt_config_is_model(const json_t *config)
{
    return ckpt_json_str(config, "model_type") || json_object_get(config, "architectures");
}

size_t ckpt_class_begins_as(const char *class, const char *text, size_t len)
{
    const char *at = class;

    for (size_t i = 0; i < len; i++) {
        if (text[i] == '_' || text[i] == '-')
            continue;
        at += *at == '_';
        if (tolower((unsigned char)*at) != tolower((unsigned char)text[i]))
            return 0;
        at++;
    }
    return (size_t)(at - class);
}

bool ckpt_config_is_usual(const json_t *config)
{
    static const char text[] = "_text"; /* a part of some types' names that classes lack */
    const char *class = ckpt_config_class(config),
               *type = ckpt_json_str_or(config, "model_type", "");
    const size_t len = strlen(type) - (ckpt_has_suffix(type, text) ? strlen(text) : 0);

    return !json_object_get(config, "auto_map") &&
           (!class || ckpt_class_begins_as(class, type, len) > 0);
}

bool ckpt_texts_in(const struct ckpt_texts *w, const char *name)
{
    for (size_t i = 0; i < w->n; i++)
        if (strstr(name, w->text[i]))
            return true;
    return false;
}

bool ckpt_texts_end(const struct ckpt_texts *w, const char *name)
{
    for (size_t i = 0; i < w->n; i++)
        if (ckpt_has_suffix(name, w->text[i]))
            return true;
    return false;
}

/* ---- values ---- */

static int fail(const struct reader *r, const char *key, const char *why)
{
    return ckpt_fail(r->err, CKPT_FORMAT, "%s: %s: %s", r->name, key, why);
}

static int read_texts(const struct reader *r, const char *key, const json_t *v, void *out)
{
    const char *where = ckpt_field_text(&r->types->arena, r->err, "%s: %s", r->name, key);

    return where ? ckpt_field_strings(&r->types->arena, v, NULL, where, out, r->err) : -1;
}

static int read_text(const struct reader *r, const char *key, const json_t *v, void *out)
{
    if (!json_is_string(v))
        return fail(r, key, "a string is expected here");
    *(const char **)out = ckpt_arena_strdup(&r->types->arena, json_string_value(v));
    return *(const char **)out ? 0 : ckpt_nomem(r->err);
}

static int read_flag(const struct reader *r, const char *key, const json_t *v, void *out)
{
    if (!json_is_boolean(v))
        return fail(r, key, "true or false is expected here");
    *(bool *)out = json_is_true(v);
    return 0;
}

/* {from: to}; only where `null_ok` may `to` be null. */
static int read_pairs(const struct reader *r, const char *key, const json_t *v, bool null_ok,
                      struct ckpt_text_pairs *out)
{
    struct ckpt_arena *arena = &r->types->arena;
    struct ckpt_text_pair *pair;
    const char *from;
    json_t *to;
    size_t n = 0;

    if (!json_is_object(v))
        return fail(r, key, "an object is expected here");
    if (!(pair = ckpt_arena_alloc(arena, (json_object_size(v) + 1) * sizeof *pair)))
        return ckpt_nomem(r->err);
    json_object_foreach((json_t *)v, from, to) {
        if (!json_is_string(to) && !(null_ok && json_is_null(to)))
            return fail(r, key, "the value of a pair is not a string");
        pair[n].from = ckpt_arena_strdup(arena, from);
        pair[n].to = json_is_null(to) ? NULL : ckpt_arena_strdup(arena, json_string_value(to));
        if (!pair[n].from || (!pair[n].to && !json_is_null(to)))
            return ckpt_nomem(r->err);
        n++;
    }
    *out = (struct ckpt_text_pairs){pair, n};
    return 0;
}

static int read_ties(const struct reader *r, const char *key, const json_t *v, void *out)
{
    return read_pairs(r, key, v, true, out);
}

static int read_renames(const struct reader *r, const char *key, const json_t *v, void *out)
{
    return read_pairs(r, key, v, false, out);
}

static int read_turned(const struct reader *r, const char *key, const json_t *v, void *out)
{
    static const char *const word[] = {"no", "memory", "hub"};
    const char *text = json_string_value(v);

    for (size_t i = 0; text && i < sizeof word / sizeof *word; i++)
        if (strcmp(text, word[i]) == 0) {
            *(enum ckpt_experts_turned *)out = (enum ckpt_experts_turned)i;
            return 0;
        }
    return fail(r, key, "expected 'no', 'memory' or 'hub'");
}

/* Read a list into a new array in the arena, of elements of `size` bytes. NULL: it failed. */
static void *read_list(const struct reader *r, const char *key, const json_t *v, size_t size,
                       int (*read)(const struct reader *r, const char *key, const json_t *j,
                                   void *out))
{
    const size_t n = json_array_size(v);
    char *list = NULL;

    if (!json_is_array(v))
        (void)fail(r, key, "a list is expected here");
    else if (!(list = ckpt_arena_alloc(&r->types->arena, (n + 1) * size)))
        (void)ckpt_nomem(r->err);
    for (size_t i = 0; list && i < n; i++)
        if (read(r, key, json_array_get(v, i), list + i * size) < 0)
            return NULL;
    return list;
}

/* ---- experts ---- */

static int read_layout(const struct reader *r, const char *key, const json_t *j, void *ret)
{
    struct ckpt_expert_layout *out = ret;
    static const char *const known[] = {"module", "parameter", "parts", NULL};
    struct ckpt_texts parts;

    if (ckpt_field_object(j, r->name, known, r->err) < 0 ||
        read_text(r, key, json_object_get(j, "module"), &out->module) < 0 ||
        read_text(r, key, json_object_get(j, "parameter"), &out->parameter) < 0 ||
        read_texts(r, key, json_object_get(j, "parts"), &parts) < 0)
        return -1;
    if (parts.n < 1 || parts.n > 2)
        return fail(r, key, "'parts' are one or two names");
    out->npart = parts.n;
    for (size_t i = 0; i < parts.n; i++)
        out->part[i] = parts.text[i];
    return 0;
}

static int read_experts(const struct reader *r, const char *key, const json_t *v, void *out)
{
    struct ckpt_expert_layout *list = read_list(r, key, v, sizeof *list, read_layout);

    *(struct ckpt_expert_layouts *)out = (struct ckpt_expert_layouts){list, json_array_size(v)};
    return list ? 0 : -1;
}

/* ---- least sizes ---- */

static int keep_regex(const struct reader *r, const char *key, const char *pattern,
                      const struct ckpt_regex **ret)
{
    struct ckpt_regex *x;
    struct ckpt_err why = {0};

    if (ckpt_vec_reserve(&r->types->regexes, 1) < 0)
        return ckpt_nomem(r->err);
    if (ckpt_regex_new(pattern, "", &x, &why) < 0)
        return ckpt_fail(r->err, why.code == CKPT_USAGE ? CKPT_FORMAT : why.code, "%s: %s: %s",
                         r->name, key, why.text);
    *ret = r->types->regexes.ptr[r->types->regexes.len++] = x;
    return 0;
}

static int read_least(const struct reader *r, const char *key, const json_t *j, void *ret)
{
    struct ckpt_least *out = ret;
    static const char *const known[] = {"names", "shape", NULL};
    const json_t *shape = json_object_get(j, "shape");
    const char *pattern;

    if (ckpt_field_object(j, r->name, known, r->err) < 0 ||
        read_text(r, key, json_object_get(j, "names"), &pattern) < 0 ||
        keep_regex(r, key, pattern, &out->names) < 0)
        return -1;
    if (!json_is_array(shape) || json_array_size(shape) < 1 ||
        json_array_size(shape) > CKPT_LEAST_DIMS)
        return fail(r, key, "'shape' has one to four dimensions");
    out->rank = (uint32_t)json_array_size(shape);
    for (uint32_t d = 0; d < out->rank; d++)
        if (read_texts(r, key, json_array_get(shape, d), &out->dim[d]) < 0)
            return -1;
    return 0;
}

static int read_leasts(const struct reader *r, const char *key, const json_t *v, void *out)
{
    struct ckpt_least *list = read_list(r, key, v, sizeof *list, read_least);

    *(struct ckpt_leasts *)out = (struct ckpt_leasts){list, json_array_size(v)};
    return list ? 0 : -1;
}

/* ---- a file ---- */

struct field {
    const char *key;
    int (*read)(const struct reader *r, const char *key, const json_t *v, void *out);
    size_t at; /* in the struct that is filled */
};

static int read_fields(const struct reader *r, const json_t *j, const struct field *field, size_t n,
                       void *out)
{
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)j, key, v) {
        size_t i = 0;
        while (i < n && strcmp(field[i].key, key) != 0)
            i++;
        if (i == n)
            return fail(r, key, "unknown key");
        if (field[i].read && field[i].read(r, key, v, (char *)out + field[i].at) < 0)
            return -1;
    }
    return 0;
}

#define COUNT(list) (sizeof(list) / sizeof *(list))

static int read_stages(const struct reader *r, const char *key, const json_t *v, void *out)
{
#define AT(member) offsetof(struct ckpt_stages, member)
    static const struct field fields[] = {
        {"embedding", read_texts, AT(embedding)}, {"first", read_texts, AT(first)},
        {"beside", read_texts, AT(beside)},       {"last", read_texts, AT(last)},
        {"layers", read_texts, AT(layers)},
    };
#undef AT

    if (!json_is_object(v))
        return fail(r, key, "an object is expected here");
    return read_fields(r, v, fields, COUNT(fields), out);
}

#define AT(member) offsetof(struct ckpt_type, member)
static const struct field fields[] = {
    {"note", NULL, 0},
    {"like", NULL, 0},
    {"model_types", read_texts, AT(model_types)},
    {"embedding", read_texts, AT(embedding)},
    {"output", read_texts, AT(output)},
    {"last_norm", read_text, AT(last_norm)},
    {"ties", read_ties, AT(ties)},
    {"widths", read_texts, AT(widths)},
    {"order", read_texts, AT(order)},
    {"renames", read_renames, AT(renames)},
    {"experts", read_experts, AT(experts)},
    {"parameters", read_texts, AT(parameters)},
    {"experts_turned", read_turned, AT(experts_turned)},
    {"bare", read_ties, AT(bare)},
    {"headed", read_texts, AT(headed)},
    {"added_heads", read_texts, AT(added_heads)},
    {"held_as", read_texts, AT(held_as)},
    {"tied", read_flag, AT(tied)},
    {"generation", read_texts, AT(generation)},
    {"tokenizer_files", read_texts, AT(tokenizer_files)},
    {"weight_files", read_texts, AT(weight_files)},
    {"decoder_config", read_text, AT(decoder_config)},
    {"no_use_cache", read_flag, AT(no_use_cache)},
    {"more_rows", read_flag, AT(more_rows)},
    {"fused_on_hub", read_flag, AT(fused_on_hub)},
    {"converted", read_flag, AT(converted)},
    {"absent", read_texts, AT(absent)},
    {"buffers", read_texts, AT(buffers)},
    {"keeps_dtype", read_texts, AT(keeps_dtype)},
    {"computed", read_texts, AT(computed)},
    {"unsaved", read_ties, AT(unsaved)},
    {"least", read_leasts, AT(least)},
    {"layers", read_text, AT(layers)},
    {"stages", read_stages, AT(stages)},
};
#undef AT

/* Read a file. Facts that it does not state are those of the file that it names ("like"), else of
 * the common one. */
static int read_file(const struct reader *from, const struct ckpt_file *file, int depth,
                     struct ckpt_type *out)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    struct reader r = *from;
    const struct ckpt_file *other;

    r.name = ckpt_arena_strdup(&r.types->arena, file->name);
    if (!r.name)
        return ckpt_nomem(r.err);
    if (ckpt_json_parse_strict(file->text, file->len, r.name, &j, r.err) < 0)
        return -1;
    if (!json_is_object(j))
        return ckpt_fail(r.err, CKPT_FORMAT, "%s: an object is expected here", r.name);
    const json_t *like = json_object_get(j, "like");
    if (like && (!json_is_string(like) ||
                 !(other = ckpt_files_find(r.files, FOLDER, json_string_value(like)))))
        return fail(&r, "like", "there is no such file in types/");
    if (like && depth == MAX_LIKE)
        return fail(&r, "like", "the files include each other too deeply");
    if (like && read_file(&r, other, depth + 1, out) < 0)
        return -1;
    out->name = r.name;
    out->model_types = (struct ckpt_texts){0};
    return read_fields(&r, j, fields, COUNT(fields), out);
}

static int add_file(const struct reader *r, const struct ckpt_file *file)
{
    struct ckpt_types *all = r->types;
    struct ckpt_type *t = ckpt_arena_dup(&all->arena, &all->common, sizeof *t);

    if (!t)
        return ckpt_nomem(r->err);
    if (read_file(r, file, 0, t) < 0)
        return -1;
    if (t->model_types.n == 0)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'model_types' is missing", t->name);
    for (size_t i = 0; i < t->model_types.n; i++) /* the first file that lists a type counts */
        if (ckpt_map_add(&all->by_type, t->model_types.text[i], (uint32_t)all->list.len) ==
            CKPT_NONE)
            return ckpt_nomem(r->err);
    return ckpt_vec_push(&all->list, t) < 0 ? ckpt_nomem(r->err) : 0;
}

/* ---- a type that no file lists ---- */

typedef CKPT_VEC(const char *) text_vec;

static int add_texts(text_vec *all, const struct ckpt_texts *w)
{
    for (size_t i = 0; i < w->n; i++) {
        const struct ckpt_texts have = {all->ptr, all->len};
        if (!ckpt_texts_have(&have, w->text[i], strlen(w->text[i])) &&
            ckpt_vec_push(all, w->text[i]) < 0)
            return -1;
    }
    return 0;
}

/* Combine the lists at offset `at` of all files, beginning with the common one's. */
static int unite_texts(struct ckpt_types *t, size_t at, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vec_cleanup) text_vec all = {0};
    const char **copy = NULL;
    int rc = add_texts(&all, (const struct ckpt_texts *)((char *)&t->common + at));

    for (size_t i = 0; rc == 0 && i < t->list.len; i++)
        rc = add_texts(&all, (const struct ckpt_texts *)((char *)t->list.ptr[i] + at));
    if (rc == 0 && (copy = ckpt_arena_dup(&t->arena, all.ptr, all.len * sizeof *copy)))
        *(struct ckpt_texts *)((char *)&t->any + at) = (struct ckpt_texts){copy, all.len};
    return copy ? 0 : ckpt_nomem(err);
}

static bool has_pair(const struct ckpt_text_pair *pair, size_t n, const struct ckpt_text_pair *p)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(pair[i].from, p->from) == 0 && !pair[i].to == !p->to &&
            (!p->to || strcmp(pair[i].to, p->to) == 0))
            return true;
    return false;
}

static int unite_ties(struct ckpt_types *t, struct ckpt_err *err)
{
    struct ckpt_text_pair *pair;
    size_t n = t->common.ties.n, at = 0;

    for (size_t i = 0; i < t->list.len; i++)
        n += t->list.ptr[i]->ties.n;
    if (!(pair = ckpt_arena_alloc(&t->arena, (n + 1) * sizeof *pair)))
        return ckpt_nomem(err);
    for (size_t i = 0; i <= t->list.len; i++) {
        const struct ckpt_text_pairs *own = i ? &t->list.ptr[i - 1]->ties : &t->common.ties;
        for (size_t k = 0; k < own->n; k++)
            if (!has_pair(pair, at, &own->pair[k]))
                pair[at++] = own->pair[k];
    }
    t->any.ties = (struct ckpt_text_pairs){pair, at};
    return 0;
}

int ckpt_types_load(const struct ckpt_files *files, struct ckpt_types **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_types_freep) struct ckpt_types *t = calloc(1, sizeof *t);
    const struct ckpt_file *common = ckpt_files_find(files, FOLDER, COMMON);
    const struct reader r = {.types = t, .files = files, .err = err};

    if (!t)
        return ckpt_nomem(err);
    if (common && read_file(&r, common, 0, &t->common) < 0)
        return -1;
    if (common &&
        !(t->common.generation.n && t->common.tokenizer_files.n && t->common.weight_files.n))
        return ckpt_fail(err, CKPT_FORMAT,
                         "%s: 'generation', 'tokenizer_files' or 'weight_files' is missing",
                         common->name);
    for (size_t i = 0; i < files->list.len; i++) {
        const struct ckpt_file *f = &files->list.ptr[i];
        if (f != common && ckpt_has_prefix(f->name, FOLDER) && add_file(&r, f) < 0)
            return -1;
    }
    t->any = t->common;
    if (unite_texts(t, offsetof(struct ckpt_type, embedding), err) < 0 ||
        unite_texts(t, offsetof(struct ckpt_type, widths), err) < 0 || unite_ties(t, err) < 0)
        return -1;
    *ret = ckpt_steal(&t);
    return 0;
}

void ckpt_types_free(struct ckpt_types *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->regexes.len; i++)
        ckpt_regex_free(t->regexes.ptr[i]);
    ckpt_vec_release(&t->regexes);
    ckpt_map_release(&t->by_type);
    ckpt_vec_release(&t->list);
    ckpt_arena_release(&t->arena);
    free(t);
}

const struct ckpt_type *ckpt_types_find(const struct ckpt_types *t, const char *model_type)
{
    const uint32_t at = model_type ? ckpt_map_find(&t->by_type, model_type) : CKPT_NONE;

    return at == CKPT_NONE ? &t->any : t->list.ptr[at];
}

const struct ckpt_type *ckpt_types_any(const struct ckpt_types *t) { return &t->any; }
