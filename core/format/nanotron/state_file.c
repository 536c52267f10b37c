/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the tensors in a pickle and their positions in the file. */
#include "format/nanotron/state_file.h"

#include <string.h>

#define NOWHERE UINT64_MAX /* not found; the error is reported when the tensor is used */

/* A walk over the tensors. */
struct walk {
    const struct ckpt_pickle *p;
    ckpt_nt_state_fn *fn;
    void *ctx;
    size_t n;
};

static int visit(struct walk *w, const char *param, const char *key, ckpt_pv v,
                 struct ckpt_err *err)
{
    const struct ckpt_nt_state s = {param, key, v, w->n};

    if (!param || ckpt_torch_is_data(w->p, v))
        return 0;
    w->n++;
    return w->fn(w->ctx, &s, err);
}

/* The name of a parameter from its number. In most files both have the same order, which is tried
 * first. */
static const char *name_of(const struct ckpt_pickle *p, ckpt_pv names, ckpt_pv id, size_t guess)
{
    const size_t n = ckpt_pv_npair(p, names);

    if (guess < n && ckpt_pv_key(p, names, guess) == id)
        return ckpt_pv_str(p, ckpt_pv_value(p, names, guess));
    for (size_t i = 0; i < n; i++)
        if (ckpt_pv_key(p, names, i) == id)
            return ckpt_pv_str(p, ckpt_pv_value(p, names, i));
    return ckpt_pv_str(p, id);
}

/* {number: {key: tensor}} */
static int visit_numbered(struct walk *w, ckpt_pv states, ckpt_pv names, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(w->p, states); i++) {
        const char *param = name_of(w->p, names, ckpt_pv_key(w->p, states, i), i);
        const ckpt_pv state = ckpt_pv_value(w->p, states, i);
        for (size_t k = 0; k < ckpt_pv_npair(w->p, state); k++) {
            const char *key = ckpt_pv_str(w->p, ckpt_pv_key(w->p, state, k));
            if (key && visit(w, param, key, ckpt_pv_value(w->p, state, k), err) < 0)
                return -1;
        }
    }
    return 0;
}

/* {name: tensor} */
static int visit_masters(struct walk *w, ckpt_pv dict, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(w->p, dict); i++)
        if (visit(w, ckpt_pv_str(w->p, ckpt_pv_key(w->p, dict, i)), NULL,
                  ckpt_pv_value(w->p, dict, i), err) < 0)
            return -1;
    return 0;
}

int ckpt_nt_state_file_each(const struct ckpt_nt_state_file *f, ckpt_nt_state_fn *fn, void *ctx,
                            struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->pickle;
    struct walk w = {.p = p, .fn = fn, .ctx = ctx};

    return visit_numbered(&w, ckpt_pv_get(p, p->root, "state"), ckpt_pv_get(p, p->root, "names"),
                          err) < 0
               ? -1
               : visit_masters(&w, ckpt_pv_get(p, p->root, "gradient_accumulator"), err);
}

int ckpt_nt_state_layout(const struct ckpt_nt_state_file *f, const struct ckpt_nt_state *s,
                         struct ckpt_torch_layout *ret, uint64_t *ret_storage, struct ckpt_err *err)
{
    if (ckpt_torch_layout_of(&f->pickle, s->value, ret, err) < 0)
        return -1;
    const bool known = s->at < f->storage.len && f->storage.ptr[s->at] != NOWHERE;
    *ret_storage = known ? f->storage.ptr[s->at] : 0;
    return known || ret->nbyte == 0 ? 0 : ckpt_torch_storage(&f->torch, ret, ret_storage, err);
}

static int locate(void *ctx, const struct ckpt_nt_state *s, struct ckpt_err *err)
{
    struct ckpt_nt_state_file *f = ctx;
    struct ckpt_torch_layout layout;
    uint64_t storage;

    if (ckpt_nt_state_layout(f, s, &layout, &storage, NULL) < 0)
        storage = NOWHERE;
    return ckpt_vec_push(&f->storage, storage) < 0 ? ckpt_nomem(err) : 0;
}

int ckpt_nt_state_file_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                            struct ckpt_nt_state_file *ret, struct ckpt_err *err)
{
    if (ckpt_source_file_new(dir, name, pool, &ret->source, err) < 0 ||
        ckpt_torch_open(ret->source, 0, ret->source->size, &ret->torch, err) < 0 ||
        ckpt_torch_pickle(&ret->torch, &ret->pickle, err) < 0)
        return -1;
    return ckpt_nt_state_file_each(ret, locate, ret, err);
}

void ckpt_nt_state_file_release(struct ckpt_nt_state_file *f)
{
    ckpt_vec_release(&f->storage);
    ckpt_pickle_release(&f->pickle);
    ckpt_torch_release(&f->torch);
    ckpt_source_unref(f->source);
}
