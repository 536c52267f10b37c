/* SPDX-License-Identifier: Apache-2.0 */
/* The values besides tensors in a Megatron checkpoint: the common state, a DCP's objects, or the
 * content of the first rank's file. */
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "container/torch_file.h"
#include "format/dcp/load.h"
#include "format/megatron/layout.h"
#include "format/megatron/load.h"

#define COMMON "common.pt"

/* The first folder of a rank, in natural order. */
static int see_folder(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    char **first = ctx;

    if (*first || e->kind != CKPT_ENTRY_DIR || !ckpt_has_prefix(e->name, "mp_rank_"))
        return 0;
    return (*first = strdup(e->name)) ? 0 : ckpt_nomem(err);
}

static int add_first_rank(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = NULL;

    if (ckpt_dir_list(dir, see_folder, &folder, err) < 0)
        return -1;
    for (size_t i = 0; folder && ckpt_megatron_rank_files[i]; i++) {
        ckpt_cleanup(ckpt_freep) char *path =
            ckpt_asprintf("%s/%s", folder, ckpt_megatron_rank_files[i]);
        if (!path)
            return ckpt_nomem(err);
        if (ckpt_dir_has_file(dir, path))
            return ckpt_torch_objects_of(dir, path, opt->pool, "", out, err);
    }
    return 0;
}

static int add_common(struct ckpt_dir *at, const struct ckpt_reader_options *opt, json_t *out,
                      struct ckpt_err *err)
{
    return ckpt_dir_has_file(at, COMMON)
               ? ckpt_torch_objects_of(at, COMMON, opt->pool, "", out, err)
               : 0;
}

static int add_dist(struct ckpt_dir *at, const struct ckpt_reader_options *opt, json_t *out,
                    struct ckpt_err *err)
{
    return ckpt_dcp_objects(at, opt, ckpt_megatron_common_state, out, err) < 0
               ? -1
               : add_common(at, opt, out, err);
}

static int add_beside(struct ckpt_dir *dir, const struct ckpt_megatron_layout *layout,
                      const char *part, const struct ckpt_reader_options *opt, json_t *out,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (ckpt_megatron_beside(dir, layout, part, &at, err) < 0)
        return -1;
    return at ? add_dist(at, opt, out, err) : 0;
}

int ckpt_megatron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err)
{
    const struct ckpt_megatron_layout layout = ckpt_megatron_layout_of(dir);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    if (*layout.below ? ckpt_dir_open_below(dir, layout.below, &at, err) < 0
                      : !(at = ckpt_dir_ref(dir)))
        return -1;
    if (layout.format == CKPT_MEGATRON_RANKS)
        return add_first_rank(at, opt, out, err);
    if (layout.format == CKPT_MEGATRON_ZARR)
        return add_common(at, opt, out, err);
    return add_dist(at, opt, out, err) < 0 ||
                   add_beside(dir, &layout, "optimizer", opt, out, err) < 0 ||
                   add_beside(dir, &layout, "extra", opt, out, err) < 0
               ? -1
               : 0;
}
