/* SPDX-License-Identifier: Apache-2.0 */
/* The pickled objects of a DCP, and the optimizer's groups among them. */
#include <string.h>

#include "base/mem.h"
#include "container/torch_file.h"
#include "format/dcp/load.h"
#include "format/groups.h"

struct taking {
    json_t *out;
    const char *spread;
};

static const char *no_tensor(void *ctx, const char *name)
{
    (void)ctx;
    (void)name;
    return NULL;
}

static bool every_object(void *ctx, const char *name)
{
    (void)ctx;
    (void)name;
    return true;
}

static int take(void *ctx, const char *name, struct ckpt_source *s, struct ckpt_err *err)
{
    const struct taking *t = ctx;
    bool spread = t->spread && strcmp(name, t->spread) == 0;

    return ckpt_torch_object(s, spread ? "" : name, spread, t->out, err);
}

int ckpt_dcp_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                     const char *spread, json_t *out, struct ckpt_err *err)
{
    struct taking t = {.out = out, .spread = spread};
    const struct ckpt_dcp_format format = {.name = "dcp",
                                           .tensor = no_tensor,
                                           .may_be_empty = true,
                                           .wants = every_object,
                                           .object = take,
                                           .ctx = &t};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;

    return ckpt_catalog_new(&cat, err) < 0 ? -1 : ckpt_dcp_load(dir, opt, &format, cat, err);
}

int ckpt_dcp_groups(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    const json_t *objects, json_t *out, struct ckpt_err *err)
{
    if (ckpt_groups_of_torch(objects, out, err) < 0)
        return -1;
    for (const char *const *folder = ckpt_dcp_optimizers; *folder && json_array_size(out) == 0;
         folder++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = ckpt_reader_folder(dir, *folder);
        ckpt_cleanup(ckpt_json_decrefp) json_t *own = json_object();
        if (!own)
            return ckpt_nomem(err);
        if (at && ckpt_dcp_evidence(at) != CKPT_NOT_MINE &&
            (ckpt_dcp_objects(at, opt, NULL, own, err) < 0 ||
             ckpt_groups_of_torch(own, out, err) < 0))
            return -1;
    }
    return 0;
}
