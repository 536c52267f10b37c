/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a view while they are being listed: whoever lays a view out adds them by path, in
 * any order, and makes a tree of them (view/vtree.c). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"
#include "view/view.h"

struct ckpt_vdir_file {
    const char *path;        /* the arena's */
    struct ckpt_vnode *node; /* complete but for its name */
};

/* Sorts the list. CONFLICT if two files have one path, or one path is a file and a directory. */
int ckpt_vdir_build(struct ckpt_vdir_file *file, size_t n, int64_t mtime_ns,
                    struct ckpt_arena *arena, struct ckpt_vnode **ret_root, struct ckpt_err *err);

/* All zero: no files. Once a tree is made of them, the tree owns all of it. */
struct ckpt_vfiles {
    struct ckpt_arena arena;                /* of paths, nodes and segments */
    CKPT_VEC(struct ckpt_vdir_file) list;   /* their paths are the arena's */
    CKPT_VEC(struct ckpt_source *) sources; /* of files that pass through; referenced */
};

/* Free all of it, for a list that no tree was made of. */
void ckpt_vfiles_release(struct ckpt_vfiles *f);

/* May a file of a view have this path? Not if it is empty, absolute, has empty components, "." or
 * "..", or is longer or deeper than a view has. */
bool ckpt_vfiles_path_ok(const char *path);

/* Add a file whose node is complete but for its name; path and node are the arena's. */
int ckpt_vfiles_add(struct ckpt_vfiles *f, const char *path, struct ckpt_vnode *node,
                    struct ckpt_err *err);

/* Add a file of these segments, which are the arena's, and whose `off` is set; `path` is copied.
 * LIMIT if it would have 2^63 bytes or more. */
int ckpt_vfiles_add_segments(struct ckpt_vfiles *f, const char *path, struct ckpt_segment *segment,
                             size_t n, int64_t mtime_ns, struct ckpt_err *err);

/* Add a file of one segment, which is copied, as ckpt_vfiles_add_segments does. */
int ckpt_vfiles_add_segment(struct ckpt_vfiles *f, const char *path, struct ckpt_segment segment,
                            int64_t mtime_ns, struct ckpt_err *err);

/* Add a file with this text (copied). */
int ckpt_vfiles_add_text(struct ckpt_vfiles *f, const char *path, const char *text, size_t len,
                         int64_t mtime_ns, struct ckpt_err *err);

/* Add what a model directory has beside its weights, which must have been added: config.json,
 * generation_config.json, and the files that pass through, except an index of other weights and
 * files whose path a generated file has. */
int ckpt_vfiles_add_model(struct ckpt_vfiles *f, const struct ckpt_vtree_options *opt,
                          struct ckpt_err *err);
#define CKPT_VFILES_INDEX "model.safetensors.index.json"

/* The time of the newest of the shards that a tensor is read from, and at least `mtime`. */
int64_t ckpt_vfiles_mtime(const struct ckpt_tensor *t, int64_t mtime);

/* Where a tensor of the catalogue lies in one piece, row-major; file is NULL if it does not. */
struct ckpt_vplace {
    const struct ckpt_vnode *file;
    uint64_t off;
};

/* Make a tree of the files, which then are the tree's (also on failure). `place` has an entry for
 * each tensor of the catalogue, and is the files' arena's. CONFLICT as ckpt_vtree_new. */
int ckpt_vtree_of_files(const struct ckpt_catalog *cat, struct ckpt_vfiles *files,
                        const struct ckpt_vplace *place, int64_t mtime_ns, struct ckpt_vtree **ret,
                        struct ckpt_err *err);
