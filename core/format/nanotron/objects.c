/* SPDX-License-Identifier: Apache-2.0 */
/* What nanotron keeps beside tensors: param_groups of the optimizer, the state of the learning
 * rate's scheduler; all ranks have the same, except for the numbering; those of the first rank are
 * returned. */
#include "format/nanotron/objects.h"

#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "container/torch_file.h"

struct find {
    const char *prefix;
    char *name; /* the first file of the prefix, in natural order */
};

static int see_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct find *f = ctx;

    if (f->name || e->kind == CKPT_ENTRY_DIR || !ckpt_has_prefix(e->name, f->prefix) ||
        !ckpt_has_suffix(e->name, ".pt"))
        return 0;
    return (f->name = strdup(e->name)) ? 0 : ckpt_nomem(err);
}

static int add_first(struct ckpt_dir *dir, const char *folder, const char *prefix,
                     const struct ckpt_reader_options *opt, json_t *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;
    struct find f = {.prefix = prefix};
    int result;

    if (!ckpt_dir_has_dir(dir, folder))
        return 0;
    if (ckpt_dir_open_below(dir, folder, &at, err) < 0 || ckpt_dir_list(at, see_entry, &f, err) < 0)
        return -1;
    if (!f.name)
        return 0;
    result = ckpt_torch_objects_of(at, f.name, opt->pool, folder, out, err);
    free(f.name);
    return result;
}

int ckpt_nanotron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err)
{
    return add_first(dir, "optimizer", "optimizer", opt, out, err) < 0
               ? -1
               : add_first(dir, "lr_scheduler", "lr_scheduler", opt, out, err);
}
