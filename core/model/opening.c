/* SPDX-License-Identifier: Apache-2.0 */
/* From a directory to a view. */
#include "model/opening.h"

#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "format/writer.h"
#include "model/experts.h"
#include "model/state.h"
#include "tensor/fqn.h"

/* ---- what follows from the facts ---- */

const struct ckpt_type *ckpt_opening_type(const struct ckpt_opening *o)
{
    return ckpt_types_find(ckpt_recipes_types(o->shared->recipes),
                           ckpt_json_str(o->config, "model_type"));
}

const json_t *ckpt_opening_base_config(const struct ckpt_opening *o)
{
    const struct ckpt_base *base = o->shared->base;

    return base && base->config ? base->config : o->home.config;
}

const json_t *ckpt_opening_model_config(const struct ckpt_opening *o)
{
    const json_t *config = ckpt_opening_base_config(o);

    return o->corrected ? o->corrected : config ? config : o->cat->config;
}

const struct ckpt_type *ckpt_opening_hub_type(const struct ckpt_opening *o,
                                              const json_t **ret_config)
{
    *ret_config = o->cat->config ? o->cat->config : ckpt_opening_base_config(o);
    return ckpt_types_find(ckpt_recipes_types(o->shared->recipes),
                           ckpt_json_str(*ret_config, "model_type"));
}

int ckpt_opening_correct(const struct ckpt_opening *o, const json_t *config, json_t **ret,
                         struct ckpt_err *err)
{
    const char *key;
    json_t *value;

    if (!(*ret = json_deep_copy(config)))
        return ckpt_nomem(err);
    json_object_foreach(o->shared->opt->overrides, key, value) {
        if (key[0] != '_' && json_object_set_new(*ret, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

struct ckpt_recipe_options ckpt_opening_recipe_options(const struct ckpt_opening *o)
{
    const struct ckpt_options *opt = o->shared->opt;
    const bool own_names = o->decision.way == CKPT_WAY_MEMORY;

    return (struct ckpt_recipe_options){
        .format = own_names ? "transformers" : NULL,
        .base_config = own_names ? ckpt_opening_model_config(o) : ckpt_opening_base_config(o),
        .overrides = opt->overrides,
        .allow_partial = opt->allow_partial,
        .allow_missing = opt->missing == CKPT_LACKS_FROM_BASE || o->other_form,
        .allow_leftover = opt->allow_leftover,
        .layout_only = ckpt_state_is_moment(o->state),
    };
}

/* ---- reading ---- */

int ckpt_opening_begin(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (!(o->name = strdup(*o->step ? o->step : ckpt_dir_real_name(o->dir))))
        return ckpt_nomem(err);
    const struct ckpt_options *opt = o->shared->opt;
    if (!o->state)
        o->state = !opt->optimizer                   ? opt->state
                   : opt->output.writer->has_masters ? CKPT_STATE_WEIGHT
                                                     : CKPT_STATE_TRAINED;
    ckpt_dir_small_soon(o->dir);
    return (o->reader = ckpt_reader_probe(o->dir, err)) ? 0 : -1;
}

/* Find the config and the tokenizer that go with the weights, unless the reader has shown them. */
static int find_home(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;
    const bool has_own = o->facts.names == CKPT_NAMES_HUB && o->cat->config;

    if (o->shared->opt->raw || (base && base->config) || has_own || o->facts.is_adapter)
        return 0;
    struct ckpt_dir *const outer[] = {o->around ? o->around : o->above, o->around ? o->above : NULL,
                                      NULL};
    struct ckpt_dir *own = o->facts.home ? o->facts.home : o->dir;
    /* a published model's own folder was looked at by its reader */
    if (ckpt_home_find(o->facts.is_hub_dir ? outer[0] : own,
                       o->facts.is_hub_dir ? outer + 1 : outer, &o->home, err) < 0)
        return -1;
    if (o->home.other && !o->home.dir && !o->cat->config) /* else it may be what the reader read */
        ckpt_catalog_warn(o->cat, "'%s' is not a model's: it has no model_type, no architectures",
                          o->home.other);
    if (o->home.dir && json_object_set_new(o->cat->about, "config_from",
                                           json_string(ckpt_dir_path(o->home.dir))) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* Is the folder that is opened the one that the option part= has chosen (run/inner.h)? */
static bool is_folder_of_part(const struct ckpt_opening *o, const char *part)
{
    const char *path = ckpt_dir_path(o->dir);
    const size_t n = strlen(path), len = strlen(part);

    return n > len && path[n - len - 1] == '/' && strcmp(path + n - len, part) == 0;
}

/* Keep the tensors whose names begin with the option part=, without that beginning. */
static int keep_part(struct ckpt_opening *o, struct ckpt_err *err)
{
    const char *part = o->shared->opt->part;
    const size_t ntensor = o->cat->tensors.len;
    size_t len, nkept = 0;

    if (!part || is_folder_of_part(o, part))
        return 0;
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(o->cat);
    if (!name)
        return ckpt_nomem(err);
    len = strlen(part);
    len -= len && part[len - 1] == '.';
    for (size_t i = 0; i < ntensor; i++) {
        const bool is_below = strncmp(name[i], part, len) == 0 && name[i][len] == '.';
        name[i] = is_below ? name[i] + len + 1 : NULL;
        nkept += is_below;
    }
    if (!nkept)
        return ckpt_fail(err, CKPT_USAGE,
                         "part=%s is neither a folder of '%s' with a checkpoint, nor the beginning "
                         "of names such as '%s'",
                         part, ckpt_dir_path(o->dir), ntensor ? o->cat->tensors.ptr[0].name : "");
    if (nkept < ntensor)
        ckpt_catalog_note(o->cat, "left out: %zu tensors that are not below '%.*s'",
                          ntensor - nkept, (int)len, part);
    return ckpt_opening_rename(o, name, err);
}

struct ckpt_state_asked ckpt_opening_asked(const struct ckpt_opening *o)
{
    return (struct ckpt_state_asked){
        .state = o->state, .raw = o->shared->opt->raw, .path = ckpt_dir_path(o->dir)};
}

/* Keep what the reader has read, of which several models will be made. */
static int keep_read(struct ckpt_opening *o, struct ckpt_err *err)
{
    o->read = ckpt_steal(&o->cat);
    return ckpt_facts_copy(&o->facts, &o->read_facts) < 0 ? ckpt_nomem(err) : 0;
}

/* Choose the part that the options name, and find what goes with the weights. */
static int settle(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_options *opt = o->shared->opt;

    if (keep_part(o, err) < 0)
        return -1;
    if (!o->facts.files_at) {
        o->facts.files_at = o->reader->side_files;
        o->facts.files = CKPT_FILES_TOKENIZER;
    }
    if (find_home(o, err) < 0)
        return -1;
    const json_t *config = ckpt_opening_model_config(o);
    return config && ckpt_options_override(opt)
               ? ckpt_opening_correct(o, config, &o->corrected, err)
               : 0;
}

int ckpt_opening_read(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_options *opt = o->shared->opt;
    const struct ckpt_naming naming = ckpt_naming_of(ckpt_recipes_types(o->shared->recipes));
    const struct ckpt_reader_options ropt = {
        .pool = o->shared->pool,
        .log = &opt->log,
        .spill = o->shared->spill,
        .naming = &naming,
        .allow_partial = opt->allow_partial,
        .allow_mixed = opt->allow_mixed,
        .states = opt->raw || opt->optimizer || ckpt_state_is_asked(o->state) || o->lists_states,
        .raw = opt->raw,
        .variant = opt->variant,
        .name = o->name,
        .above = o->above,
        .base = o->shared->base ? o->shared->base->cat : NULL,
        .masters =
            opt->optimizer || (ckpt_state_is_asked(o->state)
                                   ? !ckpt_state_is_moment(o->state)
                                   : opt->dtype_rule == CKPT_DTYPE_CAST && opt->dtype == CKPT_F32),
    };

    if (opt->variant && !o->reader->has_variants)
        return ckpt_fail(err, CKPT_USAGE,
                         "variant= chooses among the weights of a Hugging Face directory, and this "
                         "is a checkpoint of %s",
                         o->reader->name);
    if (ckpt_catalog_new(&o->cat, err) < 0 ||
        o->reader->load(o->dir, &ropt, &o->facts, o->cat, err) < 0)
        return -1;
    if (!o->cat->about)
        return ckpt_nomem(err);
    if (o->lists_states)
        return 0;
    if (opt->optimizer && keep_read(o, err) < 0)
        return -1;
    const struct ckpt_state_asked asked = ckpt_opening_asked(o);
    return (o->read ? ckpt_state_make(&asked, o->read, &o->cat, &o->other_form, err)
                    : ckpt_state_choose(&asked, &o->cat, &o->other_form, err)) < 0 ||
                   settle(o, err) < 0
               ? -1
               : 0;
}

int ckpt_opening_begin_state(const struct ckpt_opening *of, const char *state,
                             struct ckpt_opening *ret, struct ckpt_err *err)
{
    ret->shared = of->shared;
    ret->dir = of->dir;
    ret->above = of->above;
    ret->around = of->around;
    ret->step = of->step;
    ret->state = state;
    ret->reader = of->reader;
    const struct ckpt_state_asked asked = ckpt_opening_asked(ret);
    if (!(ret->name = strdup(of->name)) || ckpt_facts_copy(&of->read_facts, &ret->facts) < 0)
        return ckpt_nomem(err);
    return ckpt_state_make(&asked, of->read, &ret->cat, &ret->other_form, err) < 0
               ? -1
               : settle(ret, err);
}

void ckpt_opening_release(struct ckpt_opening *o)
{
    ckpt_vtree_free(o->tree);
    ckpt_catalog_free(o->cat);
    ckpt_catalog_free(o->read);
    ckpt_catalog_free(o->adapter);
    ckpt_facts_release(&o->facts);
    ckpt_facts_release(&o->read_facts);
    json_decref(o->groups);
    ckpt_home_release(&o->home);
    json_decref(o->base_names);
    json_decref(o->corrected);
    json_decref(o->framework);
    json_decref(o->config);
    free(o->recipe);
    free(o->name);
}

/* ---- renaming ---- */

/* The tensor's name as it will be: `old` where the catalogue has it not, NULL: it is left out. */
static const char *new_name(const struct ckpt_opening *o, const char *const *name, const char *old)
{
    const struct ckpt_tensor *t = ckpt_catalog_find(o->cat, old);

    return t ? name[t - o->cat->tensors.ptr] : old;
}

static int rename_map(struct ckpt_opening *o, const char *const *name, struct ckpt_err *err)
{
    struct ckpt_weight_map **map = &o->facts.weight_map, *old = *map;
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *made = NULL;

    if (!old)
        return 0;
    if (ckpt_weight_map_new(&made, err) < 0)
        return -1;
    for (size_t i = 0; i < old->tensors.len; i++) {
        const struct ckpt_mapped *m = &old->tensors.ptr[i];
        const char *to = new_name(o, name, m->tensor);
        if (to && ckpt_weight_map_put(made, to, old->files.ptr[m->file], err) < 0)
            return -1;
    }
    ckpt_weight_map_unref(old);
    *map = ckpt_steal(&made);
    return 0;
}

static int rename_dtypes(struct ckpt_opening *o, const char *const *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *made = json_object();
    const char *old;
    json_t *dtype;

    json_object_foreach(o->facts.dtypes, old, dtype) {
        const char *to = new_name(o, name, old);
        if (to && json_object_set(made, to, dtype) < 0)
            return ckpt_nomem(err);
    }
    if (!made)
        return ckpt_nomem(err);
    json_decref(o->facts.dtypes);
    o->facts.dtypes = ckpt_steal(&made);
    return 0;
}

int ckpt_opening_rename(struct ckpt_opening *o, const char *const *name, struct ckpt_err *err)
{
    if (rename_map(o, name, err) < 0 || (o->facts.dtypes && rename_dtypes(o, name, err) < 0))
        return -1;
    o->renamed = true;
    return ckpt_catalog_select(o->cat, name, err);
}

/* ---- the readers' questions about names, answered by the facts about model types ---- */

static const struct ckpt_type *type_of(const void *types, const json_t *config)
{
    return ckpt_types_find(types, ckpt_json_str(config, "model_type"));
}

static int cmp(const void *types, const json_t *config, const char *a, const char *b)
{
    const struct ckpt_texts *order = &type_of(types, config)->order;

    return ckpt_order_cmp(order->text, order->n, a, b);
}

size_t ckpt_name_before(const char *name, const char *tail)
{
    if (!ckpt_has_suffix(name, tail))
        return SIZE_MAX;
    size_t len = strlen(name) - strlen(tail);
    return len == 0 || name[len - 1] == '.' ? len : SIZE_MAX;
}

static bool may_lack(const void *types, const json_t *config, const char *name)
{
    const struct ckpt_type *type = type_of(types, config);

    for (size_t i = 0; i < type->output.n; i++)
        if (ckpt_name_before(name, type->output.text[i]) != SIZE_MAX)
            return true;
    return ckpt_texts_end(&type->absent, name);
}

static bool is_converted(const void *types, const json_t *config, const char *name)
{
    const struct ckpt_type *type = type_of(types, config);

    return type->converted && ckpt_experts_is_fused(type, name);
}

struct ckpt_naming ckpt_naming_of(const struct ckpt_types *types)
{
    return (struct ckpt_naming){
        .ctx = types, .cmp = cmp, .may_lack = may_lack, .is_converted = is_converted};
}
