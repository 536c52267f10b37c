/* SPDX-License-Identifier: Apache-2.0 */
/* Which steps a run has, and which of them is the latest.
 *
 * A step is a directory that some reader recognises and that its save has finished, by the format's
 * own rule. A step that cannot be looked into (permission denied, too many open files) is a step
 * all the same: it shows its error, and what is the latest does not go back because of it. */
#ifndef CKPT_RUN_STEPS_H
#define CKPT_RUN_STEPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "ckpt/reader.h"
#include "io/dir.h"
#include "run/save.h"

struct ckpt_found_step {
    char *name;
    uint64_t generation; /* changes when the step is saved again */
    int64_t mtime_ns;
    struct ckpt_save_marker marker;
};

/* A plain struct; release with ckpt_steps_found_release. */
struct ckpt_steps_found {
    struct ckpt_found_step *ptr; /* oldest first; of a single checkpoint: one, named "" */
    size_t len, cap;
    char *latest;     /* NULL: there is no step */
    char *unfinished; /* the last step of which the save has not finished, for an error; or NULL */
    char *warning;    /* the format's pointer file names a step that is not there; or NULL */
};

/* Look at the folder, or at the single checkpoint. `known` (may be NULL): what was found last time,
 * for the steps that cannot be looked into now. On failure *ret is empty. */
int ckpt_steps_scan(struct ckpt_dir *run, bool is_folder, const struct ckpt_steps_found *known,
                    struct ckpt_steps_found *ret, struct ckpt_err *err);
void ckpt_steps_found_release(struct ckpt_steps_found *s);

const struct ckpt_found_step *ckpt_steps_find(const struct ckpt_steps_found *s, const char *name);
bool ckpt_steps_same(const struct ckpt_steps_found *a, const struct ckpt_steps_found *b);

/* Is the step not there any more, or not finished (being removed, being saved anew)? */
bool ckpt_step_is_gone(struct ckpt_dir *run, const char *name);

/* The reader of *dir, or of the model in it, which becomes *dir then. As ckpt_reader_probe. */
const struct ckpt_reader *ckpt_step_probe(struct ckpt_dir **dir, struct ckpt_err *err);

#endif
