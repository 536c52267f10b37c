/* SPDX-License-Identifier: Apache-2.0 */
/* Where a checkpoint's bytes are before a load: a look at a few of its files. */
#include "load/load_inner.h"

enum { FILES = 32 };

void ckpt_load_residency(const struct ckpt_catalog *cat, double *ret_hot, bool *ret_shared)
{
    const size_t n = cat->sources.len, step = n > FILES ? n / FILES : 1;
    double resident = 0, size = 0;

    *ret_shared = false;
    for (size_t i = 0; i < n; i += step) {
        double part;
        bool shared;
        if (!ckpt_source_file_storage(cat->sources.ptr[i], &part, &shared))
            continue;
        resident += part * (double)cat->sources.ptr[i]->size;
        size += (double)cat->sources.ptr[i]->size;
        *ret_shared |= shared;
    }
    *ret_hot = size > 0 ? resident / size : 1;
}
