/* SPDX-License-Identifier: Apache-2.0 */
/* The states of an optimizer whose DCP lies beside the model's. */
#include <string.h>

#include "base/mem.h"
#include "format/dcp/load.h"
#include "format/states.h"

/* Folders of optimizers beside the model's: of accelerate and HF Trainer, of NeMo Automodel. */
const char *const ckpt_dcp_optimizers[] = {"optimizer_0", "optim", NULL};

/* Schedulers' tensors lie in the same files. */
static const char *name_state(void *ctx, const char *name)
{
    struct ckpt_state_name ignored;

    (void)ctx;
    return ckpt_state_parse_torch(name, &ignored) ? name : NULL;
}

static int read_optimizer(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                          struct ckpt_catalog *into, struct ckpt_err *err)
{
    const struct ckpt_dcp_format format = {
        .name = "dcp", .tensor = name_state, .may_be_empty = true};

    return ckpt_dcp_load(dir, opt, &format, into, err);
}

static int add_all(struct ckpt_catalog *cat, const struct ckpt_catalog *from, struct ckpt_err *err)
{
    const uint32_t first = (uint32_t)cat->sources.len;

    if (ckpt_catalog_add_sources(cat, from, err) < 0)
        return -1;
    for (size_t i = 0; i < from->tensors.len; i++)
        if (ckpt_catalog_copy(cat, &from->tensors.ptr[i], first, err) < 0)
            return -1;
    return 0;
}

static int add_folder(struct ckpt_dir *dir, const char *folder,
                      const struct ckpt_reader_options *opt, struct ckpt_catalog *cat,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = ckpt_reader_folder(dir, folder);
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *own = NULL;
    struct ckpt_err e = {0};

    if (!at || ckpt_dcp_evidence(at) == CKPT_NOT_MINE)
        return 0;
    if (ckpt_catalog_new(&own, err) < 0)
        return -1;
    if (read_optimizer(at, opt, own, &e) == 0)
        return add_all(cat, own, err);
    if (e.code == CKPT_NOMEM)
        return ckpt_err_move(err, &e);
    ckpt_catalog_warn(cat, "left out: the optimizer's states: %s", e.text);
    return 0;
}

int ckpt_dcp_add_states(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                        struct ckpt_catalog *cat, struct ckpt_err *err)
{
    if (!opt->states)
        return 0;
    for (const char *const *folder = ckpt_dcp_optimizers; *folder; folder++)
        if (add_folder(dir, *folder, opt, cat, err) < 0)
            return -1;
    return ckpt_states_label(cat, ckpt_state_parse_torch, err);
}
