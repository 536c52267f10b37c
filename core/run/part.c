/* SPDX-License-Identifier: Apache-2.0 */
/* Opening the checkpoint above its folder of weights. */
#include "run/part.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/archive.h"
#include "format/reader.h"

/* Does some format have weights in a folder `name` of the checkpoint `above`? */
static bool is_part(struct ckpt_dir *above, const char *name)
{
    for (size_t r = 0; ckpt_reader_list[r]; r++)
        if (ckpt_reader_list[r]->has_weights_in && ckpt_reader_list[r]->has_weights_in(above, name))
            return true;
    return false;
}

char *ckpt_part_above(const struct ckpt_dir *dir)
{
    const char *path = ckpt_dir_real_path(dir), *slash = strrchr(path, '/');

    return slash && slash > path && is_part(NULL, slash + 1)
               ? ckpt_asprintf("%.*s", (int)(slash - path), path)
               : NULL;
}

int ckpt_part_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL, *above = NULL;
    struct ckpt_err ignored = {0};

    if (ckpt_archive_open(path, how, &dir, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_freep) char *outer = ckpt_archive_is_file(path) ? NULL : ckpt_part_above(dir);
    if (outer && ckpt_archive_open(outer, how, &above, &ignored) == 0 &&
        is_part(above, ckpt_dir_real_name(dir)))
        *ret = ckpt_steal(&above);
    else
        *ret = ckpt_steal(&dir);
    return 0;
}
