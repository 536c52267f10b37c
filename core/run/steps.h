/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the steps of a run and the latest of them.
 *
 * A step is a directory that a reader recognises and whose save is finished, by the rule of the
 * format. A directory that cannot be read (permission denied, too many open files) counts as a step
 * too: opening it gives that error, and the latest step does not go back to an older one because of
 * it. A symbolic link to another step of the run is a second name of that step. A folder whose name
 * says that it is unfinished ("tmp-checkpoint-20") is no step, unless a pointer file names it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#include "base/err.h"
#include "base/vec.h"
#include "container/archive.h"
#include "format/reader.h"
#include "io/dir.h"
#include "run/order.h"

/* A plain struct; release with ckpt_steps_found_release. */
struct ckpt_steps_found {
    struct ckpt_found_step *ptr; /* in the order of run/order.h, oldest first; a single checkpoint
                                    is one step, named "" */
    size_t len, cap;
    char *latest;     /* NULL: there is no step */
    char *place;      /* where in its folder a step has its model, if no format says it; or NULL */
    char *unfinished; /* the last step whose save is not finished, for an error text; or NULL */
    char *warning; /* the format's pointer file names a step that does not exist, or a model beside
                      the steps is left out; or NULL */
    char *note;    /* what was guessed about the latest step, and folders that are no steps as their
                      names say that they are unfinished; or NULL */
    CKPT_VEC(struct ckpt_step_link) links; /* in natural order */
    uint64_t config; /* the identity of the folder's config.json, which may be that of the steps'
                        model: a part of their generations; 0: there is none */
    size_t turn;     /* which of the unchanged steps the next scan looks at */
};

/* Scan the folder, or the single checkpoint. part: as for ckpt_step_probe. `known` (may be NULL) is
 * the result of the last scan, which stands in for steps that cannot be read now, and for most
 * steps whose folder has the same entries as then: looking at a step costs dozens of system calls.
 * A save that writes over the files of a step leaves its folder as it was, so every scan looks at
 * the latest step and at 16 others in turn; of more than 4,096 steps, even the folders take turns.
 * At a distance it is one other, and folders of more than 8 steps take turns.
 * On failure *ret is empty.
 */
int ckpt_steps_scan(struct ckpt_dir *run, bool is_folder, const char *part,
                    const struct ckpt_steps_found *known, struct ckpt_steps_found *ret,
                    struct ckpt_err *err);
void ckpt_steps_found_release(struct ckpt_steps_found *s);

/* Find a step by its name; NULL: there is none. */
const struct ckpt_found_step *ckpt_steps_find(const struct ckpt_steps_found *s, const char *name);
/* The name of the step of that name, or to which the link of that name leads; NULL: neither. Valid
 * as long as s. */
const char *ckpt_steps_behind(const struct ckpt_steps_found *s, const char *name);
/* Do two scans have the same steps with the same generations, and the same latest step? */
bool ckpt_steps_same(const struct ckpt_steps_found *a, const struct ckpt_steps_found *b);

/* Are all steps of this scan models that are not named like steps? False if there is none. */
bool ckpt_steps_are_models(const struct ckpt_steps_found *s);

/* List the folders directly below `dir` that hold the steps of a run, as "'a', 'b'" (at most
 * eight); a new string, "" if there is none. NULL: out of memory. */
char *ckpt_steps_list_runs(struct ckpt_dir *dir);

/* Has the step been deleted, or is it unfinished (being deleted, or saved again)? */
bool ckpt_step_is_gone(struct ckpt_dir *run, const char *name, const char *part);

/* ---- a folder of weights: its checkpoint's config and tokenizer are in the folder above ---- */

/* The folder above the directory, as a new string, if the directory has the name of a folder of
 * weights in some format; NULL: it does not have such a name, or there is no memory. Nothing is
 * read. */
char *ckpt_part_above(const struct ckpt_dir *dir);

/* The folder that a file is in, as a new string, if the file has the name of weights that some
 * format keeps in one file, beside the model's config; NULL: the path is no such file, the storage
 * gives no answer (far has the time to wait for one), or there is no memory. */
char *ckpt_part_folder(const char *path, const struct ckpt_far_options *far);

/* Open a path as ckpt_archive_open does, or the union of it and of nalso others (io/dir_union.h,
 * which has `whole`). If a path is the folder or the file of weights in a checkpoint, that
 * checkpoint is opened. */
int ckpt_part_open(const char *path, const struct ckpt_access *how, char *const *also, size_t nalso,
                   bool whole, struct ckpt_dir **ret, struct ckpt_err *err);
