/* SPDX-License-Identifier: Apache-2.0 */
/* Leaving out heads that trainers put beside a model. */
#include "model/heads.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/fit.h"

/* Does the name begin with one of these words? */
static bool begins(const struct ckpt_texts *words, const char *name)
{
    const size_t len = strcspn(name, ".");

    return name[len] == '.' && ckpt_texts_have(words, name, len);
}

bool ckpt_heads_is_added(const struct ckpt_type *type, const json_t *config, const char *name)
{
    return config && begins(&type->added_heads, name) && ckpt_config_is_usual(config);
}

void ckpt_heads_warn(struct ckpt_catalog *cat, size_t n, const char *first)
{
    if (n)
        ckpt_catalog_warn(cat,
                          "left out: %zu tensor%s of a head that a trainer put beside the model, "
                          "whose class has it not ('%s'%s; view=raw shows %s)",
                          n, n == 1 ? "" : "s", first, n > 1 ? " first" : "",
                          n == 1 ? "it" : "them");
}

/* Do all names begin with a wrapper's word, but those of heads? */
static bool is_held(const struct ckpt_type *type, const struct ckpt_catalog *cat)
{
    size_t held = 0;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const char *name = cat->tensors.ptr[i].name;
        held += begins(&type->held_as, name);
        if (!begins(&type->held_as, name) && !begins(&type->added_heads, name))
            return false;
    }
    return held > 0;
}

int ckpt_heads_leave_out(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config;
    const struct ckpt_type *type = ckpt_opening_hub_type(o, &config);
    const struct ckpt_base *base = o->shared->base;
    const struct ckpt_fit_model theirs = {.cat = base ? base->cat : NULL,
                                          .map = base ? base->weight_map : NULL};
    const bool held = is_held(type, o->cat);
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(o->cat);
    size_t heads = 0, renamed = 0;
    const char *first = NULL;

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        if (ckpt_fit_model_has(&theirs, name[i]))
            continue;
        if (ckpt_heads_is_added(type, config, name[i])) {
            if (heads++ == 0)
                first = name[i];
            name[i] = NULL;
        } else if (held && begins(&type->held_as, name[i])) {
            if (renamed++ == 0)
                ckpt_catalog_note(o->cat, "names are shown without the wrapper's word '%.*s'",
                                  (int)strcspn(name[i], "."), name[i]);
            name[i] = strchr(name[i], '.') + 1;
        }
    }
    ckpt_heads_warn(o->cat, heads, first);
    return heads || renamed ? ckpt_opening_rename(o, name, err) : 0;
}
