/* SPDX-License-Identifier: Apache-2.0 */
/* Files that a view shows unchanged: tokenizer, chat template, processor, generation config, remote
 * code. */
#pragma once

#include "base/err.h"
#include "base/vec.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "view/view.h"

struct ckpt_sides {
    CKPT_VEC(struct ckpt_side_file) files; /* each path is owned, each source referenced */
    int64_t mtime_ns;                      /* time of the newest file */
    size_t nlink;            /* files left out because they are links that lead nowhere, or out */
    char *dangling;          /* the first that leads nowhere; or NULL */
    struct ckpt_err leaving; /* of the first that leads out; or empty */
};

/* Free the list and give back the sources. */
void ckpt_sides_release(struct ckpt_sides *s);

/* Which files of a directory to add: those that belong to a model but are not its weights. */
enum ckpt_side_rule {
    CKPT_SIDE_TOKENIZER, /* files that save_pretrained of transformers' tokenizers and processors
                            writes, generation_config.json, *.py */
    CKPT_SIDE_ALL,       /* all files except weights, their indices and hidden files: for a model
                            directory that is shown as itself */
};

/* Add the files of subdirectory `below` ("" for dir itself), except names that were added before.
 */
int ckpt_sides_add(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                   enum ckpt_side_rule rule, struct ckpt_fdpool *pool, struct ckpt_err *err);

/* Add one file of that subdirectory, if it exists. */
int ckpt_sides_add_one(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                       const char *name, struct ckpt_fdpool *pool, struct ckpt_err *err);

/* Remove a file from the list, if it is there. */
void ckpt_sides_remove(struct ckpt_sides *s, const char *path);
bool ckpt_sides_has(const struct ckpt_sides *s, const char *path);
