/* SPDX-License-Identifier: Apache-2.0 */
/* Spot checks: a few elements of an F32 master, rounded, are compared with the 16-bit weight that
 * was saved beside it. If they differ, the optimizer's files and the model's are of two saves. */
#include "format/deepspeed/load.h"

#include "base/ckd.h"
#include "format/pieces.h"

enum { MOST_SPOTS = 256, SPOT = 16 };

/* Compare up to SPOT elements, from number `at` of extent e on, which are those from number `of` of
 * the tensor on. */
static int compare(const struct ckpt_ds_job *job, enum ckpt_dtype dtype,
                   const struct ckpt_ds_extent *e, uint64_t at, const struct ckpt_torch_file *f,
                   const struct ckpt_torch_tensor *s, uint64_t of, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_spot master = {job->cat->sources.ptr[e->source], dtype,
                                     e->off + at * ckpt_dtype_size(dtype)};
    const struct ckpt_spot own = {f->source, s->dtype, s->off + of * ckpt_dtype_size(s->dtype)};
    const size_t n = (size_t)ckpt_min_u64(SPOT, e->n - at);
    size_t same;

    if (ckpt_spot_compare(&master, &own, n, &same, err) < 0)
        return -1;
    *ret = same == n;
    return 0;
}

int ckpt_ds_spot_same(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *masters,
                      size_t index, const struct ckpt_torch_file *f,
                      const struct ckpt_torch_tensor *s, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = &masters->part.ptr[index];
    const struct ckpt_ds_extent *e = &masters->extent.ptr[part->first];
    uint64_t of = 0;

    *ret = true;
    if (!s->contiguous || part->strided || part->numel != s->numel ||
        !ckpt_dtype_is_castable(s->dtype) || !ckpt_dtype_is_castable(part->dtype))
        return 0;
    for (size_t i = 0; i < part->n && *ret; of += e[i].n, i++) {
        const uint64_t last = e[i].n > SPOT ? e[i].n - SPOT : 0;
        if (compare(job, part->dtype, &e[i], 0, f, s, of, ret, err) < 0 ||
            (*ret && last && compare(job, part->dtype, &e[i], last, f, s, of + last, ret, err) < 0))
            return -1;
    }
    return 0;
}

int ckpt_ds_spot_check_part(const struct ckpt_ds_job *job, const struct ckpt_torch_file *f,
                            const char *file, const struct ckpt_torch_tensor *s,
                            const struct ckpt_ds_parts *masters, size_t index, struct ckpt_err *err)
{
    bool same;

    if (ckpt_ds_spot_same(job, masters, index, f, s, &same, err) < 0)
        return -1;
    return same ? 0
                : ckpt_fail(err, CKPT_CONFLICT,
                            "'%s': the F32 master of '%s' in the optimizer files, rounded, is not "
                            "the weight in '%s': files of different saves",
                            ckpt_dir_path(job->dir), masters->part.ptr[index].name, file);
}

int ckpt_ds_spot_check(const struct ckpt_ds_zero *z, ckpt_pv module,
                       const struct ckpt_ds_parts *masters, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const size_t n = ckpt_pv_npair(p, module), step = n / MOST_SPOTS + 1;
    struct ckpt_torch_tensor s;

    for (size_t i = 0; i < n; i += step) {
        const char *name = ckpt_pv_str(p, ckpt_pv_key(p, module, i));
        const uint32_t at =
            name && ckpt_ds_zero_param(z, name) ? ckpt_ds_parts_find(masters, name) : CKPT_NONE;
        if (at == CKPT_NONE)
            continue;
        if (ckpt_torch_file_tensor(&z->model, ckpt_pv_value(p, module, i), &s, err) < 0 ||
            ckpt_ds_spot_check_part(z->job, &z->model, z->model_name, &s, masters, at, err) < 0)
            return -1;
    }
    return 0;
}
