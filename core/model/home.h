/* SPDX-License-Identifier: Apache-2.0 */
/* The config and the tokenizer of the model, where nobody says which: a trainer, or its user, puts
 * them into the checkpoint, into a folder inside it, or into the folder of the run. They do what a
 * base's would do, but for dtypes and split. One rule for all formats. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"

struct ckpt_home {
    struct ckpt_dir *dir; /* with the model's config.json and its tokenizer; NULL: none was found */
    json_t *config;
    char *other; /* the first config.json that describes no model, such as a trainer's; or NULL */
};

/* Find the first config.json with a `model_type` or `architectures`: of the checkpoint in `dir`, of
 * its inner folders, then of `above`, the folder of its run (or NULL), and its inner folders. A
 * config.json that cannot be read is an error. *ret is all zero before, and is released after a
 * failure too. */
int ckpt_home_find(struct ckpt_dir *dir, struct ckpt_dir *above, struct ckpt_home *ret,
                   struct ckpt_err *err);
void ckpt_home_release(struct ckpt_home *home);
