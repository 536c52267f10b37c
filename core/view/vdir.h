/* SPDX-License-Identifier: Apache-2.0 */
/* Building a tree of directories from a list of paths. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "view/view.h"

struct ckpt_vdir_file {
    const char *path;        /* the arena's */
    struct ckpt_vnode *node; /* complete but for its name */
};

/* May a file of a view have this path? FORMAT if it is empty, absolute, has empty components, "."
 * or "..", or is longer than a file system takes. */
int ckpt_vdir_check_path(const char *path, struct ckpt_err *err);

/* Sorts the list. CONFLICT if two files have one path, or one path is a file and a directory. */
int ckpt_vdir_build(struct ckpt_vdir_file *file, size_t n, int64_t mtime_ns,
                    struct ckpt_arena *arena, struct ckpt_vnode **ret_root, struct ckpt_err *err);
