/* SPDX-License-Identifier: Apache-2.0 */
/* Composing a view of one checkpoint. */
#include "run/checkpoint.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "ckpt/reader.h"
#include "run/names.h"
#include "run/side.h"
#include "tensor/value.h"

enum { SLAB_BUDGET = 256 * 1024 * 1024 };

/* ---- shared ---- */

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err)
{
    struct ckpt_shared *s = calloc(1, sizeof *s);

    if (!s)
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    if (ckpt_options_copy(opt, &s->opt, err) < 0 || ckpt_fdpool_new(0, &s->pool, err) < 0 ||
        ckpt_slabs_new(SLAB_BUDGET, &s->slabs, err) < 0 ||
        ckpt_recipes_load(s->opt->recipe, &s->recipes, err) < 0 ||
        (s->opt->base &&
         ckpt_base_open(s->opt->base, s->opt->follow_symlinks ? CKPT_LINKS_ANY : CKPT_LINKS_BENEATH,
                        s->pool, &s->base, err) < 0)) {
        ckpt_shared_unref(s);
        return -1;
    }
    *ret = s;
    return 0;
}

void ckpt_shared_unref(struct ckpt_shared *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_base_free(s->base);
    ckpt_recipes_free(s->recipes);
    ckpt_slabs_free(s->slabs);
    ckpt_fdpool_unref(s->pool);
    ckpt_options_free(s->opt);
    free(s);
}

struct ckpt_view *ckpt_view_hold(struct ckpt_view *view)
{
    atomic_fetch_add(&view->refs, 1);
    return view;
}

void ckpt_view_release(struct ckpt_view *view)
{
    if (!view || atomic_fetch_sub(&view->refs, 1) != 1)
        return;
    ckpt_slabs_forget(view->shared->slabs, &view->reading);
    ckpt_vtree_free(view->tree);
    ckpt_catalog_free(view->cat);
    ckpt_dir_unref(view->dir);
    json_decref(view->about);
    json_decref(view->config);
    json_decref(view->warnings);
    free(view->recipe);
    free(view->source);
    ckpt_shared_unref(view->shared);
    free(view);
}

/* ---- catalogue ---- */

static bool is_hf(const json_t *about)
{
    const char *format = ckpt_json_str(about, "format");
    return format && strcmp(format, "hf") == 0;
}

/* An HF directory is its own model: its names are right, and its config is what it says, less what
 * options override. */
static int model_of_hf(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const json_t *overrides = v->shared->opt->overrides;
    const char *key;
    json_t *value;

    v->cat = ckpt_steal(src);
    v->config = json_deep_copy(v->cat->config);
    if (v->cat->config && !v->config)
        return ckpt_nomem(err);
    json_object_foreach((json_t *)overrides, key, value)
    {
        if (key[0] == '_')
            continue;
        if (!v->config)
            return ckpt_fail(err, CKPT_USAGE,
                             "option %s: '%s' has no config.json that it could change", key,
                             ckpt_dir_path(v->dir));
        if (json_object_set(v->config, key, value) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int model_of_recipe(struct ckpt_view *v, const struct ckpt_catalog *src,
                           struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    struct ckpt_recipe_options opt = {
        .base_config = s->base ? s->base->config : NULL,
        .overrides = s->opt->overrides,
        .allow_partial = s->opt->allow_partial,
    };
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;

    if (ckpt_recipe_apply(s->recipes, src, &opt, &model, err) < 0)
        return -1;
    v->cat = ckpt_steal(&model->catalog);
    v->config = ckpt_steal(&model->config);
    v->recipe = ckpt_steal(&model->recipe);
    return 0;
}

/* The recipe's catalogue may repeat what the reader said. */
static int add_warnings(json_t *all, const json_t *more)
{
    size_t i, k;
    json_t *text, *old;

    json_array_foreach(more, i, text)
    {
        bool known = false;
        json_array_foreach(all, k, old) known |= json_equal(text, old);
        if (!known && json_array_append(all, text) < 0)
            return -1;
    }
    return 0;
}

/* The base's config, or the checkpoint's own. */
static const json_t *lent_config(const struct ckpt_view *v, const struct ckpt_catalog *cat)
{
    const struct ckpt_base *base = v->shared->base;
    return base && base->config ? base->config : cat->config;
}

/* That config, with what options override. */
static int config_of_base(struct ckpt_view *v, struct ckpt_err *err)
{
    const json_t *config = lent_config(v, v->cat);
    const json_t *overrides = v->shared->opt->overrides;
    const char *key;
    json_t *value;

    if (!config) {
        ckpt_catalog_warn(v->cat, "the checkpoint has no config.json; base=DIR lends one");
        return 0;
    }
    if (!(v->config = json_deep_copy(config)))
        return ckpt_nomem(err);
    json_object_foreach((json_t *)overrides, key,
                        value) if (key[0] != '_' && json_object_set(v->config, key, value) <
                                                        0) return ckpt_nomem(err);
    return 0;
}

/* A checkpoint of any format that holds a transformers model under its own names. *src is taken if
 * it is one. */
static int model_of_names(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    bool found;

    if (s->opt->recipe)
        return 0;
    if (ckpt_names_apply(*src, s->base, lent_config(v, *src), s->opt->allow_partial, &found, err) <
        0)
        return -1;
    if (!found)
        return 0;
    v->cat = ckpt_steal(src);
    v->own_names = true;
    return config_of_base(v, err);
}

static int make_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    v->about = json_incref((*src)->about);
    v->warnings = json_incref((*src)->warnings);
    if (v->shared->opt->raw) {
        v->cat = ckpt_steal(src);
        return 0;
    }
    if (is_hf(v->about))
        return model_of_hf(v, src, err);
    if (model_of_names(v, src, err) < 0)
        return -1;
    if (v->own_names)
        return 0;
    if (model_of_recipe(v, *src, err) < 0)
        return -1;
    return add_warnings(v->warnings, v->cat->warnings) < 0 ? ckpt_nomem(err) : 0;
}

/* ---- dtypes ---- */

/* The dtype that config.json states, under its new name or its old one. */
static bool config_dtype(const json_t *config, enum ckpt_dtype *ret)
{
    const char *name = ckpt_json_str(config, "dtype");

    if (!name)
        name = ckpt_json_str(config, "torch_dtype");
    return name && ckpt_dtype_parse(name, strlen(name), ret) && ckpt_dtype_is_castable(*ret);
}

/* What the option, or the base, wants a tensor to be; its own dtype if nobody says. */
static enum ckpt_dtype wanted_dtype(const struct ckpt_shared *s, const struct ckpt_tensor *t)
{
    const struct ckpt_tensor *model;
    enum ckpt_dtype dtype;

    if (!ckpt_dtype_is_castable(t->dtype) || s->opt->dtype_rule == CKPT_DTYPE_STORED)
        return t->dtype;
    if (s->opt->dtype_rule == CKPT_DTYPE_CAST)
        return s->opt->dtype;
    if (!s->base)
        return t->dtype;
    if (s->base->cat && (model = ckpt_catalog_find(s->base->cat, t->name)))
        return ckpt_dtype_is_castable(model->dtype) ? model->dtype : t->dtype;
    return config_dtype(s->base->config, &dtype) ? dtype : t->dtype;
}

static int cast_tensors(struct ckpt_view *v, bool *ret_any, struct ckpt_err *err)
{
    *ret_any = false;
    for (size_t i = 0; i < v->cat->tensors.len; i++) {
        enum ckpt_dtype want = wanted_dtype(v->shared, &v->cat->tensors.ptr[i]);
        if (want == v->cat->tensors.ptr[i].dtype)
            continue;
        *ret_any = true;
        if (ckpt_value_cast(v->cat, i, (int)want, err) < 0)
            return -1;
    }
    return 0;
}

/* The dtype of most floating elements: what transformers would call the model's. */
static const char *main_dtype(const struct ckpt_catalog *cat)
{
    uint64_t n[CKPT_NDTYPE] = {0};
    int best = -1;

    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_dtype_is_castable(cat->tensors.ptr[i].dtype))
            n[cat->tensors.ptr[i].dtype] += cat->tensors.ptr[i].numel;
    for (int t = 0; t < CKPT_NDTYPE; t++)
        if (n[t] && (best < 0 || n[t] > n[best]))
            best = t;
    return best < 0 ? NULL : ckpt_dtype_torch_name((enum ckpt_dtype)best);
}

/* transformers 5 reads "dtype", 4.x "torch_dtype"; a base's config keeps the one that it has. */
static int state_dtype(struct ckpt_view *v, struct ckpt_err *err)
{
    const char *name = main_dtype(v->cat);

    if (!v->config || !name)
        return 0;
    if (v->own_names) {
        /* a config without a dtype says float32 */
        bool old = json_object_get(v->config, "torch_dtype") != NULL;
        bool new =
            json_object_get(v->config, "dtype") != NULL || (!old && strcmp(name, "float32") != 0);
        if ((old && json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0) ||
            (new &&json_object_set_new(v->config, "dtype", json_string(name)) < 0))
            return ckpt_nomem(err);
        return 0;
    }
    if (json_object_set_new(v->config, "dtype", json_string(name)) < 0 ||
        json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* ---- the tree ---- */

static int64_t newest_shard(const struct ckpt_catalog *cat)
{
    int64_t newest = 0;

    for (size_t i = 0; i < cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(cat->sources.ptr[i], &id) && id.mtime_ns > newest)
            newest = id.mtime_ns;
    }
    return newest;
}

static int collect_sides(struct ckpt_view *v, const struct ckpt_reader *reader,
                         struct ckpt_sides *sides, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;

    if (s->opt->raw)
        return 0;
    if (reader->side_files &&
        ckpt_sides_add(sides, v->dir, reader->side_files,
                       is_hf(v->about) ? CKPT_SIDE_ALL : CKPT_SIDE_TOKENIZER, s->pool, err) < 0)
        return -1;
    return s->base ? ckpt_sides_add(sides, s->base->dir, "", CKPT_SIDE_TOKENIZER, s->pool, err) : 0;
}

/* The base's split, or the checkpoint's own if it is an HF directory; an explicit max_shard_size
 * beats both. */
static const json_t *weight_map(const struct ckpt_view *v)
{
    const struct ckpt_base *base = v->shared->base;
    const json_t *map = base && base->cat ? json_object_get(base->cat->about, "weight_map") : NULL;

    if (v->shared->opt->max_shard_size || v->shared->opt->raw)
        return NULL;
    return map ? map : json_object_get(v->about, "weight_map");
}

static int make_tree(struct ckpt_view *v, const struct ckpt_reader *reader, bool cast,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_sides_release) struct ckpt_sides sides = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *generation = NULL;
    struct ckpt_vtree_options opt = {
        .weight_map = weight_map(v),
        .max_shard_size = v->shared->opt->max_shard_size,
        .sort = !v->recipe && !v->own_names,
        .mtime_ns = newest_shard(v->cat),
    };

    if (collect_sides(v, reader, &sides, err) < 0)
        return -1;
    if (is_hf(v->about) && !cast && json_object_size(v->shared->opt->overrides) == 0) {
        /* its config.json passes through to the letter */
    } else if (v->config) {
        opt.config = v->config;
        ckpt_sides_remove(&sides, "config.json");
        if (!ckpt_sides_has(&sides, "generation_config.json") && !is_hf(v->about)) {
            if (ckpt_generation_config(v->config, &generation, err) < 0)
                return -1;
            opt.generation = generation;
        }
    }
    opt.side = sides.files.ptr;
    opt.nside = sides.files.len;
    if (sides.mtime_ns > opt.mtime_ns)
        opt.mtime_ns = sides.mtime_ns;
    if (ckpt_vtree_new(v->cat, &opt, &v->tree, err) < 0)
        return -1;
    (void)json_object_del(v->about, "weight_map"); /* large, and used up */
    return 0;
}

/* ---- identity ---- */

/* Same checkpoint, same options: same number, on every mount. */
static uint64_t generation_of(const struct ckpt_view *v, const char *step)
{
    uint64_t h = XXH3_64bits_withSeed(step, strlen(step), ckpt_options_hash(v->shared->opt));

    for (size_t i = 0; i < v->cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(v->cat->sources.ptr[i], &id)) {
            uint64_t part[3] = {id.size, (uint64_t)id.mtime_ns, (uint64_t)id.ctime_ns};
            h = XXH3_64bits_withSeed(part, sizeof part, h);
        }
    }
    return h;
}

static char *source_text(const struct ckpt_view *v, const char *step)
{
    const char *format = ckpt_json_str(v->about, "format"),
               *version = ckpt_json_str(v->about, "version");
    uint64_t number;
    char digits[32] = "";

    if (ckpt_json_u64(v->about, "step", &number))
        (void)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    const char *name = *digits ? digits : step;
    return ckpt_asprintf("%s%s%s%s%s", format ? format : "?", version ? " " : "",
                         version ? version : "", *name ? ", step " : "", name);
}

/* ---- open ---- */

/* Opening reads many headers in several threads; what that leaves in malloc's pools is not needed
 * again. */
static void give_back_memory(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

static int open_into(struct ckpt_view *v, const char *step, struct ckpt_err *err)
{
    const struct ckpt_options *opt = v->shared->opt;
    struct ckpt_reader_options ropt = {
        .pool = v->shared->pool, .log = &opt->log, .allow_partial = opt->allow_partial};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *src = NULL;
    const struct ckpt_reader *reader = ckpt_reader_probe(v->dir, err);
    bool cast;

    if (!reader || reader->load(v->dir, &ropt, &src, err) < 0 || make_model(v, &src, err) < 0)
        return -1;
    ckpt_catalog_shrink(v->cat);
    if (cast_tensors(v, &cast, err) < 0 || state_dtype(v, err) < 0 ||
        make_tree(v, reader, cast, err) < 0)
        return -1;
    v->generation = generation_of(v, step);
    v->source = source_text(v, step);
    return v->source ? 0 : ckpt_nomem(err);
}

int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         struct ckpt_view **ret, struct ckpt_err *err)
{
    struct ckpt_view *v = calloc(1, sizeof *v);

    if (!v)
        return ckpt_nomem(err);
    atomic_init(&v->refs, 1);
    atomic_fetch_add(&shared->refs, 1);
    v->shared = shared;
    v->dir = ckpt_dir_ref(dir);
    v->reading = (struct ckpt_reading){.slabs = shared->slabs, .stats = &shared->stats};
    if (open_into(v, step, err) < 0) {
        ckpt_view_release(v);
        return -1;
    }
    give_back_memory();
    *ret = v;
    return 0;
}
