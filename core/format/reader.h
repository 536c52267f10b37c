/* SPDX-License-Identifier: Apache-2.0 */
/* A reader turns a directory of one checkpoint format into a catalogue. Readers know about files
 * and directories, not about models. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "base/str.h"
#include "container/weight_map.h"
#include "io/dir.h"
#include "io/source.h"
#include "io/spill.h"
#include "tensor/catalog.h"

/* How certain a probe is. Common names are names that users also give to their own files. */
enum ckpt_evidence {
    CKPT_NOT_MINE = 0,
    CKPT_BY_COMMON_NAMES,
    CKPT_BY_NAMES,
    CKPT_BY_MAGIC,
};

/* Questions about a model's names, which readers ask because they do not know models. `config` is
 * the model's config, or NULL. */
struct ckpt_naming {
    const void *ctx;
    /* Compares like strcmp, by the order of the model's state dict. */
    int (*cmp)(const void *ctx, const json_t *config, const char *a, const char *b);
    /* May a save lack this tensor although a list of the model's tensors has it? */
    bool (*may_lack)(const void *ctx, const json_t *config, const char *name);
    /* Does transformers convert the tensor (of fused experts) when it loads the model? */
    bool (*is_converted)(const void *ctx, const json_t *config, const char *name);
};

struct ckpt_reader_options {
    struct ckpt_fdpool *pool;
    const struct ckpt_log *log;
    struct ckpt_spill *spill; /* for what is decoded; NULL: that is kept in memory */
    /* NULL: names are in natural order, and no tensor of a list may be missing */
    const struct ckpt_naming *naming;
    bool allow_partial; /* leave incomplete tensors out, with a warning for each, instead of failing
                         */
    bool allow_mixed;   /* of copies of a tensor that differ take the first one, with a warning,
                           instead   of failing */
    bool states;  /* also read the optimizers' tensors, if the format says which parameters they
                     belong to (for raw views). Those that cannot be read are left out, with a
                     warning */
    bool raw;     /* the view is raw: weights have the names under which they are stored */
    bool masters; /* read F32 masters instead of 16-bit weights, if the format has both */
    const char *variant;             /* of a Hugging Face directory's weights ("fp16"); or NULL */
    const char *name;                /* of the checkpoint's folder, after resolving links */
    struct ckpt_dir *above;          /* the folder of the run; or NULL */
    const struct ckpt_catalog *base; /* of the option base=; or NULL */
};

/* Whose names the tensors have. */
enum ckpt_names {
    CKPT_NAMES_FRAMEWORK, /* the framework's names, or a model's names below a prefix: not known yet
                           */
    CKPT_NAMES_MEMORY,    /* the names that a transformers model has in memory */
    CKPT_NAMES_HUB,       /* the names that the model has on the hub: no recipe is needed */
};

/* Which files of the checkpoint, other than its weights, belong to the model. */
enum ckpt_model_files {
    CKPT_FILES_TOKENIZER, /* files of tokenizers and processors, generation_config.json, *.py */
    CKPT_FILES_CONFIG,    /* those and config.json, from which the catalogue's config was read */
    CKPT_FILES_ALL,       /* all files except weights and their indices */
    CKPT_FILES_COMPLETE,  /* as CKPT_FILES_ALL, and no files are added from a base */
};

/* The model from which training started. Each may be NULL; nothing is owned. */
struct ckpt_split_base {
    const struct ckpt_catalog *cat;
    const struct ckpt_weight_map *weight_map;
    const json_t *names; /* {tensor: its name in the base} where that differs */
};

/* Make a new weight map for cat that follows the base's split. *ret is NULL if the base has neither
 * weights nor an index. */
typedef int ckpt_split_fn(const struct ckpt_catalog *cat, const struct ckpt_split_base *base,
                          const struct ckpt_naming *naming, const json_t *config,
                          struct ckpt_weight_map **ret, struct ckpt_err *err);

/* A reader's facts about how its checkpoint should be shown. All zero means: a model under the
 * framework's names, and the checkpoint does not say anything about files, split and dtypes. Facts
 * for people and for the conditions of recipes are in the catalogue's `about` instead, of which
 * "format", "version" and "step" name the checkpoint in messages. Strings are static. Release with
 * ckpt_facts_release. */
struct ckpt_facts {
    enum ckpt_names names;
    bool own_names;  /* CKPT_NAMES_FRAMEWORK are the framework's in any case, although some may look
                        like those of a Hugging Face model: only recipes know them */
    bool is_adapter; /* the checkpoint is an adapter (PEFT), not a model */
    bool has_adapter; /* some tensors are those of modules `adapter`, or are called `lora_A` and
                         `lora_B`, beside the weights that they change, under the framework's names
                       */
    bool is_hub_dir;  /* the checkpoint is a published Hugging Face model directory, which is shown
                         unchanged */
    bool bare_header; /* its safetensors have no __metadata__, so the view's have none either */
    /* the trainer's own export follows the split of the base, as this function does, and copies
     * config.json although it may change dtypes; NULL: it does not */
    ckpt_split_fn *split_as_base;
    enum ckpt_model_files files;
    const char *files_at;   /* folder of these files ("": the checkpoint itself); NULL: the reader's
                               side_files, by the first rule */
    struct ckpt_dir *home;  /* folder of the config and the tokenizer, if it is not the checkpoint's
                               own; or NULL */
    const char *index_name; /* name of the file with the weight map; NULL: the usual one */
    struct ckpt_weight_map *weight_map; /* the split that the checkpoint prescribes; or NULL */
    json_t *adapter_config; /* adapter_config.json of an adapter that has no such file; or NULL */
    /* {file: {key: value}}: what its safetensors files say in __metadata__
     * (container/st_metadata.h), by the files' names in weight_map; or NULL */
    json_t *metadata;
    json_t *dtypes; /* {tensor: safetensors' name}: the dtypes that it prescribes; or NULL */
    const char *dtypes_file; /* the name of the file that says them */
};

/* Copy the facts; -1: there is no memory, and *ret is to be released all the same. */
int ckpt_facts_copy(const struct ckpt_facts *facts, struct ckpt_facts *ret);

/* Release what the facts refer to. */
void ckpt_facts_release(struct ckpt_facts *facts);

/* Make a weight map with every tensor of cat in one file. */
int ckpt_facts_map_all(struct ckpt_facts *facts, const struct ckpt_catalog *cat, const char *file,
                       struct ckpt_err *err);

/* Are all files that the index `name` of the directory names there, and all its tensors in cat?
 * MISSING: the first one that is not; with opt->allow_partial a tensor that is not there is a
 * warning of cat. */
int ckpt_reader_check_map(const struct ckpt_weight_map *map, const char *name,
                          const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                          struct ckpt_catalog *cat, struct ckpt_err *err);

/* How certain is it that this directory is one checkpoint of a format? */
typedef enum ckpt_evidence ckpt_reader_probe_fn(struct ckpt_dir *dir);

/* All functions are safe from many threads. */
struct ckpt_reader {
    const char *name; /* name of the format: "nanotron" */

    /* Is this directory one checkpoint of the format? Reads names and at most a small file; never a
     * shard. */
    ckpt_reader_probe_fn *probe;

    /* Is it one by names that tell less, or only by all names together? This is asked where no
     * reader's probe recognises the directory, as each scan of a run probes many. NULL: there are
     * no such names. */
    ckpt_reader_probe_fn *guess;

    /* The reader of the container in which this format is stored, as others are. A directory that
     * this reader recognises is none of the container's own checkpoints. NULL: none. */
    const struct ckpt_reader *container;

    /* Read every header, and of tensor data samples at most. On success the catalogue, which is
     * empty before, is complete, and its coverage, overlaps and sizes are checked; but cat->about
     * is NULL if there was no memory for a fact (ckpt_json_set), which the caller checks. *facts is
     * all zero before. The caller releases both, on failure too. */
    int (*load)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err);

    /* Add to the object `out` the values that the checkpoint holds besides tensors: encoded as in
     * container/torch_file.h, named as in torch's distributed checkpoints. If every rank wrote
     * its own file, they are those of the first rank. NULL: the format has none. */
    int (*objects)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                   struct ckpt_err *err);

    /* Add to the array `out` the groups of the optimizer's parameters, as format/groups.h has them.
     * `objects` is what the function above gives. NULL: they are as torch's state dicts have them.
     */
    int (*groups)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                  const json_t *objects, json_t *out, struct ckpt_err *err);

    /* Add to the object `out` the paths of the stored names in the nested state dict that was
     * saved: {"optim.lr": ["optim", "lr"]}. NULL: the format keeps no paths. */
    int (*paths)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                 struct ckpt_err *err);

    /* The name of the step in the pointer file (latest.txt) of a folder of checkpoints, malloc'ed;
     * NULL if there is no such file. The member may be NULL: the format has no pointer file. */
    char *(*latest)(struct ckpt_dir *run);

    /* Is the save in this directory, which is `name` in its folder, finished? `latest` is the
     * content of the pointer file, or NULL. Reads names and at most a small file. The member may be
     * NULL: every recognised checkpoint is finished. */
    bool (*finished)(struct ckpt_dir *dir, const char *name, const char *latest);

    /* Lists of names, in a checkpoint or in a folder of checkpoints, that have a meaning in the
     * format. They end with NULL; a list that is NULL is empty.
     *
     * markers: the file that a save writes after all its shards. A new save in the same place is
     * finished when this file has changed. The first of these names that exists counts. */
    const char *const *markers;

    /* Subdirectory with shards that are written after the marker ("optimizer/"). NULL: there is
     * none. */
    const char *after_marker;

    /* Files and folders of a checkpoint that every save writes anew. If one of them, or the
     * directory itself, has changed since the last scan, the checkpoint has changed. */
    const char *const *rewrites;

    /* inner_models: subdirectories of a step, or of a run, in which trainers put the model's
     * checkpoint ("actor"). inner_runs: subdirectories with the folder of steps ("checkpoint"). */
    const char *const *inner_models, *const *inner_runs;

    /* Do the weights of the checkpoint `above` lie alone in its folder or file `name`, so that a
     * user who names that means the checkpoint? above is NULL: could they, by the name? The member
     * may be NULL: never. */
    bool (*has_weights_in)(struct ckpt_dir *above, const char *name);

    /* Symbolic links in a folder of steps that point to one of the steps and are not steps
     * themselves ("LATEST"). */
    const char *const *links;

    /* The directory may hold weights in several variants (ckpt_reader_options.variant). */
    bool has_variants;

    /* This is a format of published models, not of trainers. Files of one directory may come from
     * several downloads, so their times are no evidence about saves. */
    bool is_published;

    /* Names of what trainers that save in this format put beside a model: patterns, as for
     * fnmatch(3), of the folders of steps, and of files which show that their folder is a
     * trainer's; and beginnings of the names of weights that are a trainer's own state
     * ("optimizer"). */
    const char *const *step_names, *const *state_files, *const *states;

    /* A key in the metadata of a Hugging Face index which says that its files are in this format,
     * and hold no tensors of a model; and the text that says so to whoever takes them for one.
     * NULL: there is no such key. */
    const char *index_key, *index_why;

    /* Files of a checkpoint that are no files of a model, although they are named like some: its
     * converters, "*.py". */
    const char *const *tools;

    /* Subdirectory with files that a Hugging Face directory has too, such as tokenizer.json ("":
     * the checkpoint itself). NULL: there are none. */
    const char *side_files;
};

/* A helper for readers: call add(ctx, i, err) for each of n tensors. If opt->allow_partial, a
 * tensor that fails with MISSING (a part of it does not exist) is left out of cat with a warning.
 * Any other failure ends the call. */
int ckpt_reader_add_each(const struct ckpt_reader_options *opt, struct ckpt_catalog *cat, size_t n,
                         int (*add)(void *ctx, size_t i, struct ckpt_err *err), void *ctx,
                         struct ckpt_err *err);

/* A helper for readers: the folder `name` of dir, "" for dir itself; new. NULL: there is none. */
struct ckpt_dir *ckpt_reader_folder(struct ckpt_dir *dir, const char *name);

/* A helper for readers: the entries of a directory, to be seen one by one, in natural order. All
 * zero before; release it after a failure, too. */
struct ckpt_entries {
    struct ckpt_str list;
    size_t at;
};

/* Read all of them. */
int ckpt_entries_read(const struct ckpt_dir *dir, struct ckpt_entries *ret, struct ckpt_err *err);

/* Free the list. */
void ckpt_entries_release(struct ckpt_entries *e);

/* The next entry, whose name lives as long as the list; false: there are no more. */
bool ckpt_entries_next(struct ckpt_entries *e, struct ckpt_entry *ret);

/* A helper for readers: the first file (or folder, with `folders`) of a directory, in natural
 * order, whose name begins and ends so: *ret is new, or NULL: there is none. */
int ckpt_reader_first(const struct ckpt_dir *dir, bool folders, const char *begin, const char *end,
                      char **ret, struct ckpt_err *err);

/* A helper for ckpt_reader.latest: the text of a pointer file without the blanks around it, new.
 * NULL: there is no such file, or it is long. */
char *ckpt_reader_pointer(const struct ckpt_dir *run, const char *name);

/* Does the name of a folder say that its save is in progress ("tmp-checkpoint-20",
 * "checkpoint-30_incomplete", "10.orbax-checkpoint-tmp-1")? Savers write there, and rename the
 * folder at the end. */
bool ckpt_reader_is_staging(const char *name);

/* Is it the name of a folder of a step, in any of the formats? */
bool ckpt_reader_is_step_name(const char *name);

/* Does a file of this name show that its folder is a trainer's? */
bool ckpt_reader_is_state_file(const char *name);

/* Are weights in a file of this name a trainer's own state? */
bool ckpt_reader_is_state(const char *name);

/* For ckpt_weight_map_read: what the readers' index_key and index_why say. */
const char *ckpt_reader_refuse_index(const char *key);

/* ---- latest_checkpointed_iteration.txt, the pointer file of Megatron's runs and of verl's, which
 * name their steps' folders differently: iter_0000010, and global_step_10. It is written when all
 * files of the step are there ---- */

enum ckpt_tracker_scheme {
    CKPT_TRACKER_ITER,        /* iter_0000010, and release, which a conversion makes */
    CKPT_TRACKER_GLOBAL_STEP, /* global_step_10 */
};

/* The name of the latest step by the tracker of this folder, malloc'ed, if the steps in it are
 * named by this scheme; else NULL. */
char *ckpt_tracker_latest(struct ckpt_dir *run, enum ckpt_tracker_scheme scheme);

/* Is the step `name` newer than the step `latest`, which a tracker names (NULL: there is none)?
 * False if one of them is not named by this scheme. */
bool ckpt_tracker_is_newer(const char *name, const char *latest, enum ckpt_tracker_scheme scheme);

/* Each is one file and one line of format/readers.def. */
#define CKPT_READER(NAME, ...) extern const struct ckpt_reader ckpt_reader_##NAME;
#include "format/readers.def"
#undef CKPT_READER

/* All readers, NULL-terminated, in the order of format/readers.def. */
extern const struct ckpt_reader *const ckpt_reader_list[];

/* Find the reader with the strongest evidence. NULL: MISSING (the format is not known), CONFLICT
 * (two readers have equal evidence; both are named), or the reason why the directory cannot be
 * read. */
const struct ckpt_reader *ckpt_reader_probe(struct ckpt_dir *dir, struct ckpt_err *err);

/* ---- formats that no reader reads, but whose names people will want to hear: what a folder holds,
 * and what to do with it ---- */

/* For a folder in which no reader found a checkpoint: -1 and UNSUPPORTED if one of its entries
 * shows what it holds instead, else 0. */
int ckpt_foreign_check(struct ckpt_dir *dir, struct ckpt_err *err);

/* Is the folder a pipeline of several models, each in a folder of its own, none of which is a step?
 */
bool ckpt_foreign_is_pipeline(const struct ckpt_dir *dir);

/* For a tensor of a checkpoint that torch saved: -1 and UNSUPPORTED if its name is that of FSDP1's
 * flat parameters, else 0. */
int ckpt_foreign_tensor(const char *name, struct ckpt_err *err);
