/* SPDX-License-Identifier: Apache-2.0 */
/* A reader turns a directory of one checkpoint format into a catalogue. It knows files and
 * directories, not models. */
#ifndef CKPT_CKPT_READER_H
#define CKPT_CKPT_READER_H

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "base/log.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "tensor/catalog.h"

/* How sure a probe is. Common names are those that people give their own files. */
enum ckpt_evidence {
    CKPT_NOT_MINE = 0,
    CKPT_BY_COMMON_NAMES,
    CKPT_BY_NAMES,
    CKPT_BY_MAGIC,
};

/* What readers ask about a model's names; `config` is the model's, or NULL. They know files, and
 * are told of models. */
struct ckpt_naming {
    const void *ctx;
    /* Like strcmp, in the order of the model's state dict. */
    int (*cmp)(const void *ctx, const json_t *config, const char *a, const char *b);
    /* May a save lack the tensor, though a list of the model's tensors has it? */
    bool (*may_lack)(const void *ctx, const json_t *config, const char *name);
};

struct ckpt_reader_options {
    struct ckpt_fdpool *pool;
    const struct ckpt_log *log;
    const struct ckpt_naming *naming; /* NULL: names stand in their natural order, and a list of
                                         tensors is complete */
    bool allow_partial; /* leave incomplete tensors out, with a warning each, instead of failing */
    bool states;  /* the optimizers' too, where the format says what they belong to: raw views. What
                     can't be read of them is left out, with a warning */
    bool masters; /* F32 masters instead of 16-bit weights, where the format has both */
    unsigned nthread; /* for reading headers; 0: the reader's choice */
};

/* Whose names the tensors have. */
enum ckpt_names {
    CKPT_NAMES_FRAMEWORK, /* the framework's, or a model's below some prefix: nobody has looked */
    CKPT_NAMES_MEMORY,    /* those that a transformers model has in memory */
    CKPT_NAMES_HUB,       /* those that the model has on the hub: no recipe is needed */
};

/* Which files of the checkpoint, beside its weights, are the model's. */
enum ckpt_model_files {
    CKPT_FILES_TOKENIZER, /* those of tokenizers and processors, generation_config.json, *.py */
    CKPT_FILES_CONFIG,    /* the same and config.json, which the catalogue's config was read from */
    CKPT_FILES_ALL,       /* every file but weights and their indices */
    CKPT_FILES_COMPLETE,  /* the same, and a base has none to add */
};

/* What a reader knows of how its checkpoint is to be shown. All zero: a model under the framework's
 * names, about whose files, split and dtypes the checkpoint says nothing. Facts for people and for
 * the conditions of recipes stand in the catalogue's `about` instead; of these, "format", "version"
 * and "step" name the checkpoint in messages.
 *
 * Texts are static. Release with ckpt_facts_release. */
struct ckpt_facts {
    enum ckpt_names names;
    bool is_adapter;  /* no model but an adapter (PEFT) */
    bool is_hub_dir;  /* a Hugging Face model directory as it is published: it is shown as itself */
    bool bare_header; /* its safetensors have no __metadata__, nor shall the view's */
    bool split_as_base; /* the trainer's own export splits the model as its base is split, and
                           passes config.json through although it may change dtypes */
    enum ckpt_model_files files;
    const char *files_at;   /* their folder ("" = the checkpoint itself); NULL: the reader's
                               side_files, under the first rule */
    const char *index_name; /* of the file that has the weight map; NULL: the usual one */
    json_t *weight_map;     /* {tensor: file}: the split that the checkpoint asks for; or NULL */
    json_t *dtypes;         /* {tensor: safetensors' name}: the dtypes that it asks for; or NULL */
};

void ckpt_facts_release(struct ckpt_facts *facts);

/* Map every tensor of cat to one file. */
int ckpt_facts_map_all(struct ckpt_facts *facts, const struct ckpt_catalog *cat, const char *file,
                       struct ckpt_err *err);

/* All functions are safe from many threads. */
struct ckpt_reader {
    const char *name; /* "nanotron" */

    /* Is this directory one checkpoint of the format? Reads names and at most a small file; never a
     * shard. */
    enum ckpt_evidence (*probe)(struct ckpt_dir *dir);

    /* Read every header; no tensor bytes. On success the catalogue, which is empty before, is
     * complete and checked: coverage, overlaps, sizes. *facts is all zero before. Both are the
     * caller's to release, on failure too. */
    int (*load)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err);

    /* Add to the object `out` what the checkpoint holds beside tensors, by name: values as
     * container/pickle_value.h writes them, named as torch's distributed checkpoints name them. Of
     * files that every rank wrote, the first rank's. NULL: the format has none. */
    int (*objects)(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                   struct ckpt_err *err);

    /* Of a folder of checkpoints: the name of the step that the format's own pointer file
     * (latest.txt) names, malloc'ed, or NULL if there is no such file. May be NULL: the format has
     * none. */
    char *(*latest)(struct ckpt_dir *run);

    /* Is the save in this directory, named `name` in its folder, finished? `latest` is what the
     * pointer file says, or NULL. Names and at most a small file, as probe. NULL: a checkpoint that
     * can be recognised is finished. */
    bool (*finished)(struct ckpt_dir *dir, const char *name, const char *latest);

    /* Names in a checkpoint, or in a folder of them, whose meaning the format gives. Lists end with
     * NULL; a list that is NULL itself is empty.
     *
     * The file that a save writes when all shards are written, so that a new save in the same place
     * has ended when it has changed: the first of these that is there. */
    const char *const *markers;

    /* Shards in this subdirectory are written after the marker ("optimizer/"). NULL: none is. */
    const char *after_marker;

    /* Files and folders of a checkpoint that every save writes anew: if one of them, or the
     * checkpoint's directory itself, has changed since the last look, so has the checkpoint. */
    const char *const *rewrites;

    /* Subdirectories of a step, and of a run, in which trainers put the model's checkpoint
     * ("actor"), and the folder of steps ("checkpoint"). */
    const char *const *inner_models, *const *inner_runs;

    /* Symbolic links in a folder of steps that point at one of the steps and are none themselves
     * ("LATEST"). */
    const char *const *links;

    /* The suffix of files that hold such a checkpoint, and have to be unpacked (".nemo"). NULL:
     * there are none. */
    const char *archive;

    /* Not what a trainer saves but what people publish: its files may be of several downloads, so
     * that their times say nothing about saves. */
    bool is_published;

    /* Files of the checkpoint that a Hugging Face directory has too (tokenizer.json ...) may lie in
     * this subdirectory ("" = the checkpoint itself). NULL: there are none. */
    const char *side_files;
};

/* For readers: call add(ctx, i, err) for each of n tensors. One that fails with MISSING (a part of
 * the tensor is not there) is left out of cat with a warning, if opt->allow_partial; every other
 * failure is that of the whole. */
int ckpt_reader_add_each(const struct ckpt_reader_options *opt, struct ckpt_catalog *cat, size_t n,
                         int (*add)(void *ctx, size_t i, struct ckpt_err *err), void *ctx,
                         struct ckpt_err *err);

/* All readers, NULL-terminated, in the order of ckpt/readers.def. */
extern const struct ckpt_reader *const ckpt_readers[];

/* The reader with the strongest evidence, or NULL and MISSING ("no checkpoint of a known format"),
 * CONFLICT (a tie, both named), or why nobody can tell (permission denied ...). */
const struct ckpt_reader *ckpt_reader_probe(struct ckpt_dir *dir, struct ckpt_err *err);

#endif
