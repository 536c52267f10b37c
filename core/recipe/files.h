/* SPDX-License-Identifier: Apache-2.0 */
/* The data files of core/recipe/data, embedded when we are built, behind those of a directory that
 * the user gives and that is laid out the same. */
#ifndef CKPT_RECIPE_FILES_H
#define CKPT_RECIPE_FILES_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"

/* An embedded file: "nanotron/llama", without ".json". */
struct ckpt_recipe_blob {
    const char *name;
    const unsigned char *data;
    size_t len;
};
extern const struct ckpt_recipe_blob ckpt_recipe_blobs[];
extern const size_t ckpt_recipe_nblobs;

struct ckpt_file {
    const char *name; /* "models/llama" */
    const char *text;
    size_t len;
    bool given; /* it is of the user's directory */
};

/* Immutable once it is filled. An all-zero struct is an empty set. */
struct ckpt_files {
    CKPT_VEC(struct ckpt_file) list; /* given ones first, each part sorted by name */
    struct ckpt_arena arena;
};

/* Fill an empty set: the files FOLDER/NAME.json below `dir` (NULL: none is given), then the
 * embedded ones whose names no given file has. MISSING if dir holds no such file; LIMIT for files
 * that are too many or too large. Release the set after failure too. */
int ckpt_files_load(struct ckpt_files *f, const char *dir, struct ckpt_err *err);
void ckpt_files_release(struct ckpt_files *f);

/* The file `folder` + `name` ("models/", "llama"), or NULL. */
const struct ckpt_file *ckpt_files_find(const struct ckpt_files *f, const char *folder,
                                        const char *name);

#endif
