/* SPDX-License-Identifier: Apache-2.0 */
/* The modules of this folder share these: the tree of an item, and its arrays. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/reader.h"

/* The file of an item that has its tree. */
#define CKPT_ORBAX_TREE "_METADATA"

struct ckpt_orbax_leaf {
    const char *name;   /* the keys with dots between them, under which it is stored */
    const json_t *path; /* the list of {"key": ..., "key_type": ...}; of the tree's JSON */
    bool is_array; /* else a string, in a file of all strings, or nothing: None, or a dictionary or
                      list without entries */
};

/* The tree that was saved. All zero: there is none. */
struct ckpt_orbax_tree {
    json_t *json; /* the file */
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_orbax_leaf) leaves; /* in the order of the file */
    bool ocdbt;                              /* arrays are in a database, else in files */
    bool zarr3;                              /* arrays are of zarr 3, else of zarr 2 */
    bool every_chunk; /* chunks of nothing but the fill value are stored, too */
};

/* Read the tree of an item. It is all zero before, and released by the caller, on failure too. */
int ckpt_orbax_tree_read(struct ckpt_dir *item, struct ckpt_orbax_tree *ret, struct ckpt_err *err);
void ckpt_orbax_tree_release(struct ckpt_orbax_tree *tree);

/* Text of a key of a leaf's path: of a list, its number. NULL: there are not as many. *ret_number:
 * it is one of a list. */
const char *ckpt_orbax_key(const struct ckpt_orbax_leaf *leaf, size_t i, bool *ret_number);

/* Choose the arrays that are read, and their names in the catalogue: `name`, or another one that is
 * written to buf. NULL: the array is left out. */
typedef const char *ckpt_orbax_name_fn(void *ctx, const struct ckpt_orbax_leaf *leaf,
                                       struct ckpt_str *buf);

/* Add the arrays of the tree to the catalogue. */
int ckpt_orbax_arrays(struct ckpt_dir *item, const struct ckpt_orbax_tree *tree,
                      const struct ckpt_reader_options *opt, ckpt_orbax_name_fn *name, void *ctx,
                      struct ckpt_catalog *cat, struct ckpt_err *err);
