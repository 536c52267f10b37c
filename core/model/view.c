/* SPDX-License-Identifier: Apache-2.0 */
/* The data that all views of a run share. */
#include "model/view.h"

#include <stdlib.h>

enum { SLAB_BUDGET = 256 * 1024 * 1024 };

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err)
{
    const struct ckpt_access how = ckpt_options_access(opt);
    struct ckpt_shared *s;

    if (ckpt_options_check(opt, err) < 0)
        return -1;
    if (!(s = calloc(1, sizeof *s)))
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    (void)pthread_mutex_init(&s->eval, NULL);
    if (ckpt_remarks_init(&s->remarks, err) < 0 || ckpt_options_copy(opt, &s->opt, err) < 0 ||
        ckpt_fdpool_new(0, &s->pool, err) < 0 || ckpt_slabs_new(SLAB_BUDGET, &s->slabs, err) < 0 ||
        ckpt_recipes_load(s->opt->recipe, &s->recipes, err) < 0 ||
        (s->opt->key_mapping && ckpt_renames_load(s->opt->key_mapping, &s->renames, err) < 0) ||
        (s->opt->base && ckpt_base_open(s->opt->base, &how, s->pool, &s->base, err) < 0)) {
        ckpt_shared_unref(s);
        return -1;
    }
    *ret = s;
    return 0;
}

struct ckpt_shared *ckpt_shared_ref(struct ckpt_shared *s)
{
    atomic_fetch_add(&s->refs, 1);
    return s;
}

void ckpt_shared_unref(struct ckpt_shared *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_base_free(s->base);
    ckpt_recipes_free(s->recipes);
    ckpt_renames_free(s->renames);
    ckpt_slabs_free(s->slabs);
    ckpt_fdpool_unref(s->pool);
    ckpt_options_free(s->opt);
    ckpt_remarks_release(&s->remarks);
    (void)pthread_mutex_destroy(&s->eval);
    free(s);
}
