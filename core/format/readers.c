/* SPDX-License-Identifier: Apache-2.0 */
/* The list of readers, and the choice of the reader for a directory. */
#include "format/readers.h"

#include <stddef.h>

const struct ckpt_reader *const ckpt_reader_list[] = {
#define CKPT_READER(NAME) &ckpt_reader_##NAME,
#include "format/readers.def"
#undef CKPT_READER
    NULL,
};

const struct ckpt_reader *ckpt_reader_probe(struct ckpt_dir *dir, struct ckpt_err *err)
{
    const struct ckpt_reader *best = NULL, *tie = NULL;
    enum ckpt_evidence most = CKPT_NOT_MINE;

    for (const struct ckpt_reader *const *r = ckpt_reader_list; *r; r++) {
        enum ckpt_evidence e = (*r)->probe(dir);
        if (e == CKPT_NOT_MINE || e < most)
            continue;
        tie = e == most ? best : NULL;
        best = *r;
        most = e;
    }
    if (!best && ckpt_dir_trouble(dir, err) < 0)
        return NULL;
    if (!best)
        (void)ckpt_fail(err, CKPT_MISSING, "'%s' is not a checkpoint of a known format",
                        ckpt_dir_path(dir));
    else if (tie)
        (void)ckpt_fail(err, CKPT_CONFLICT, "'%s' looks like a checkpoint of %s and of %s",
                        ckpt_dir_path(dir), tie->name, best->name);
    return tie ? NULL : best;
}
