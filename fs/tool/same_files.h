/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing the files of a finished export with those of the view. */
#ifndef CKPT_FS_TOOL_SAME_FILES_H
#define CKPT_FS_TOOL_SAME_FILES_H

#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "tool/items.h"

struct ckpt_same_files {
    struct ckpt_view *view;
    const struct ckpt_items *items; /* files of the view; those in `dir` have the same sizes */
    int dir;
    const char *dest; /* name of dir, for error texts */
    unsigned jobs;    /* as in struct ckpt_pump; quiet too */
    bool quiet;
    XXH128_hash_t *hash; /* output: one hash per item */
};

/* Compare every byte. CONFLICT: a file differs; the text names it and the position. */
int ckpt_same_files(const struct ckpt_same_files *what, double *ret_seconds, struct ckpt_err *err);

#endif
