/* SPDX-License-Identifier: Apache-2.0 */
/* Are the files of a finished export those of the view? */
#ifndef CKPT_FS_SAME_FILES_H
#define CKPT_FS_SAME_FILES_H

#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "items.h"

struct ckpt_same_files {
    struct ckpt_view *view;
    const struct ckpt_items *items; /* of the view; the files in `dir` have their sizes */
    int dir;
    const char *dest; /* dir's name, for errors */
    unsigned jobs;    /* as struct ckpt_pump's, and quiet */
    bool quiet;
    XXH128_hash_t *hash; /* filled, one per item */
};

/* Compare every byte. CONFLICT names the first file that was found to differ, and where. */
int ckpt_same_files(const struct ckpt_same_files *what, double *ret_seconds, struct ckpt_err *err);

#endif
