/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are spread over the checkpoint, divided among the ranks. */
#include "tensor/residency.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/par.h"
#include "io/source.h"
#include "tensor/catalog.h"

enum { FILES = 32 /* of the job; or one of each rank */, PRIME = 1000003 };

/* The files that a rank looks at, many at once: one that is opened for it may be far. */
struct looking {
    const struct ckpt_catalog *cat;
    size_t first; /* the rank's first file of the job's */
    struct ckpt_residency file[FILES];
};

static int look(void *ctx, size_t k, struct ckpt_err *err)
{
    struct looking *l = ctx;
    /* the ranks of a node are often consecutive: spread their files over the checkpoint */
    struct ckpt_source *s = l->cat->sources.ptr[(l->first + k) * PRIME % l->cat->sources.len];
    double part;
    bool shared;

    (void)err;
    if (ckpt_source_file_storage(s, &part, &shared))
        l->file[k] = (struct ckpt_residency){part * (double)s->size, (double)s->size, shared};
    return 0;
}

void ckpt_residency_estimate(const struct ckpt_catalog *cat, uint32_t rank, uint32_t size,
                             struct ckpt_residency *ret)
{
    const size_t share = FILES / size ? FILES / size : 1;
    const size_t n = share < cat->sources.len ? share : cat->sources.len;
    struct looking l = {.cat = cat, .first = rank * share};

    *ret = (struct ckpt_residency){0};
    (void)ckpt_parallel(n, 0, look, &l, NULL);
    for (size_t k = 0; k < n; k++) {
        ret->resident += l.file[k].resident;
        ret->bytes += l.file[k].bytes;
        ret->shared |= l.file[k].shared;
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
