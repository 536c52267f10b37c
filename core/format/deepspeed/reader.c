/* SPDX-License-Identifier: Apache-2.0 */
/* DeepSpeed's checkpoints: a tag's folder, and the folder above it where that is one checkpoint.
 *
 *     RUN/latest, RUN/TAG/...         the engine's own: a folder of tags, each a checkpoint
 *     checkpoint-N/latest, TAG/...    HF Trainer: with a config, and perhaps the model itself,
 * beside DIR/latest, pytorch_model/...   accelerate's save_state
 *
 * Where the trainer itself wrote the model beside its tag, those files are the model as it lies;
 * the tag has the F32 masters and the optimizer's states. */
#include <string.h>

#include "base/str.h"
#include "container/torch_file.h"
#include "format/deepspeed/load.h"
#include "format/groups.h"
#include "format/reader.h"
#include "format/states.h"

#define ACCELERATE "pytorch_model"
#define UNIVERSAL_GROUPS "zero/optimizer_state.pt"

enum place {
    NOWHERE,
    TAG,      /* the directory is itself a tag */
    ABOVE,    /* the directory is the folder of one checkpoint, whose tag `latest` names */
    DANGLING, /* there are tags in the directory, but `latest` names none of them */
};

/* ---- places ---- */

static bool is_tag_below(struct ckpt_dir *dir, const char *name)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = ckpt_reader_folder(dir, name);

    return below && ckpt_ds_is_tag(below);
}

/* Find the last tag below dir; new, or NULL. */
static char *any_tag(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;
    const char *tag = NULL;

    (void)ckpt_entries_read(dir, &entries, NULL);
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_DIR && is_tag_below(dir, e.name))
            tag = e.name;
    return tag ? strdup(tag) : NULL;
}

/* Is the folder one checkpoint: are files of the model or of the training beside the tag? */
static bool is_one_checkpoint(struct ckpt_dir *dir, const char *latest)
{
    static const char *const files[] = {"config.json", "adapter_config.json", "trainer_state.json"};

    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        if (ckpt_dir_has_file(dir, files[i]))
            return true;
    return ckpt_has_prefix(latest, ACCELERATE);
}

/* Find the tag. *ret_tag is new: its name below dir; NULL unless the result is ABOVE. */
static enum place find_place(struct ckpt_dir *dir, char **ret_tag)
{
    ckpt_cleanup(ckpt_freep) char *latest = NULL, *tag = NULL;

    *ret_tag = NULL;
    if (ckpt_ds_is_tag(dir))
        return TAG;
    if (!ckpt_dir_has_file(dir, "latest") && !ckpt_dir_has_file(dir, "latest_universal"))
        return NOWHERE;
    if (!(latest = ckpt_ds_latest(dir)) || !is_tag_below(dir, latest))
        return (tag = any_tag(dir)) ? DANGLING : NOWHERE;
    if (!is_one_checkpoint(dir, latest))
        return NOWHERE;
    *ret_tag = ckpt_steal(&latest);
    return ABOVE;
}

static int refuse_latest(struct ckpt_dir *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *latest = ckpt_ds_latest(dir), *tag = any_tag(dir);

    return ckpt_fail(err, CKPT_MISSING,
                     "'%s/latest' names %s%s%s, which is no checkpoint below it: '%s' is one, and "
                     "can be opened by itself",
                     ckpt_dir_path(dir), latest ? "'" : "", latest ? latest : "no folder",
                     latest ? "'" : "", tag ? tag : "?");
}

static enum ckpt_evidence ds_probe(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_freep) char *tag = NULL;

    return find_place(dir, &tag) == NOWHERE ? CKPT_NOT_MINE : CKPT_BY_MAGIC;
}

/* ---- load ---- */

/* Find the reader of the model that the trainer wrote beside its tag; NULL: there is none. */
static const struct ckpt_reader *model_beside(struct ckpt_dir *dir)
{
    static const struct ckpt_reader *const readers[] = {&ckpt_reader_hf, &ckpt_reader_peft,
                                                        &ckpt_reader_rank_files};

    for (size_t i = 0; i < sizeof readers / sizeof readers[0]; i++)
        if (readers[i]->probe(dir) != CKPT_NOT_MINE)
            return readers[i];
    return NULL;
}

/* Has the model beside the tag no values: no tensors, or tensors without elements, which stage 3 of
 * ZeRO leaves where a trainer saves a model that it has not gathered? */
static bool is_hollow(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (cat->tensors.ptr[i].numel == 0 && ckpt_dtype_is_castable(cat->tensors.ptr[i].dtype))
            return true;
    return cat->tensors.len == 0;
}

/* Does the folder of the checkpoint have the model itself, with its values? *ret is then its
 * reader, else NULL; *ret_hollow tells of a model without values. The files are read twice; only
 * their headers count. */
static int find_model(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                      const struct ckpt_reader **ret, bool *ret_hollow, struct ckpt_err *err)
{
    const struct ckpt_reader *beside = model_beside(dir);
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts facts = {0};

    *ret = beside;
    if (!beside || beside == &ckpt_reader_peft)
        return 0;
    if (ckpt_catalog_new(&cat, err) < 0 || beside->load(dir, opt, &facts, cat, err) < 0)
        return -1;
    if ((*ret_hollow = is_hollow(cat)))
        *ret = NULL;
    return 0;
}

/* State that the weights which were read are masters: those of an optimizer's file, or the file
 * fp32.pt of a universal checkpoint. */
static int label_masters(struct ckpt_catalog *cat, struct ckpt_err *err)
{
    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        const struct ckpt_state state = {"master", t->name, t->name};
        if (t->state || !t->npiece)
            continue;
        ckpt_cleanup(ckpt_freep) char *file =
            ckpt_source_name(cat->sources.ptr[t->piece[0].source]);
        if ((ckpt_has_suffix(file, "_optim_states.pt") || ckpt_has_suffix(file, "fp32.pt")) &&
            ckpt_catalog_set_state(cat, i, &state, err) < 0)
            return -1;
    }
    return 0;
}

static int load_tag(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_tag_release) struct ckpt_ds_tag tag = {0};
    const struct ckpt_ds_job job = {.dir = dir, .tag = &tag, .opt = opt, .cat = cat};

    if (ckpt_ds_tag_read(dir, &tag, err) < 0 || ckpt_ds_load(&job, err) < 0)
        return -1;
    const bool states = tag.universal || ckpt_ds_tag_count(&tag, CKPT_DS_OPTIM, NULL);
    ckpt_json_set(&cat->about, "format", json_string("deepspeed"));
    ckpt_json_set(&cat->about, "optimizer", json_boolean(states));
    if (!opt->states)
        return 0;
    return ckpt_states_label(cat, ckpt_state_parse_torch, err) < 0 ? -1 : label_masters(cat, err);
}

static int ds_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                   struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
    ckpt_cleanup(ckpt_freep) char *tag = NULL;
    const enum place place = find_place(dir, &tag);
    const struct ckpt_reader *beside = NULL;
    bool hollow = false;

    if (place != TAG && !opt->masters && !opt->states &&
        find_model(dir, opt, &beside, &hollow, err) < 0)
        return -1;
    if (beside)
        return beside->load(dir, opt, facts, cat, err);
    if (place == DANGLING)
        return refuse_latest(dir, err);
    if (ckpt_dir_open_below(dir, place == ABOVE ? tag : ".", &below, err) < 0 ||
        load_tag(below, opt, cat, err) < 0)
        return -1;
    if (hollow)
        ckpt_catalog_note(cat,
                          "the model's files in '%s' have placeholders without values: the model "
                          "is read from '%s' below it",
                          ckpt_dir_path(dir), tag ? tag : ".");
    return 0;
}

/* The values besides tensors in the model's first file. */
static int ds_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_tag_release) struct ckpt_ds_tag files = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
    ckpt_cleanup(ckpt_freep) char *tag = NULL;
    const enum place place = find_place(dir, &tag);

    if (place == DANGLING)
        return refuse_latest(dir, err);
    if (ckpt_dir_open_below(dir, place == ABOVE ? tag : ".", &below, err) < 0 ||
        ckpt_ds_tag_read(below, &files, err) < 0)
        return -1;
    const struct ckpt_ds_entry *e = ckpt_ds_tag_find(&files, CKPT_DS_MODEL, 0, 0);
    if (!e)
        e = ckpt_ds_tag_find(&files, CKPT_DS_ZERO3_MODEL, 0, 0);
    return e ? ckpt_torch_objects_of(below, e->name, opt->pool, "", out, err) : 0;
}

/* The names of the parameters in group i, in the model's first file; new, or NULL. */
static json_t *names_of_group(const json_t *objects, size_t i)
{
    ckpt_cleanup(ckpt_freep) char *prefix = ckpt_asprintf("param_shapes.%zu.", i);
    json_t *list = json_array(), *shape;
    const char *name;

    json_object_foreach((json_t *)objects, name, shape)
        if (prefix && ckpt_has_prefix(name, prefix))
            ckpt_json_append(&list, json_string(name + strlen(prefix)));
    return list;
}

/* Give the group of a universal checkpoint its step, which lies beside its parameters: they are one
 * flat tensor for DeepSpeed, and so their steps are one. A step of 0 in a group is FusedAdam's. */
static int add_step(struct ckpt_dir *tag, const struct ckpt_reader_options *opt, json_t *group,
                    struct ckpt_err *err)
{
    const char *name = json_string_value(json_array_get(json_object_get(group, "params"), 0));
    ckpt_cleanup(ckpt_freep) char *file = name ? ckpt_asprintf("zero/%s/step.pt", name) : NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *step = NULL;
    const double said = json_number_value(json_object_get(group, "step"));

    if (name && !file)
        return ckpt_nomem(err);
    if (!file || !ckpt_dir_has_file(tag, file))
        return 0;
    if (ckpt_groups_step_of_file(tag, file, opt->pool, &step, err) < 0)
        return -1;
    if (said != 0 && said != json_number_value(step))
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': " UNIVERSAL_GROUPS " says that the optimizer took %g steps, '%s' "
                         "says %g: files of two saves",
                         ckpt_dir_path(tag), said, file, json_number_value(step));
    return json_object_set(group, "step", step) < 0 ? ckpt_nomem(err) : 0;
}

static int ds_groups(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                     const json_t *objects, json_t *out, struct ckpt_err *err)
{
    static const char universal[] = UNIVERSAL_GROUPS;
    ckpt_cleanup(ckpt_ds_tag_release) struct ckpt_ds_tag files = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;
    ckpt_cleanup(ckpt_freep) char *tag = NULL;
    const enum place place = find_place(dir, &tag);
    json_t *group;
    size_t i;

    if (place == DANGLING)
        return refuse_latest(dir, err);
    if (ckpt_dir_open_below(dir, place == ABOVE ? tag : ".", &below, err) < 0 ||
        ckpt_ds_tag_read(below, &files, err) < 0)
        return -1;
    const struct ckpt_ds_entry *e = ckpt_ds_tag_find(&files, CKPT_DS_OPTIM, 0, 0);
    const char *file = e ? e->name : ckpt_dir_has_file(below, universal) ? universal : NULL;
    if ((file ? ckpt_groups_of_file(below, file, opt->pool, out, err)
              : ckpt_groups_of_torch(objects, out, err)) < 0)
        return -1;
    json_array_foreach(out, i, group) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *names = names_of_group(objects, i);
        if (!names || (json_array_size(names) && json_object_set(group, "params", names) < 0))
            return ckpt_nomem(err);
        if (file == universal && add_step(below, opt, group, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- folders of tags ---- */

/* Split a name such as "global_step12" into the number and the length of the part before it. */
static bool split_number(const char *name, size_t *ret_prefix, unsigned long long *ret)
{
    size_t n = strlen(name);

    while (n && name[n - 1] >= '0' && name[n - 1] <= '9')
        n--;
    *ret_prefix = n;
    return ckpt_parse_u64(name + n, strlen(name) - n, ret);
}

/* The engine writes `latest` when all ranks have written their files, so a tag with a higher number
 * may be unfinished. A universal checkpoint gets its model files last. */
static bool ds_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    ckpt_cleanup(ckpt_ds_tag_release) struct ckpt_ds_tag tag = {0};
    unsigned long long step, last;
    size_t prefix, last_prefix;

    if (!ckpt_ds_is_tag(dir))
        return true; /* its own `latest` names a tag */
    if (ckpt_ds_tag_read(dir, &tag, NULL) < 0)
        return false;
    if (tag.universal)
        return tag.files.len > 0;
    if (!latest || !split_number(name, &prefix, &step) ||
        !split_number(latest, &last_prefix, &last) || prefix != last_prefix ||
        strncmp(name, latest, prefix) != 0)
        return true;
    return step <= last;
}

static const char *const markers[] = {"latest", "latest_universal", NULL};
static const char *const rewrites[] = {"latest", "mp_rank_00_model_states.pt",
                                       "zero_pp_rank_0_mp_rank_00_model_states.pt", NULL};
static const char *const tools[] = {"zero_to_fp32.py", "zero_to_torch.py", NULL};
static const char *const step_names[] = {"global_step*", NULL};

const struct ckpt_reader ckpt_reader_deepspeed = {
    .name = "deepspeed",
    .markers = markers,
    .rewrites = rewrites,
    .probe = ds_probe,
    .load = ds_load,
    .objects = ds_objects,
    .groups = ds_groups,
    .latest = ckpt_ds_latest,
    .finished = ds_finished,
    .tools = tools,
    .step_names = step_names,
    .side_files = "",
};
