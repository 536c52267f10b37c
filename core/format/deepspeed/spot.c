/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a few elements. */
#include "format/deepspeed/spot.h"

#include "base/ckd.h"
#include "format/spot.h"

enum { MOST_SPOTS = 256, SPOT = 16 };

int ckpt_ds_spot_same(const struct ckpt_torch_file *f, const struct ckpt_torch_tensor *s,
                      const struct ckpt_ds_spot *spot, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_spot master = {spot->source, spot->dtype, spot->off};
    const struct ckpt_spot own = {f->source, s->dtype,
                                  s->off + spot->at * ckpt_dtype_size(s->dtype)};
    const size_t n = (size_t)ckpt_min_u64(SPOT, spot->n);
    size_t same = n;

    if (s->contiguous && ckpt_dtype_is_castable(s->dtype) && spot->at + n <= s->numel &&
        ckpt_spot_compare(&master, &own, n, &same, err) < 0)
        return -1;
    *ret = same == n;
    return 0;
}

int ckpt_ds_spot_check_part(const struct ckpt_ds_job *job, const struct ckpt_torch_file *f,
                            const char *file, const struct ckpt_torch_tensor *s,
                            const struct ckpt_ds_parts *masters, size_t index, struct ckpt_err *err)
{
    const struct ckpt_ds_parts *p = masters;
    const struct ckpt_ds_part *part = &p->part.ptr[index];
    const struct ckpt_ds_extent *e = &p->extent.ptr[part->first];
    uint64_t at = 0;
    bool same;

    for (size_t i = 0; i < part->n; at += e[i].n, i++) {
        const struct ckpt_ds_spot spot = {job->cat->sources.ptr[e[i].source], part->dtype, e[i].off,
                                          at, e[i].n};
        if (ckpt_ds_spot_same(f, s, &spot, &same, err) < 0)
            return -1;
        if (!same)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': the F32 master of '%s' in the optimizer files, rounded, is not "
                             "the weight in '%s': files of different saves",
                             ckpt_dir_path(job->dir), part->name, file);
    }
    return 0;
}

int ckpt_ds_spot_check(const struct ckpt_ds_zero *z, ckpt_pv module,
                       const struct ckpt_ds_parts *masters, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &z->model.p;
    const size_t n = ckpt_pv_npair(p, module), step = n / MOST_SPOTS + 1;
    struct ckpt_torch_tensor s;
    size_t at;

    for (size_t i = 0; i < n; i += step) {
        const char *name = ckpt_pv_str(p, ckpt_pv_key(p, module, i));
        if (!name || !ckpt_ds_zero_param(z, name) || !ckpt_ds_parts_find(masters, name, &at))
            continue;
        if (ckpt_torch_file_tensor(&z->model, ckpt_pv_value(p, module, i), &s, err) < 0 ||
            ckpt_ds_spot_check_part(z->job, &z->model, z->model_name, &s, masters, at, err) < 0)
            return -1;
    }
    return 0;
}
