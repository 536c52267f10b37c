/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the tensors in a pickle and their positions in the file. */
#include "format/nanotron/state_file.h"

#include <string.h>

static int add(struct ckpt_nt_state_file *f, const char *param, const char *key, ckpt_pv v,
               struct ckpt_err *err)
{
    struct ckpt_nt_state *s;

    if (!param || ckpt_torch_is_data(&f->file.p, v))
        return 0;
    if (ckpt_vec_add(&f->states, &s) < 0)
        return ckpt_nomem(err);
    *s = (struct ckpt_nt_state){.param = param, .key = key, .value = v};
    s->found = ckpt_torch_file_tensor(&f->file, v, &s->at, NULL) == 0;
    return 0;
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
static int add_numbered(struct ckpt_nt_state_file *f, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->file.p;
    const ckpt_pv states = ckpt_pv_get(p, p->root, "state"),
                  names = ckpt_pv_get(p, p->root, "names");

    for (size_t i = 0; i < ckpt_pv_npair(p, states); i++) {
        const char *param = name_of(p, names, ckpt_pv_key(p, states, i), i);
        const ckpt_pv state = ckpt_pv_value(p, states, i);
        for (size_t k = 0; k < ckpt_pv_npair(p, state); k++) {
            const char *key = ckpt_pv_str(p, ckpt_pv_key(p, state, k));
            if (key && add(f, param, key, ckpt_pv_value(p, state, k), err) < 0)
                return -1;
        }
    }
    return 0;
}

/* {name: tensor} */
static int add_masters(struct ckpt_nt_state_file *f, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->file.p;
    const ckpt_pv dict = ckpt_pv_get(p, p->root, "gradient_accumulator");

    for (size_t i = 0; i < ckpt_pv_npair(p, dict); i++)
        if (add(f, ckpt_pv_str(p, ckpt_pv_key(p, dict, i)), NULL, ckpt_pv_value(p, dict, i), err) <
            0)
            return -1;
    return 0;
}

int ckpt_nt_state_file_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                            struct ckpt_nt_state_file *ret, struct ckpt_err *err)
{
    return ckpt_torch_file_open(dir, name, pool, &ret->file, err) < 0 ||
                   add_numbered(ret, err) < 0 || add_masters(ret, err) < 0
               ? -1
               : 0;
}

void ckpt_nt_state_file_release(struct ckpt_nt_state_file *f)
{
    ckpt_vec_release(&f->states);
    ckpt_torch_file_release(&f->file);
}
