/* SPDX-License-Identifier: Apache-2.0 */
#include "format/torch_records.h"

#include <stdlib.h>

#include "base/err.h"
#include "base/mem.h"

void ckpt_torch_records_init(struct ckpt_torch_records *r)
{
    *r = (struct ckpt_torch_records){0};
    r->p.out = &r->pickle;
}

void ckpt_torch_records_release(struct ckpt_torch_records *r)
{
    ckpt_str_release(&r->pickle);
    ckpt_vec_release(&r->tensor);
    ckpt_vec_release(&r->nbytes);
}

struct ckpt_torch_out ckpt_torch_records_shape(const struct ckpt_tensor *t)
{
    return (struct ckpt_torch_out){.dtype = (enum ckpt_dtype)t->dtype,
                                   .dim = t->dim,
                                   .rank = t->rank,
                                   .nbytes = ckpt_tensor_nbytes(t)};
}

int ckpt_torch_records_add(struct ckpt_torch_records *r, const struct ckpt_tensor *t,
                           struct ckpt_err *err)
{
    return ckpt_vec_push(&r->tensor, t) < 0 ||
                   ckpt_vec_push(&r->nbytes, t ? ckpt_tensor_nbytes(t) : 0) < 0
               ? ckpt_nomem(err)
               : 0;
}

/* The text between tensors, and the tensors. */
static int add_segments(const struct ckpt_torch_records *r, const struct ckpt_writing *w,
                        const char *path, const struct ckpt_str *text, const size_t *at,
                        struct ckpt_err *err)
{
    const size_t n = r->tensor.len;
    struct ckpt_segment *seg = ckpt_arena_alloc(&w->files->arena, (2 * n + 1) * sizeof *seg);
    char *own = ckpt_arena_dup(&w->files->arena, text->ptr, text->len);
    size_t done = 0;

    if (!seg || !own)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        seg[2 * i] = ckpt_segment_mem(own + done, at[i] - done);
        seg[2 * i + 1] = r->tensor.ptr[i]
                             ? ckpt_segment_tensor(r->tensor.ptr[i], 0, r->nbytes.ptr[i])
                             : ckpt_segment_mem("", 0);
        done = at[i];
    }
    seg[2 * n] = ckpt_segment_mem(own + done, text->len - done);
    return ckpt_writing_add(w, path, seg, 2 * n + 1, err);
}

int ckpt_torch_records_write(const struct ckpt_torch_records *r, const struct ckpt_writing *w,
                             const char *path, const char *folder, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    ckpt_cleanup(ckpt_freep) size_t *at = calloc(r->tensor.len + 1, sizeof *at);
    const struct ckpt_torch_archive archive = {.folder = folder,
                                               .pickle = r->pickle.ptr,
                                               .len = r->pickle.len,
                                               .nbytes = r->nbytes.ptr,
                                               .n = r->tensor.len};

    if (!at || r->pickle.failed)
        return ckpt_nomem(err);
    if (ckpt_torch_out_file(&archive, &text, at, err) < 0)
        return -1;
    return add_segments(r, w, path, &text, at, err);
}
