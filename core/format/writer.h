/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a writer, which is to a format what a reader (format/reader.h) is: a file of its
 * own in this folder, and one line in writers.def. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/str.h"
#include "format/output.h"
#include "tensor/catalog.h"
#include "tensor/slice.h"
#include "view/files.h"
#include "view/view.h"

/* Bits of ckpt_writer.keys: 1 << enum ckpt_cut_by, and these. */
enum {
    CKPT_WRITES_NAMES = 1 << CKPT_NCUT,       /* the option names= */
    CKPT_WRITES_SIZE = 1 << (CKPT_NCUT + 1),  /* the option max_shard_size= */
    CKPT_WRITES_FUSED = 1 << (CKPT_NCUT + 2), /* the option fuse_qkv */
};

/* A writer is given this, and fills `files` and `place`. */
struct ckpt_writing {
    struct ckpt_catalog *cat; /* whole tensors, under the names of the format; outlives the files,
                                 and may get memory for parts of tensors */
    const struct ckpt_output *output;
    const json_t *config; /* the format's own, which a recipe made; NULL: the format has none */
    const json_t *about;  /* facts about the checkpoint that is read (catalog.h) */
    uint64_t step;        /* the checkpoint's; 0: it has none */
    /* with the option optimizer: its groups of parameters, each with all members of a group of
     * torch's AdamW and "params", the tensors' names without what the format puts before them; and
     * tensors of cat say of which parameter they are which state (ckpt_state). NULL: without */
    const json_t *groups;
    const struct ckpt_vtree_options *model; /* the files of a model directory beside the weights,
                                               and how it would split them */
    struct ckpt_vfiles *files;              /* to add to */
    struct ckpt_vplace *place; /* of each tensor, all zero at first: for those that stay whole */
};

/* Add a file of segments, which is as new as the newest of its tensors. It becomes the place of
 * those tensors of the catalogue that it has whole and that have no place yet. */
int ckpt_writing_add(const struct ckpt_writing *w, const char *path, struct ckpt_segment *seg,
                     size_t n, struct ckpt_err *err);

/* Add a file with this text (copied), below `folder` ("", or "step-5/"). */
int ckpt_writing_text(const struct ckpt_writing *w, const char *folder, const char *name,
                      const char *text, size_t len, struct ckpt_err *err);

/* The type of most elements of the weights, by its name in torch: the one that a trainer builds the
 * model in. */
const char *ckpt_writing_dtype(const struct ckpt_writing *w);

/* Another word for an option, which the framework of a format has. */
struct ckpt_writer_word {
    const char *word;  /* NULL ends a list */
    const char *means; /* the option's word (model/options.c) */
    const char *help;
};

struct ckpt_writer {
    const char *name;        /* the word of the option view */
    unsigned keys;           /* the options that the format has */
    const char *layout;      /* how its files are cut, for whoever gives another option */
    uint32_t vocab_multiple; /* what the vocabulary's size is a multiple of on each tensor-parallel
                                rank, where neither an option nor the checkpoint says it; 0: 1 */
    bool vocab_whole;        /* that is the size of the whole vocabulary, not of a rank's */
    bool bare;               /* its files have no config of the model */
    bool hub_files;          /* a model directory's other files lie beside its own */
    const char *recipes;     /* the format of the recipes that give the names; NULL: the hub's */
    const struct ckpt_writer_word *words; /* of its framework; NULL: none */
    /* Append the name that the format gives to what an optimizer has of a parameter: "step",
     * "exp_avg", "exp_avg_sq", "master", or "weight", the parameter itself. NULL: the format has no
     * place for an optimizer. */
    void (*state_name)(struct ckpt_str *out, const char *parameter, const char *kind);
    /* Whoever resumes has a scheduler before it loads, and asks for the groups' "initial_lr"; and
     * for their "min_lr". */
    bool has_scheduler, has_min_lr;
    /* The masters, "master", have names beside those of the weights; else they lie in the weights'
     * places. */
    bool has_masters;
    /* One step is that of all parameters, and the groups have it ("step", an integer); else each
     * parameter has its own. */
    bool steps_in_groups;
    const char *also; /* what other programs call this view, as ckpt_words_find has it; or NULL */
    /* Add the files. */
    int (*write)(const struct ckpt_writing *w, struct ckpt_err *err);
};

#define CKPT_WRITER(NAME, ...) extern const struct ckpt_writer ckpt_writer_##NAME;
#include "format/writers.def"
#undef CKPT_WRITER

/* All writers; ends with NULL. */
extern const struct ckpt_writer *const ckpt_writers[];

struct ckpt_writers_text {
    char text[256];
};
/* The views that have a place for an optimizer: "view=dcp, view=...", for messages. */
struct ckpt_writers_text ckpt_writers_with_states(void);

/* Does the format have all the dimensions that were given? `view` is the word of the option view,
 * for the message. USAGE. */
int ckpt_writers_check(const struct ckpt_output *o, const char *view, struct ckpt_err *err);

/* ---- what one rank has of a tensor that is divided over ranks (tensor/catalog.h) ----
 *
 * How a tensor is divided among tensor-parallel ranks is said by the recipes' annotations, alike
 * for all writers. Which stage has a layer is not: Megatron divides evenly, and into virtual
 * stages; vLLM gives what is left over to the stages before the last one; nanotron goes by the
 * costs of blocks, of which its recipe tells (ckpt_cuts.stage). Each writer has its own rule. */

/* The dimension that is divided this way; the tensor's rank if none is. */
uint32_t ckpt_cut_dim(const struct ckpt_tensor *t, enum ckpt_cut_way way);

/* The part of one of the cuts that rank `rank` of `ranks` has. */
struct ckpt_interval ckpt_cut_part(const struct ckpt_cut *c, uint32_t rank, uint32_t ranks);

/* Fail because one of the cuts can't be divided so. USAGE, with the numbers. */
int ckpt_cut_fail(const struct ckpt_tensor *t, const struct ckpt_cut *c, uint32_t ranks,
                  const char *key, struct ckpt_err *err);

/* Can the tensor be divided so? `key` is the option that says it. USAGE: it does not divide, or is
 * divided in two dimensions. */
int ckpt_cut_check(const struct ckpt_tensor *t, enum ckpt_cut_way way, uint32_t ranks,
                   const char *key, struct ckpt_err *err);

/* Make *ret what the rank has; t itself if it is not divided. Memory is cat's. */
int ckpt_cut_tensor(struct ckpt_catalog *cat, const struct ckpt_tensor *t, enum ckpt_cut_way way,
                    uint32_t rank, uint32_t ranks, struct ckpt_tensor *ret, struct ckpt_err *err);
