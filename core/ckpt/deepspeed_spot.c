/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a few elements. */
#include "ckpt/deepspeed_spot.h"

#include <string.h>

#include "base/ckd.h"

enum { MOST_SPOTS = 256, SPOT = 16, WIDEST = 8 };

/* Is the element a NaN? Rounding can change the payload of a NaN. */
static bool is_nan(const unsigned char *bytes, enum ckpt_dtype dtype)
{
    double wide;

    ckpt_dtype_cast(&wide, CKPT_F64, bytes, dtype, 1);
    return wide != wide;
}

static bool same_elements(const unsigned char *a, const unsigned char *b, enum ckpt_dtype dtype,
                          size_t n)
{
    const size_t esize = ckpt_dtype_size(dtype);

    for (size_t i = 0; i < n; i++, a += esize, b += esize)
        if (memcmp(a, b, esize) != 0 && !(is_nan(a, dtype) && is_nan(b, dtype)))
            return false;
    return true;
}

int ckpt_ds_spot_same(const struct ckpt_ds_file *f, const struct ckpt_ds_stored *s,
                      const struct ckpt_ds_spot *spot, bool *ret, struct ckpt_err *err)
{
    unsigned char master[SPOT * WIDEST], rounded[SPOT * WIDEST], own[SPOT * WIDEST];
    const size_t n = (size_t)ckpt_min_u64(SPOT, spot->n), esize = ckpt_dtype_size(s->dtype);

    *ret = true;
    if (!s->contiguous || !ckpt_dtype_is_castable(s->dtype) || spot->at + n > s->numel)
        return 0;
    if (ckpt_source_pread(spot->source, master, n * ckpt_dtype_size(spot->dtype), spot->off, err) <
            0 ||
        ckpt_source_pread(f->source, own, n * esize, s->off + spot->at * esize, err) < 0)
        return -1;
    if (spot->dtype == s->dtype)
        memcpy(rounded, master, n * esize);
    else
        ckpt_dtype_cast(rounded, s->dtype, master, spot->dtype, n);
    *ret = same_elements(rounded, own, s->dtype, n);
    return 0;
}

int ckpt_ds_spot_check_part(const struct ckpt_ds_job *job, const struct ckpt_ds_file *f,
                            const char *file, const struct ckpt_ds_stored *s,
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
    const struct ckpt_pickle *p = &z->model->p;
    const size_t n = ckpt_pv_npair(p, module), step = n / MOST_SPOTS + 1;
    struct ckpt_ds_stored s;
    size_t at;

    for (size_t i = 0; i < n; i += step) {
        const char *name = ckpt_pv_str(p, ckpt_pv_key(p, module, i));
        if (!name || !ckpt_ds_zero_param(z, name) || !ckpt_ds_parts_find(masters, name, &at))
            continue;
        if (ckpt_ds_file_tensor(z->model, ckpt_pv_value(p, module, i), &s, err) < 0 ||
            ckpt_ds_spot_check_part(z->job, z->model, z->model_name, &s, masters, at, err) < 0)
            return -1;
    }
    return 0;
}
