/* SPDX-License-Identifier: Apache-2.0 */
/* Wants: which boxes of which tensors a rank needs. A table holds them as boxes cut over grids of
 * ranks, so that the tables of ranks that say the same are equal, and travel once. */
#ifndef CKPT_LOAD_WANT_H
#define CKPT_LOAD_WANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { CKPT_GRID_DIMS = 8, CKPT_SPEC_CUTS = 8 };
#define CKPT_NONE UINT32_MAX

/* dim[0] x dim[1] ... ranks, row-major. */
struct ckpt_grid {
    uint32_t ndim, nrank;
    uint32_t dim[CKPT_GRID_DIMS];
    uint32_t *rank;
    uint32_t run, step; /* rank[i] == rank[0] + i / run * step + i % run; run 0: it is not so */
};

/* Divide tensor dimension `dim` of what the cuts before left into torch.chunk's pieces, one for
 * each index along `axis` of the grid. */
struct ckpt_cut {
    uint32_t dim, axis;
};

struct ckpt_spec {
    uint32_t grid, ncut;
    struct ckpt_cut cut[CKPT_SPEC_CUTS];
};

struct ckpt_want {
    uint32_t tensor; /* in the catalogue */
    uint32_t spec;   /* CKPT_NONE: not divided */
    uint32_t box;    /* CKPT_NONE: the whole tensor */
};

struct ckpt_wants {
    CKPT_VEC(struct ckpt_grid) grids;
    CKPT_VEC(struct ckpt_spec) specs;
    CKPT_VEC(struct ckpt_box) boxes;
    CKPT_VEC(struct ckpt_want) entries;
};

void ckpt_wants_release(struct ckpt_wants *w);

/* Add, or find an equal one; CKPT_NONE and NOMEM. `rank` has dim[0] * dim[1] ... entries. */
uint32_t ckpt_wants_grid(struct ckpt_wants *w, uint32_t ndim, const uint32_t *dim,
                         const uint32_t *rank, struct ckpt_err *err);
uint32_t ckpt_wants_spec(struct ckpt_wants *w, const struct ckpt_spec *spec, struct ckpt_err *err);
int ckpt_wants_add(struct ckpt_wants *w, uint32_t tensor, uint32_t spec, const struct ckpt_box *box,
                   struct ckpt_err *err);

/* Where a rank stands in a grid; CKPT_NONE if it is not in it. */
uint32_t ckpt_grid_find(const struct ckpt_grid *g, uint32_t rank);

/* The same, as coordinates; false if it is not in it. */
bool ckpt_grid_index(const struct ckpt_grid *g, uint32_t rank, uint32_t index[CKPT_GRID_DIMS]);

/* Which of the parts that a spec makes is a rank's, counted row-major by its cuts; CKPT_NONE if the
 * rank is not in its grid. Ranks of one part have the same box of every tensor. */
uint32_t ckpt_spec_part(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t rank);

/* The box of entry e for a rank, given the tensor's shape. False if it is empty. */
bool ckpt_wants_box(const struct ckpt_wants *w, const struct ckpt_want *e,
                    const struct ckpt_tensor *t, uint32_t rank, struct ckpt_box *ret);

/* The elements of that box, given the rank's coordinates in the grid of the entry's spec. */
uint64_t ckpt_wants_numel(const struct ckpt_wants *w, const struct ckpt_want *e,
                          const struct ckpt_tensor *t, const uint32_t *index);

/* Call fn for every part of entry e, whatever the rank, that has elements in common with `with`;
 * part: as ckpt_spec_part counts (0 if the entry is not divided). Stops, and returns, at what fn
 * returns if that is not 0. */
int ckpt_wants_parts(const struct ckpt_wants *w, const struct ckpt_want *e,
                     const struct ckpt_tensor *t, const struct ckpt_box *with,
                     int (*fn)(void *ctx, uint32_t part, const struct ckpt_box *box), void *ctx);

/* Call fn for every rank of a grid that has this part of a spec. */
int ckpt_spec_ranks(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t part,
                    int (*fn)(void *ctx, uint32_t rank), void *ctx);

/* As bytes: equal tables give equal bytes. The caller frees *ret. Parsing checks everything, also
 * against the catalogue. */
int ckpt_wants_dump(const struct ckpt_wants *w, unsigned char **ret, size_t *ret_len,
                    struct ckpt_err *err);
int ckpt_wants_parse(const void *data, size_t len, const struct ckpt_catalog *cat, uint32_t nrank,
                     struct ckpt_wants *ret, struct ckpt_err *err);

#endif
