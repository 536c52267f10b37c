/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out the layers of the model that OLMo-core's config.json describes. */
#include "format/olmo_core/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "container/config.h"

#define FILE_NAME "config.json"

enum { MAX_LAYERS = 65536 };

struct reading {
    const struct ckpt_dir *dir;
    const json_t *model;
    uint64_t nlayer;
};

static int fail(const struct reading *r, const char *what, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "'%s/" FILE_NAME "': %s", ckpt_dir_path(r->dir), what);
}

/* ---- which block a layer is ---- */

/* Returns the part of a block that attends, or mixes tokens otherwise; before 2026 the member was
 * called attention. */
static json_t *mixer_of(const json_t *block)
{
    json_t *mixer = json_object_get(block, "sequence_mixer");

    return json_is_object(mixer) ? mixer : json_object_get(block, "attention");
}

/* The block of layer i; NULL: the config does not say it. */
static const json_t *block_of(const struct reading *r, uint64_t i)
{
    const json_t *block = json_object_get(r->model, "block");
    const json_t *pattern = json_object_get(r->model, "block_pattern");
    char key[24];

    if (json_array_size(pattern) > 0) {
        const char *name = json_string_value(json_array_get(pattern, i % json_array_size(pattern)));
        return name ? json_object_get(block, name) : NULL;
    }
    (void)snprintf(key, sizeof key, "%" PRIu64, i);
    const json_t *own = json_object_get(json_object_get(r->model, "block_overrides"), key);
    return json_is_object(own) ? own : block;
}

/* How far layer i attends: a positive number, or -1 for everything. False: the config's pattern of
 * windows is none. */
static bool window_of(const struct reading *r, const json_t *mixer, uint64_t i, int64_t *ret)
{
    const json_t *windows = json_object_get(mixer, "sliding_window");
    const json_t *pattern = json_object_get(windows, "pattern");
    const bool first = ckpt_json_bool(windows, "force_full_attention_on_first_layer", true);
    const bool last = ckpt_json_bool(windows, "force_full_attention_on_last_layer", true);

    *ret = -1;
    if (!json_is_object(windows) || (first && i == 0) || (last && i + 1 == r->nlayer))
        return true;
    if (json_array_size(pattern) == 0)
        return false;
    const json_t *size = json_array_get(pattern, (i - first) % json_array_size(pattern));
    *ret = json_integer_value(size);
    return json_is_integer(size) && (*ret > 0 || *ret == -1);
}

/* ---- how layers differ ---- */

/* A copy of a block without what says nothing about its tensors and values, or is compared by
 * itself: windows, rotary embeddings, and the library that computes the attention. */
static json_t *comparable(const json_t *block)
{
    static const char *const apart[] = {"rope", "sliding_window", "backend", "use_flash"};
    json_t *copy = json_deep_copy(block);
    json_t *mixer = mixer_of(copy);

    for (size_t i = 0; i < sizeof apart / sizeof apart[0]; i++)
        (void)json_object_del(mixer, apart[i]);
    return copy;
}

struct layers {
    json_t *first, *windows;
    const json_t *window_rope, *full_rope;
    bool differ;
};

static void layers_release(struct layers *l)
{
    json_decref(l->first);
    json_decref(l->windows);
}

/* Note the rotary embedding of a layer; those of layers with a window, and of the others, are the
 * same each. */
static void add_rope(struct layers *l, const json_t *rope, bool window)
{
    const json_t **to = window ? &l->window_rope : &l->full_rope;

    if (!rope)
        rope = json_null();
    l->differ |= *to && !json_equal(*to, rope);
    *to = *to ? *to : rope;
}

static int add_layer(const struct reading *r, uint64_t i, struct layers *l, struct ckpt_err *err)
{
    const json_t *block = block_of(r, i), *mixer = mixer_of(block);
    int64_t window;

    if (!json_is_object(block) || !json_is_object(mixer))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s/" FILE_NAME "': model.block does not say what layer %" PRIu64
                         " of %" PRIu64 " is: it needs an object with sequence_mixer, or a name "
                         "for it in model.block_pattern",
                         ckpt_dir_path(r->dir), i, r->nlayer);
    if (!window_of(r, mixer, i, &window))
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s/" FILE_NAME "': the pattern of sliding_window has no size for layer "
                         "%" PRIu64 ": expected positive numbers and -1",
                         ckpt_dir_path(r->dir), i);
    ckpt_cleanup(ckpt_json_decrefp) json_t *own = comparable(block);
    if (!own)
        return ckpt_nomem(err);
    if (!l->first)
        l->first = json_incref(own);
    l->differ |= !json_equal(l->first, own);
    add_rope(l, json_object_get(mixer, "rope"), window > 0);
    ckpt_json_append(&l->windows, json_integer(window));
    return 0;
}

/* ---- the whole ---- */

static void take(json_t **to, const char *key, const json_t *value)
{
    if (value && !json_is_null(value))
        ckpt_json_set(to, key, json_deep_copy(value));
}

static int lay_out(const struct reading *r, json_t **to, struct ckpt_err *err)
{
    ckpt_cleanup(layers_release) struct layers l = {.windows = json_array()};

    for (uint64_t i = 0; i < r->nlayer; i++)
        if (add_layer(r, i, &l, err) < 0)
            return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *block = json_deep_copy(block_of(r, 0));
    take(&block, "sequence_mixer", mixer_of(block));
    ckpt_json_set(to, "block", ckpt_steal(&block));
    ckpt_json_set(to, "windows", ckpt_steal(&l.windows));
    take(to, "window_rope", l.window_rope);
    take(to, "full_rope", l.full_rope);
    ckpt_json_set(to, "layers_differ", json_boolean(l.differ));
    return 0;
}

int ckpt_olmo_config_read(const struct ckpt_dir *dir, json_t **ret, struct ckpt_err *err)
{
    static const char *const lengths[] = {"dataset.sequence_length", "data_loader.sequence_length",
                                          "train_module.max_sequence_length"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *file = NULL, *to = NULL;
    struct reading r = {.dir = dir};

    if (ckpt_config_read_if(dir, FILE_NAME, CKPT_CONFIG_MAX_BYTES, &file, err) < 0)
        return -1;
    if (!file)
        return 0;
    r.model = json_object_get(file, "model");
    if (!json_is_object(r.model))
        return fail(&r, "it has no object 'model', so it is not OLMo-core's", err);
    if (!ckpt_json_u64(r.model, "n_layers", &r.nlayer) || r.nlayer == 0 || r.nlayer > MAX_LAYERS)
        return fail(&r, "model.n_layers is not a number of layers", err);
    to = json_deep_copy(r.model);
    if (lay_out(&r, &to, err) < 0)
        return -1;
    take(&to, "tokenizer", ckpt_json_at(file, "dataset.tokenizer"));
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        if (!json_object_get(to, "sequence_length"))
            take(&to, "sequence_length", ckpt_json_at(file, lengths[i]));
    *ret = ckpt_steal(&to);
    return *ret ? 0 : ckpt_nomem(err);
}
