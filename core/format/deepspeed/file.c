/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a file of a DeepSpeed tag. */
#include "format/deepspeed/file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/torch_object.h"

void ckpt_ds_file_free(struct ckpt_ds_file *f)
{
    if (!f)
        return;
    if (f->has_pickle)
        ckpt_pickle_release(&f->p);
    if (f->has_archive)
        ckpt_torch_release(&f->archive);
    ckpt_arena_release(&f->names);
    ckpt_map_release(&f->by_unwrapped);
    ckpt_vec_release(&f->original);
    ckpt_source_unref(f->source);
    free(f);
}

void ckpt_ds_file_freep(struct ckpt_ds_file **f) { ckpt_ds_file_free(*f); }

static int read_archive(struct ckpt_ds_file *f, struct ckpt_err *err)
{
    if (ckpt_torch_open(f->source, 0, f->source->size, &f->archive, err) < 0)
        return -1;
    f->has_archive = true;
    if (f->archive.pickle->len > CKPT_TORCH_MAX_OBJECT)
        return ckpt_fail(err, CKPT_LIMIT, "its pickle has %" PRIu64 " bytes",
                         f->archive.pickle->len);
    if (ckpt_torch_pickle(&f->archive, &f->p, err) < 0)
        return -1;
    f->has_pickle = true;
    return 0;
}

int ckpt_ds_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                      struct ckpt_ds_file **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_ds_file_freep) struct ckpt_ds_file *f = calloc(1, sizeof *f);

    if (!f)
        return ckpt_nomem(err);
    if (ckpt_source_file_new(dir, name, pool, &f->source, err) < 0)
        return -1;
    if (read_archive(f, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), name);
    *ret = ckpt_steal(&f);
    return 0;
}

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

/* Take the word out of a string of the pickle. */
static int unwrap(struct ckpt_ds_file *f, struct ckpt_pickle_str *s)
{
    char *own = ckpt_arena_strdup(&f->names, s->ptr);
    uint32_t at;
    bool is_new;

    if (!own || ckpt_vec_push(&f->original, s->ptr) < 0)
        return -1;
    ckpt_remove_word(own, WRAPPER);
    *s = (struct ckpt_pickle_str){own, (uint32_t)strlen(own)};
    return ckpt_map_put(&f->by_unwrapped, own, s->len, (uint32_t)f->original.len - 1, &at, &is_new);
}

int ckpt_ds_file_unwrap(struct ckpt_ds_file *f, struct ckpt_err *err)
{
    if (has_wrapper(&f->p, ckpt_pv_get(&f->p, f->p.root, "module")))
        return 0;
    for (size_t i = 0; i < f->p.strs.len; i++) {
        struct ckpt_pickle_str *s = &f->p.strs.ptr[i];
        if (strlen(s->ptr) != s->len || !strstr(s->ptr, WRAPPER))
            continue;
        if (unwrap(f, s) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

const char *ckpt_ds_file_original(const struct ckpt_ds_file *f, const char *name)
{
    uint32_t at;

    return ckpt_map_get(&f->by_unwrapped, name, strlen(name), &at) ? f->original.ptr[at] : name;
}

bool ckpt_ds_is_tensor(const struct ckpt_ds_file *f, ckpt_pv v)
{
    return !ckpt_torch_is_data(&f->p, v) && ckpt_pv_rule(&f->p, v) >= 0;
}

int ckpt_ds_file_tensor(const struct ckpt_ds_file *f, ckpt_pv v, struct ckpt_ds_stored *ret,
                        struct ckpt_err *err)
{
    struct ckpt_torch_layout l = {0};
    uint64_t dense[CKPT_MAX_RANK], storage = 0;

    if (ckpt_torch_layout_of(&f->p, v, &l, err) < 0)
        return -1;
    *ret = (struct ckpt_ds_stored){.dtype = l.dtype, .rank = l.rank, .contiguous = true};
    memcpy(ret->dim, l.dim, l.rank * sizeof *l.dim);
    ckpt_shape_strides(l.dim, l.rank, dense);
    (void)ckpt_shape_numel(l.dim, l.rank, &ret->numel);
    for (uint32_t d = 0; d < l.rank; d++) {
        ret->contiguous &= l.dim[d] == 1 || l.stride[d] == dense[d];
        ret->stride[d] = l.stride[d] * ckpt_dtype_size(l.dtype);
    }
    if (ret->numel == 0)
        return 0;
    if (ckpt_torch_storage(&f->archive, &l, &storage, err) < 0)
        return -1;
    ret->off = storage + l.first * ckpt_dtype_size(l.dtype);
    return 0;
}

int ckpt_ds_file_shape(struct ckpt_ds_file *f, ckpt_pv v, uint64_t *dim, uint32_t *ret_rank,
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

bool ckpt_ds_file_u64(const struct ckpt_ds_file *f, ckpt_pv dict, const char *key, uint64_t *ret)
{
    int64_t n;

    if (!ckpt_pv_int(ckpt_pv_get(&f->p, dict, key), &n) || n < 0)
        return false;
    *ret = (uint64_t)n;
    return true;
}

bool ckpt_ds_is_buffer(const struct ckpt_ds_file *model, const char *name)
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

const char *ckpt_ds_owner(const struct ckpt_ds_file *model, const char *name)
{
    const struct ckpt_pickle *p = &model->p;

    return ckpt_pv_str(p, ckpt_pv_get(p, ckpt_pv_get(p, p->root, "shared_params"), name));
}
