/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a trainer. A trainer writes its steps in a format that others write, too, and has
 * habits of its own around it: how the folder of steps is kept, what its export of a finished model
 * looks like, what it notes beside an adapter. Readers of formats and the model ask the table of
 * trainers, and so know none of them by name.
 *
 * A trainer is a folder with one `ckpt_trainer_NAME`, and one line in readers.def. */
#pragma once

#include <stdbool.h>

#include "base/json.h"
#include "format/reader.h"
#include "io/dir.h"
#include "tensor/catalog.h"

/* A trainer's own file says this about an adapter, besides adapter_config.json. */
struct ckpt_adapter_notes {
    const char *peft_version; /* the version of PEFT that would store experts' matrices as they are
                                 here, such as "0.19.1"; borrowed from the file; NULL: not said */
    bool exact; /* the changes of experts are added to the weights without being rounded first */
};

/* All functions are safe from many threads. A member may be NULL: the trainer has no such habit. */
struct ckpt_trainer {
    const char *name;

    /* The functions and lists of the same names in struct ckpt_reader. */
    char *(*latest)(struct ckpt_dir *run);
    bool (*finished)(struct ckpt_dir *dir, const char *name, const char *latest);
    const char *const *rewrites, *const *links, *const *step_names;

    /* Add to cat->about what the name of a step (NULL: it has none) says ("epoch", "step"), and
     * warn if the save, which was opened by its own name, is not finished. */
    void (*describe)(const struct ckpt_dir *dir, const char *name, struct ckpt_catalog *cat);

    /* The split that the trainer's own export gives the model (ckpt_facts.split_as_base). */
    ckpt_split_fn *split;

    /* The file beside an adapter with the trainer's own notes, and what they say. */
    const char *adapter_file;
    void (*adapter)(const json_t *file, struct ckpt_adapter_notes *ret);
};

/* Each is one line of format/readers.def. */
#define CKPT_READER(NAME, ...)
#define CKPT_TRAINER(NAME) extern const struct ckpt_trainer ckpt_trainer_##NAME;
#include "format/readers.def"
#undef CKPT_TRAINER
#undef CKPT_READER

/* All trainers, NULL-terminated, in the order of format/readers.def. */
extern const struct ckpt_trainer *const ckpt_trainers[];

/* ---- implementations of the members of the same names in struct ckpt_reader, for formats that
 * trainers write: each asks all trainers ---- */

/* The answer of the first trainer whose pointer file is there. */
char *ckpt_trainers_latest(struct ckpt_dir *run);

/* False: a trainer says that the save is not finished. */
bool ckpt_trainers_finished(struct ckpt_dir *dir, const char *name, const char *latest);

/* ---- about names ---- */

/* Is it the name of a folder of a step, of a trainer or in any of the formats? */
bool ckpt_trainers_is_step_name(const char *name);

/* ---- for the readers of such formats ---- */

/* Let every trainer describe the step in `dir`, whose folder has the name; or NULL. */
void ckpt_trainers_describe(const struct ckpt_dir *dir, const char *name, struct ckpt_catalog *cat);

/* The first trainer's split; NULL: none has one. */
ckpt_split_fn *ckpt_trainers_split(void);
