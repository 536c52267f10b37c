/* SPDX-License-Identifier: Apache-2.0 */
/* Orbax, in which programs of JAX save: a step's folder with one folder for each item that was
 * saved, or with the one item itself.
 *
 *     _CHECKPOINT_METADATA      of the step; commit_timestamp_nsecs is set when it is finished
 *     commit_success.txt        likewise, where folders can't be renamed
 *     items/_METADATA           the item's tree: names, types
 *     items/manifest.ocdbt      a database of its arrays (container/ocdbt.h), with d/...,
 *     items/ocdbt.process_0/    and what each process wrote of it
 *     items/NAME/zarr.json      or each array in files of its own
 *
 * MaxText saves the state of its training as one item:
 *
 *     params.params.decoder...  the weights; without one `params` or with `base` by its newer
 *                               classes (NNX), which also end names with `value`
 *     opt_state.0.mu...         the optimizer's (optax) */
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"
#include "container/config.h"
#include "container/ocdbt.h"
#include "format/orbax/load.h"
#include "format/states.h"

#define STEP "_CHECKPOINT_METADATA"
#define COMMITTED "commit_success.txt"
#define SHARDING "_sharding" /* of an item: how arrays lay on devices, which nobody needs here */
#define STRINGS "_strings.json"

enum { STEP_BYTES = 16 << 20 }; /* at most, of _CHECKPOINT_METADATA */

/* Folders of the item with the model, in the order of preference; the first is MaxText's. */
static const char *const items[] = {"", "items", "default", "state", "params", NULL};

static bool is_item(const struct ckpt_dir *dir) { return ckpt_dir_has_file(dir, CKPT_ORBAX_TREE); }

/* The item of a step with a usual name; new. NULL: there is none. */
static struct ckpt_dir *find_usual(struct ckpt_dir *dir)
{
    for (size_t i = 0; items[i]; i++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *item = ckpt_reader_folder(dir, items[i]);
        if (item && is_item(item))
            return ckpt_steal(&item);
    }
    return NULL;
}

static enum ckpt_evidence orbax_probe(struct ckpt_dir *dir)
{
    return ckpt_dir_has_file(dir, STEP) || ckpt_dir_has_file(dir, CKPT_OCDBT_MANIFEST) ||
                   (is_item(dir) && ckpt_dir_has_file(dir, SHARDING))
               ? CKPT_BY_MAGIC
               : CKPT_NOT_MINE;
}

/* ---- which item ---- */

/* List the folders of a step that are items. */
static int list_items(struct ckpt_dir *dir, struct ckpt_str *out, size_t *ret_n, char **ret_first,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    *ret_n = 0;
    if (ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *item =
            e.kind == CKPT_ENTRY_DIR ? ckpt_reader_folder(dir, e.name) : NULL;
        if (!item || !is_item(item))
            continue;
        if ((*ret_n)++ == 0 && !(*ret_first = strdup(e.name)))
            return ckpt_nomem(err);
        ckpt_str_printf(out, "%s'%s'", *ret_n > 1 ? ", " : "", e.name);
    }
    return out->failed ? ckpt_nomem(err) : 0;
}

/* Find the item: the one with a usual name, else the only one; *ret, which is new, is NULL if there
 * is none. *ret_n and `names` are the items of the step. */
static int find_item(struct ckpt_dir *dir, struct ckpt_str *names, size_t *ret_n,
                     struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *first = NULL;

    *ret = NULL;
    if (list_items(dir, names, ret_n, &first, err) < 0)
        return -1;
    *ret = find_usual(dir);
    if (!*ret && *ret_n == 1 && !(*ret = ckpt_reader_folder(dir, first)))
        return ckpt_dir_trouble(dir, err);
    return 0;
}

static int open_item(struct ckpt_dir *dir, struct ckpt_catalog *cat, struct ckpt_dir **ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    size_t n;

    if (find_item(dir, &names, &n, ret, err) < 0)
        return -1;
    if (*ret && n > 1)
        ckpt_catalog_warn(cat, "the step has several items (%s): '%s' is shown",
                          ckpt_str_get(&names), ckpt_dir_path(*ret));
    if (*ret)
        return 0;
    return n ? ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' has several items (%s), of which none has a usual name: give the "
                         "folder of one of them",
                         ckpt_dir_path(dir), ckpt_str_get(&names))
             : ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is Orbax's (it has " STEP " or " CKPT_OCDBT_MANIFEST
                         "), but has no item with a " CKPT_ORBAX_TREE
                         ", which lists arrays: it holds none, or is a part of a checkpoint, or an "
                         "old version of Orbax wrote it, whose files are not read (restore it with "
                         "orbax.checkpoint, and save it again)",
                         ckpt_dir_path(dir));
}

/* ---- optimizer states ---- */

/* opt_state.0.mu.params.PARAMETER, as optax's Adam has it. */
static bool parse_state_as_stored(const char *name, struct ckpt_state_name *ret)
{
    static const struct {
        const char *part, *kind;
    } kinds[] = {{".mu.", "exp_avg"}, {".nu.", "exp_avg_sq"}};

    if (!ckpt_has_prefix(name, "opt_state."))
        return false;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const char *at = strstr(name, kinds[i].part);
        if (!at)
            continue;
        const char *parameter = at + strlen(kinds[i].part);
        while (ckpt_take_text(&parameter, "params.") || ckpt_take_text(&parameter, "base."))
            ;
        *ret = (struct ckpt_state_name){.root = name,
                                        .parameter = parameter,
                                        .parameter_len = strlen(parameter),
                                        .kind = kinds[i].kind,
                                        .kind_len = strlen(kinds[i].kind)};
        return *parameter != '\0';
    }
    return false;
}

/* Likewise, without the `value` at its end, which weights' names lack (model_name). */
static bool parse_state(const char *name, struct ckpt_state_name *ret)
{
    static const char value[] = ".value";

    if (!parse_state_as_stored(name, ret))
        return false;
    if (ckpt_has_suffix(ret->parameter, value))
        ret->parameter_len -= strlen(value);
    return ret->parameter_len > 0;
}

/* ---- names ---- */

struct naming {
    bool raw;        /* all arrays, under the names by which they are stored */
    bool states;     /* weights, and what the optimizer has of them */
    bool has_params; /* the weights are what is below `params` */
};

/* Parts of a training's state that are no weights, where these have no folder of their own. */
static const char *const no_weights[] = {"opt_state", "optimizer", "step", "dropout", "rngs", NULL};

static bool is_random(const char *key)
{
    return strcmp(key, "rngs") == 0 || ckpt_has_suffix(key, "_rngs");
}

/* A weight's name as recipes know it: without the folders around all weights, and without the
 * `value` at its end; the number of a list's entry belongs to the list's name. */
static const char *model_name(const struct ckpt_orbax_leaf *leaf, struct ckpt_str *buf)
{
    const size_t n = json_array_size(leaf->path);
    bool inside = false, number;

    for (size_t i = 0; i < n; i++) {
        const char *key = ckpt_orbax_key(leaf, i, &number);
        if (!key)
            return leaf->name;
        if (!inside && i + 1 < n && (strcmp(key, "params") == 0 || strcmp(key, "base") == 0))
            continue;
        if (is_random(key))
            return NULL;
        if (i + 1 == n && inside && strcmp(key, "value") == 0)
            break;
        if (inside)
            ckpt_str_putc(buf, number ? '_' : '.');
        ckpt_str_puts(buf, key);
        inside = true;
    }
    return ckpt_str_get(buf);
}

static const char *name_of(void *ctx, const struct ckpt_orbax_leaf *leaf, struct ckpt_str *buf)
{
    const struct naming *n = ctx;
    bool number;
    const char *top = ckpt_orbax_key(leaf, 0, &number);

    struct ckpt_state_name state;

    if (n->raw || !top || (n->states && parse_state(leaf->name, &state)))
        return leaf->name;
    if (n->has_params ? strcmp(top, "params") != 0 : ckpt_one_of(top, no_weights))
        return NULL;
    return model_name(leaf, buf);
}

static bool has_params(const struct ckpt_orbax_tree *tree)
{
    bool number;

    for (size_t i = 0; i < tree->leaves.len; i++) {
        const char *top = ckpt_orbax_key(&tree->leaves.ptr[i], 0, &number);
        if (top && strcmp(top, "params") == 0)
            return true;
    }
    return false;
}

/* ---- the reader ---- */

static void describe(const struct ckpt_reader_options *opt, struct ckpt_catalog *cat)
{
    const char *name = opt->name ? opt->name : "";
    unsigned long long step;

    if (ckpt_parse_u64(name, strlen(name), &step))
        ckpt_json_set(&cat->about, "step", json_integer((json_int_t)step));
    ckpt_json_set(&cat->about, "format", json_string("orbax"));
}

static int orbax_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                      struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_orbax_tree_release) struct ckpt_orbax_tree tree = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *item = NULL;

    facts->own_names = true;
    if (open_item(dir, cat, &item, err) < 0 || ckpt_orbax_tree_read(item, &tree, err) < 0)
        return -1;
    struct naming naming = {opt->raw, opt->states, has_params(&tree)};
    if (ckpt_orbax_arrays(item, &tree, opt, name_of, &naming, cat, err) < 0 ||
        (opt->states &&
         ckpt_states_label(cat, opt->raw ? parse_state_as_stored : parse_state, err) < 0))
        return -1;
    describe(opt, cat);
    return 0;
}

static int orbax_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *item = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *strings = NULL;
    size_t n;

    (void)opt;
    if (find_item(dir, &names, &n, &item, err) < 0)
        return -1;
    if (!item)
        return 0;
    if (ckpt_config_read_if(item, STRINGS, STEP_BYTES, &strings, err) < 0)
        return -1;
    return !strings || json_object_update(out, strings) == 0 ? 0 : ckpt_nomem(err);
}

static int orbax_paths(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_orbax_tree_release) struct ckpt_orbax_tree tree = {0};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *item = NULL;
    size_t n;

    (void)opt;
    if (find_item(dir, &names, &n, &item, err) < 0)
        return -1;
    if (!item)
        return 0;
    if (ckpt_orbax_tree_read(item, &tree, err) < 0)
        return -1;
    for (size_t i = 0; i < tree.leaves.len; i++) {
        const struct ckpt_orbax_leaf *leaf = &tree.leaves.ptr[i];
        json_t *path = json_array();
        for (size_t k = 0; k < json_array_size(leaf->path); k++)
            ckpt_json_append(&path,
                             json_incref(json_object_get(json_array_get(leaf->path, k), "key")));
        ckpt_json_set(&out, leaf->name, path);
        if (!out)
            return ckpt_nomem(err);
    }
    return 0;
}

/* A step is finished when its metadata have the time of that, or its folder the mark of stores that
 * can't rename folders. Others rename the folder at the end (ckpt_reader_is_staging). */
static bool orbax_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *step = NULL;
    uint64_t ns;

    (void)name;
    (void)latest;
    if (ckpt_dir_has_file(dir, COMMITTED))
        return true;
    return ckpt_config_read_if(dir, STEP, STEP_BYTES, &step, NULL) == 0 &&
           (!step || ckpt_json_u64(step, "commit_timestamp_nsecs", &ns));
}

static const char *const markers[] = {STEP, COMMITTED, NULL};
static const char *const rewrites[] = {STEP, COMMITTED, CKPT_ORBAX_TREE, CKPT_OCDBT_MANIFEST, NULL};
static const char *const inner_runs[] = {"checkpoints", NULL}; /* MaxText's */

const struct ckpt_reader ckpt_reader_orbax = {
    .name = "orbax",
    .markers = markers,
    .rewrites = rewrites,
    .inner_runs = inner_runs,
    .probe = orbax_probe,
    .load = orbax_load,
    .objects = orbax_objects,
    .paths = orbax_paths,
    .finished = orbax_finished,
    .side_files = "",
};
