/* SPDX-License-Identifier: Apache-2.0 */
/* The loops over the members of lists and dicts. */
#include "container/pickle_walk.h"

#include "base/mem.h"

json_t *ckpt_pickle_walk_list(const struct ckpt_pickle_walk *w, ckpt_pv v)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();

    for (size_t i = 0; i < ckpt_pv_len(w->p, v); i++)
        if (!list || json_array_append_new(list, w->convert(w->ctx, ckpt_pv_at(w->p, v, i))) < 0)
            return NULL;
    return ckpt_steal(&list);
}

json_t *ckpt_pickle_walk_dict(const struct ckpt_pickle_walk *w, ckpt_pv v)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *obj = json_object();

    for (size_t i = 0; i < ckpt_pv_npair(w->p, v); i++) {
        const char *key = w->key(w->ctx, ckpt_pv_key(w->p, v, i));
        if (!key)
            continue;
        if (!obj ||
            json_object_set_new(obj, key, w->convert(w->ctx, ckpt_pv_value(w->p, v, i))) < 0)
            return NULL;
    }
    return ckpt_steal(&obj);
}
