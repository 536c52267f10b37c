/* SPDX-License-Identifier: Apache-2.0 */
/* Names of tensors whose module is not there. */
#include "recipe/apply/fused.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "recipe/language/field.h"

/* The name of the tensor that shows that the module is there. It begins with the first `module`
 * bytes of the name if the entry names a witness, otherwise with the first `prefix` bytes. */
static char *witness_name(const struct ckpt_fused *f, const char *name, int module, int prefix)
{
    return f->witness ? ckpt_asprintf("%.*s%s", module, name, f->witness)
                      : ckpt_asprintf("%.*sweight", prefix, name);
}

/* Make *name that of a tensor which is stored by itself, unless the entry is about other names, or
 * the module that would contain the tensor is there. */
static int rename_one(const struct ckpt_fused *f, struct ckpt_catalog *cat, const char **name,
                      struct ckpt_err *err)
{
    const char *at = strstr(*name, f->module);
    const char *rest = at ? at + strlen(f->module) : "";

    if (!at || !ckpt_has_prefix(rest, f->prefix))
        return 0;
    ckpt_cleanup(ckpt_freep) char *witness =
        witness_name(f, *name, (int)(at - *name), (int)(rest - *name));
    if (!witness)
        return ckpt_nomem(err);
    if (ckpt_catalog_find(cat, witness))
        return 0;
    *name = ckpt_field_text(&cat->arena, err, "%.*s%s%s", (int)(at - *name), *name, f->alone,
                            rest + strlen(f->prefix));
    return *name ? 0 : -1;
}

int ckpt_fused_rename(const struct ckpt_recipe *recipe, struct ckpt_catalog *cat,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);

    if (!recipe->fused.len)
        return 0;
    if (!name)
        return ckpt_nomem(err);
    /* a later entry sees the name that an earlier one gave */
    for (size_t i = 0; i < cat->tensors.len; i++)
        for (size_t k = 0; k < recipe->fused.len; k++)
            if (rename_one(&recipe->fused.ptr[k], cat, &name[i], err) < 0)
                return -1;
    return ckpt_catalog_select(cat, name, err);
}
