/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are spread over the checkpoint, divided among the ranks. */
#include "tensor/residency.h"

#include <stdlib.h>

#include "base/mem.h"
#include "io/source.h"
#include "tensor/catalog.h"

enum { FILES = 32 /* of the job; or one of each rank */, PRIME = 1000003 };

void ckpt_residency_estimate(const struct ckpt_catalog *cat, uint32_t rank, uint32_t size,
                             struct ckpt_residency *ret)
{
    const size_t n = cat->sources.len, share = FILES / size ? FILES / size : 1;

    *ret = (struct ckpt_residency){0};
    for (size_t k = 0; k < share && k < n; k++) {
        /* the ranks of a node are often consecutive: spread their files over the checkpoint */
        struct ckpt_source *s = cat->sources.ptr[(rank * share + k) * PRIME % n];
        double part;
        bool shared;
        if (!ckpt_source_file_storage(s, &part, &shared))
            continue;
        ret->resident += part * (double)s->size;
        ret->bytes += (double)s->size;
        ret->shared |= shared;
    }
}

double ckpt_residency_part(const struct ckpt_residency *r)
{
    return r->bytes > 0 ? r->resident / r->bytes : 1;
}

int ckpt_residency_least(const struct ckpt_residency *of, uint32_t n, const uint32_t *node_of,
                         uint32_t nnode, double *ret)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_residency *node = calloc(nnode, sizeof *node);

    if (!node)
        return -1;
    for (uint32_t r = 0; r < n; r++) {
        node[node_of[r]].resident += of[r].resident;
        node[node_of[r]].bytes += of[r].bytes;
    }
    *ret = 1;
    for (uint32_t k = 0; k < nnode; k++) {
        const double part = ckpt_residency_part(&node[k]);
        *ret = part < *ret ? part : *ret;
    }
    return 0;
}
