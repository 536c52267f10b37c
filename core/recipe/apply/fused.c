/* SPDX-License-Identifier: Apache-2.0 */
/* Names of tensors whose module is not there. */
#include "recipe/apply/fused.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

/* The name of the tensor that shows that the module is there. It begins with the first `module`
 * bytes of the name if the entry names a witness, otherwise with the first `prefix` bytes. */
static char *witness_name(const struct ckpt_fused *f, const char *name, int module, int prefix)
{
    return f->witness ? ckpt_asprintf("%.*s%s", module, name, f->witness)
                      : ckpt_asprintf("%.*sweight", prefix, name);
}

/* The name of a tensor that is stored by itself. *ret is NULL if the entry is about other names, or
 * if the module that would contain the tensor is there. */
static int rename_one(const struct ckpt_fused *f, const struct ckpt_catalog *cat, const char *name,
                      char **ret, struct ckpt_err *err)
{
    const char *at = strstr(name, f->module);
    const char *rest = at ? at + strlen(f->module) : "";

    *ret = NULL;
    if (!at || !ckpt_has_prefix(rest, f->prefix))
        return 0;
    ckpt_cleanup(ckpt_freep) char *witness =
        witness_name(f, name, (int)(at - name), (int)(rest - name));
    if (!witness)
        return ckpt_nomem(err);
    if (ckpt_catalog_find(cat, witness))
        return 0;
    *ret = ckpt_asprintf("%.*s%s%s", (int)(at - name), name, f->alone, rest + strlen(f->prefix));
    return *ret ? 0 : ckpt_nomem(err);
}

/* Rename by all entries in their order: a later entry sees the name that an earlier one gave. */
static int rename_by_all(const struct ckpt_recipe *recipe, const struct ckpt_catalog *cat,
                         const char *name, char **ret, struct ckpt_err *err)
{
    *ret = NULL;
    for (size_t k = 0; k < recipe->fused.len; k++) {
        char *next;
        if (rename_one(&recipe->fused.ptr[k], cat, *ret ? *ret : name, &next, err) < 0)
            return -1;
        if (!next)
            continue;
        free(*ret);
        *ret = next;
    }
    return 0;
}

int ckpt_fused_rename(const struct ckpt_recipe *recipe, struct ckpt_catalog *cat,
                      struct ckpt_err *err)
{
    const size_t n = cat->tensors.len;
    ckpt_cleanup(ckpt_freep) const char **name = calloc(n + 1, sizeof *name);
    ckpt_cleanup(ckpt_freep) char **own = calloc(n + 1, sizeof *own);
    int result = 0;

    if (!recipe->fused.len)
        return 0;
    if (!name || !own)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n && result == 0; i++) {
        result = rename_by_all(recipe, cat, cat->tensors.ptr[i].name, &own[i], err);
        name[i] = own[i] ? own[i] : cat->tensors.ptr[i].name;
    }
    if (result == 0)
        result = ckpt_catalog_select(cat, name, err);
    for (size_t i = 0; i < n; i++)
        free(own[i]);
    return result;
}
