/* SPDX-License-Identifier: Apache-2.0 */
/* Values in the files of a DeepSpeed tag. */
#include "format/deepspeed/file.h"

#include <inttypes.h>
#include <string.h>

#include "base/str.h"

#define WRAPPER "_checkpoint_wrapped_module."

static bool has_wrapper(const struct ckpt_pickle *p, ckpt_pv dict)
{
    for (size_t i = 0; i < ckpt_pv_npair(p, dict); i++) {
        const char *key = ckpt_pv_str(p, ckpt_pv_key(p, dict, i));
        if (key && strstr(key, WRAPPER))
            return true;
    }
    return false;
}

void ckpt_ds_unwrapped_release(struct ckpt_ds_unwrapped *u)
{
    ckpt_map_release(&u->by_name);
    ckpt_vec_release(&u->original);
}

int ckpt_ds_file_unwrap(struct ckpt_torch_file *f, struct ckpt_ds_unwrapped *ret,
                        struct ckpt_err *err)
{
    if (has_wrapper(&f->p, ckpt_pv_get(&f->p, f->p.root, "module")))
        return 0;
    for (size_t i = 0; i < f->p.strs.len; i++) {
        struct ckpt_pickle_str *s = &f->p.strs.ptr[i];
        if (strlen(s->ptr) != s->len || !strstr(s->ptr, WRAPPER))
            continue;
        char *own = ckpt_arena_strdup(&f->p.text, s->ptr);
        if (!own || ckpt_vec_push(&ret->original, s->ptr) < 0)
            return ckpt_nomem(err);
        ckpt_remove_word(own, WRAPPER);
        *s = (struct ckpt_pickle_str){own, (uint32_t)strlen(own)};
        if (ckpt_map_add(&ret->by_name, own, (uint32_t)ret->original.len - 1) == CKPT_NONE)
            return ckpt_nomem(err);
    }
    return 0;
}

const char *ckpt_ds_unwrapped_original(const struct ckpt_ds_unwrapped *u, const char *name)
{
    const uint32_t at = ckpt_map_find(&u->by_name, name);

    return at == CKPT_NONE ? name : u->original.ptr[at];
}

int ckpt_ds_file_shape(struct ckpt_torch_file *f, ckpt_pv v, uint64_t *dim, uint32_t *ret_rank,
                       struct ckpt_err *err)
{
    size_t n = 0;
    const int64_t *size = ckpt_pv_ints(&f->p, ckpt_pickle_pack(&f->p, v), &n);
    uint64_t numel;

    if (!size || n > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_FORMAT, "it is not a shape of at most %d dimensions",
                         CKPT_MAX_RANK);
    for (size_t d = 0; d < n; d++) {
        if (size[d] < 0)
            return ckpt_fail(err, CKPT_FORMAT, "a dimension of %" PRId64, size[d]);
        dim[d] = (uint64_t)size[d];
    }
    if (!ckpt_shape_numel(dim, (uint32_t)n, &numel) || numel > INT64_MAX / 8)
        return ckpt_fail(err, CKPT_FORMAT, "a shape of more elements than any file holds");
    *ret_rank = (uint32_t)n;
    return 0;
}

bool ckpt_ds_file_u64(const struct ckpt_torch_file *f, ckpt_pv dict, const char *key, uint64_t *ret)
{
    int64_t n;

    if (!ckpt_pv_int(ckpt_pv_get(&f->p, dict, key), &n) || n < 0)
        return false;
    *ret = (uint64_t)n;
    return true;
}

bool ckpt_ds_is_buffer(const struct ckpt_torch_file *model, const char *name)
{
    const struct ckpt_pickle *p = &model->p;
    const ckpt_pv names = ckpt_pv_get(p, p->root, "buffer_names");

    for (size_t i = 0; i < ckpt_pv_len(p, names); i++) {
        const char *buffer = ckpt_pv_str(p, ckpt_pv_at(p, names, i));
        if (buffer && strcmp(buffer, name) == 0)
            return true;
    }
    return false;
}

const char *ckpt_ds_owner(const struct ckpt_torch_file *model, const char *name)
{
    const struct ckpt_pickle *p = &model->p;

    return ckpt_pv_str(p, ckpt_pv_get(p, ckpt_pv_get(p, p->root, "shared_params"), name));
}
