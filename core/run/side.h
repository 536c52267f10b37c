/* SPDX-License-Identifier: Apache-2.0 */
/* Files that a view passes through as they are: tokenizer, chat template, processor, generation
 * config, remote code. */
#ifndef CKPT_RUN_SIDE_H
#define CKPT_RUN_SIDE_H

#include "base/err.h"
#include "base/vec.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "view/view.h"

struct ckpt_sides {
    CKPT_VEC(struct ckpt_side_file) files; /* path malloc'ed, source referenced */
    int64_t mtime_ns;                      /* of the newest */
};

void ckpt_sides_release(struct ckpt_sides *s);

/* Which of a directory's files: those that belong to a model but are not its weights. */
enum ckpt_side_rule {
    CKPT_SIDE_TOKENIZER, /* what transformers' save_pretrained of tokenizers and processors write,
                            generation_config.json, *.py */
    CKPT_SIDE_ALL, /* everything but weights, their indices, and hidden files: a model directory
                      shown as itself */
};

/* Add the files of subdirectory `below` ("" for dir itself); names that are there already stay. */
int ckpt_sides_add(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                   enum ckpt_side_rule rule, struct ckpt_fdpool *pool, struct ckpt_err *err);

/* Add one file of it, if it is there. */
int ckpt_sides_add_one(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                       const char *name, struct ckpt_fdpool *pool, struct ckpt_err *err);

/* Take a file out, if it is there. */
void ckpt_sides_remove(struct ckpt_sides *s, const char *path);
bool ckpt_sides_has(const struct ckpt_sides *s, const char *path);

#endif
