/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and reading a base model. */
#include "model/base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "base/regex.h"
#include "base/str.h"
#include "base/vec.h"
#include "container/config.h"
#include "recipe/library/files.h"

enum { MAX_REF_BYTES = 256 };

void ckpt_base_free(struct ckpt_base *base)
{
    if (!base)
        return;
    ckpt_dir_unref(base->dir);
    json_decref(base->config);
    ckpt_weight_map_unref(base->weight_map);
    ckpt_catalog_free(base->cat);
    ckpt_facts_release(&base->facts);
    free(base);
}

const char *ckpt_base_name_at(const struct ckpt_catalog *cat, const struct ckpt_weight_map *map,
                              size_t i)
{
    if (cat)
        return i < cat->tensors.len ? cat->tensors.ptr[i].name : NULL;
    return map && i < map->tensors.len ? map->tensors.ptr[i].tensor : NULL;
}

/* The hub's cache directory, looked for in the same places and order as huggingface_hub does. */
static char *hub_cache(void)
{
    const char *cache = getenv("HF_HUB_CACHE"), *hf = getenv("HF_HOME");
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    if (cache)
        return strdup(cache);
    if (hf)
        return ckpt_asprintf("%s/hub", hf);
    if (xdg)
        return ckpt_asprintf("%s/huggingface/hub", xdg);
    return ckpt_asprintf("%s/.cache/huggingface/hub", home ? home : "");
}

/* Find <cache>/models--ORG--NAME/snapshots/REV, where REV is the content of refs/main. */
static int find_in_hub(const char *name, char **ret_path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *cache = hub_cache();
    ckpt_cleanup(ckpt_freep) char *model = NULL;
    ckpt_cleanup(ckpt_freep) char *rev = NULL;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    const char *slash = strchr(name, '/');
    size_t len;

    if (!cache)
        return ckpt_nomem(err);
    if (!slash || slash == name || !slash[1] || strchr(slash + 1, '/') || name[0] == '.')
        return ckpt_fail(err, CKPT_MISSING, "base '%s' is not a directory%s", name,
                         ckpt_path_advice(name));
    model = ckpt_asprintf("%s/models--%.*s--%s", cache, (int)(slash - name), name, slash + 1);
    if (!model)
        return ckpt_nomem(err);
    if (ckpt_dir_open_near(model, CKPT_LINKS_BENEATH, &dir, err) < 0 ||
        ckpt_dir_read_file(dir, "refs/main", MAX_REF_BYTES, &rev, &len, err) < 0)
        return ckpt_err_in(err, "base '%s' is neither a directory nor in the local hub cache",
                           name);
    rev[strcspn(rev, " \t\r\n")] = '\0';
    if (!*rev || strchr(rev, '/'))
        return ckpt_fail(err, CKPT_FORMAT, "'%s/refs/main' names no snapshot", model);
    *ret_path = ckpt_asprintf("%s/snapshots/%s", model, rev);
    return *ret_path ? 0 : ckpt_nomem(err);
}

/* Is it a directory, or an archive? */
static bool is_there(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode));
}

/* Does the base have no weights (deleted, or never downloaded)? Its index still tells the split. */
static bool has_no_weights(const struct ckpt_base *b)
{
    for (size_t i = 0; b->weight_map && i < b->weight_map->files.len; i++)
        if (ckpt_dir_has_file(b->dir, b->weight_map->files.ptr[i]))
            return false;
    return b->weight_map != NULL;
}

static bool has_single(const struct ckpt_base *b)
{
    return ckpt_dir_has_file(b->dir, "model.safetensors") ||
           ckpt_dir_has_file(b->dir, "diffusion_pytorch_model.safetensors");
}

static int read_weights(struct ckpt_base *b, struct ckpt_fdpool *pool, struct ckpt_err *err)
{
    static const char *const indices[] = {"model.safetensors.index.json",
                                          "diffusion_pytorch_model.safetensors.index.json"};
    struct ckpt_reader_options opt = {.pool = pool};

    if (ckpt_reader_hf.probe(b->dir) == CKPT_NOT_MINE &&
        ckpt_reader_hf.guess(b->dir) == CKPT_NOT_MINE)
        return 0;
    for (size_t i = 0; i < 2 && !b->weight_map && !has_single(b); i++)
        if (ckpt_dir_has_file(b->dir, indices[i]) &&
            ckpt_weight_map_read(b->dir, indices[i], ckpt_reader_refuse_index, &b->weight_map,
                                 err) < 0)
            return -1;
    if (has_no_weights(b)) {
        b->facts.index_name = ckpt_dir_has_file(b->dir, indices[0]) ? NULL : indices[1];
        return 0;
    }
    return ckpt_catalog_new(&b->cat, err) < 0
               ? -1
               : ckpt_reader_hf.load(b->dir, &opt, &b->facts, b->cat, err);
}

int ckpt_base_find(const char *name, char **ret_path, struct ckpt_err *err)
{
    if (!is_there(name) && !ckpt_is_bucket(name))
        return find_in_hub(name, ret_path, err);
    return (*ret_path = strdup(name)) ? 0 : ckpt_nomem(err);
}

/* The name of the base of the adapter in dir, if there is one. */
static int named_in(struct ckpt_dir *dir, char **ret, struct ckpt_err *err)
{
    static const char *const configs[] = {"adapter_config.json", "model/adapter_config.json"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;

    if (ckpt_reader_peft.probe(dir) == CKPT_NOT_MINE)
        return 0;
    for (size_t i = 0; i < 2 && !config; i++)
        if (ckpt_config_read_if(dir, configs[i], CKPT_CONFIG_MAX_BYTES, &config, err) < 0)
            return -1;
    const char *name = ckpt_json_str(config, "base_model_name_or_path");
    return name && *name && !ckpt_is_bucket(name) && !(*ret = strdup(name)) ? ckpt_nomem(err) : 0;
}

int ckpt_base_named(struct ckpt_dir *dir, bool below, char **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    *ret = NULL;
    if (named_in(dir, ret, err) < 0 ||
        (below && !*ret && ckpt_entries_read(dir, &entries, err) < 0))
        return -1;
    while (!*ret && ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;
        if (e.kind == CKPT_ENTRY_DIR && ckpt_dir_open_below(dir, e.name, &sub, NULL) == 0 &&
            named_in(sub, ret, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_base_open(const char *name, const struct ckpt_access *how, struct ckpt_fdpool *pool,
                   struct ckpt_base **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_base *b = calloc(1, sizeof *b);
    int result;

    if (!b)
        return ckpt_nomem(err);
    result = ckpt_base_find(name, &path, err) < 0 ||
                     ckpt_archive_open(path, how, &b->dir, err) < 0 ||
                     ckpt_config_read_if(b->dir, "config.json", CKPT_CONFIG_MAX_BYTES, &b->config,
                                         err) < 0 ||
                     read_weights(b, pool, err) < 0
                 ? -1
                 : 0;
    if (result == 0 && !b->config && !b->cat && !ckpt_dir_has_file(b->dir, "adapter_config.json"))
        result =
            ckpt_fail(err, CKPT_MISSING, "base '%s' has neither config.json nor weights", path);
    if (result < 0) {
        ckpt_base_free(b);
        return -1;
    }
    *ret = b;
    return 0;
}

const struct ckpt_weight_map *ckpt_base_map(const struct ckpt_base *base)
{
    return base->weight_map ? base->weight_map : base->facts.weight_map;
}

int ckpt_base_catalog(const struct ckpt_base *base, struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;

    if (ckpt_catalog_new(&cat, err) < 0 || ckpt_catalog_add_sources(cat, base->cat, err) < 0)
        return -1;
    for (size_t i = 0; i < base->cat->tensors.len; i++) {
        struct ckpt_tensor t = base->cat->tensors.ptr[i];
        size_t index;
        if (ckpt_catalog_add(cat, t.name, (enum ckpt_dtype)t.dtype, t.dim, t.rank, &index, err) < 0)
            return -1;
        t.cat = cat; /* the same sources have the same numbers */
        cat->tensors.ptr[index] = t;
    }
    *ret = ckpt_steal(&cat);
    return 0;
}

/* ---- where nobody says which: beside the weights ---- */

/* Folders in which trainers keep them: beside the weights, or with them. */
static const char *const inner[] = {"",      "huggingface",         "hf", "model/huggingface",
                                    "model", "pytorch_model_fsdp_0"};

static int look_in(struct ckpt_dir *dir, const char *below, struct ckpt_home *ret,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;

    if (*below && !ckpt_dir_has_dir(dir, below))
        return 0;
    if (ckpt_dir_open_below(dir, *below ? below : ".", &at, err) < 0 ||
        ckpt_config_read_if(at, "config.json", CKPT_CONFIG_MAX_BYTES, &config, err) < 0)
        return -1;
    if (ckpt_config_is_model(config)) {
        ret->dir = ckpt_steal(&at);
        ret->config = ckpt_steal(&config);
    } else if (config && !ret->other &&
               !(ret->other = ckpt_asprintf("%s/config.json", ckpt_dir_path(at)))) {
        return ckpt_nomem(err);
    }
    return 0;
}

int ckpt_home_find(struct ckpt_dir *dir, struct ckpt_dir *const *outer, struct ckpt_home *ret,
                   struct ckpt_err *err)
{
    while (dir && !ret->dir) {
        for (size_t i = 0; i < sizeof inner / sizeof inner[0] && !ret->dir; i++)
            if (look_in(dir, inner[i], ret, err) < 0)
                return -1;
        dir = outer && *outer ? *outer++ : NULL;
    }
    return 0;
}

void ckpt_home_release(struct ckpt_home *home)
{
    ckpt_dir_unref(home->dir);
    json_decref(home->config);
    free(home->other);
}

/* ---- renaming by tables ---- */

struct ckpt_renames {
    CKPT_VEC(struct ckpt_regex *) rules;
};

static void renames_freep(struct ckpt_renames **r) { ckpt_renames_free(*r); }

void ckpt_renames_free(struct ckpt_renames *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->rules.len; i++)
        ckpt_regex_free(r->rules.ptr[i]);
    ckpt_vec_release(&r->rules);
    free(r);
}

static int add_rule(struct ckpt_renames *r, const char *pattern, const char *replacement,
                    struct ckpt_err *err)
{
    struct ckpt_regex *rule;

    if (ckpt_regex_new(pattern, replacement, &rule, err) < 0)
        return -1;
    if (ckpt_vec_push(&r->rules, rule) < 0) {
        ckpt_regex_free(rule);
        return ckpt_nomem(err);
    }
    return 0;
}

static int add_object(struct ckpt_renames *r, const json_t *j, struct ckpt_err *err)
{
    const char *pattern;
    json_t *v;

    json_object_foreach((json_t *)j, pattern, v) {
        if (!json_is_string(v))
            return ckpt_fail(err, CKPT_USAGE, "the replacement of '%s' is not a string", pattern);
        if (add_rule(r, pattern, json_string_value(v), err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_renames_load(const char *path, struct ckpt_renames **ret, struct ckpt_err *err)
{
    ckpt_cleanup(renames_freep) struct ckpt_renames *r = calloc(1, sizeof *r);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    size_t len;

    if (!r)
        return ckpt_nomem(err);
    if (ckpt_file_read(path, &dir, &text, &len, err) < 0 ||
        ckpt_json_parse(text, len, path, &j, err) < 0)
        return ckpt_err_in(err, "key_mapping");
    if (!json_is_object(j))
        return ckpt_fail(err, CKPT_USAGE, "key_mapping '%s' is not a JSON object", path);
    if (add_object(r, j, err) < 0)
        return ckpt_err_in(err, "key_mapping '%s'", path);
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- what transformers knows ---- */

int ckpt_renames_of_type(const struct ckpt_type *type, struct ckpt_renames **ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(renames_freep) struct ckpt_renames *r = NULL;

    if (type->renames.n && !(r = calloc(1, sizeof *r)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < type->renames.n; i++)
        if (add_rule(r, type->renames.pair[i].from, type->renames.pair[i].to, err) < 0)
            return ckpt_err_in(err, "%s: renames", type->name);
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- renaming ---- */

int ckpt_renames_apply(const struct ckpt_renames *r, const char *name, char **ret_name,
                       struct ckpt_err *err)
{
    char *result = NULL;

    for (size_t i = 0; i < r->rules.len && !result; i++)
        if (ckpt_regex_sub(r->rules.ptr[i], name, &result, err) < 0)
            return -1;
    if (!result && !(result = strdup(name)))
        return ckpt_nomem(err);
    *ret_name = result;
    return 0;
}

int ckpt_renames_note(const struct ckpt_renames *r, const char *name, json_t *map,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *other = NULL;

    if (ckpt_renames_apply(r, name, &other, err) < 0)
        return -1;
    if (strcmp(other, name) != 0 && json_object_set_new(map, other, json_string(name)) < 0)
        return ckpt_fail(err, CKPT_USAGE, "'%s' is renamed to a name that is not UTF-8", name);
    return 0;
}
