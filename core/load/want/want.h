/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of wants: which boxes of which tensors a rank needs. load.c and layout.c fill a table as
 * wants are declared; agree.c exchanges the tables of all ranks; groups.c and weigh.c ask which
 * rank wants which box.
 *
 * An entry is a box of a tensor that is divided over a grid of ranks, and does not say which part
 * is this rank's. So ranks that declare the same placements over the same meshes have equal tables,
 * and equal tables are sent once. Ranks that declare boxes one by one differ in the numbers of the
 * boxes alone: all else, the form of a table, is sent and kept once for all of them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { CKPT_GRID_DIMS = 8, CKPT_SPEC_CUTS = 8 }; /* the most dimensions and cuts */

/* A mesh of dim[0] x dim[1] x ... ranks in row-major order. */
struct ckpt_grid {
    uint32_t ndim;
    uint32_t nrank; /* product of dim[] */
    uint32_t dim[CKPT_GRID_DIMS];
    uint32_t *rank;     /* the ranks; owned */
    uint32_t run, step; /* if run is not 0, rank[i] == rank[0] + i / run * step + i % run */
};

/* Divide dimension `dim` of the box that the cuts before have left, as torch.chunk does, into one
 * part for each index along dimension `axis` of the grid. */
struct ckpt_division {
    uint32_t dim, axis;
};

/* A placement: a grid, and the cuts that divide a box over it. */
struct ckpt_spec {
    uint32_t grid, ncut;
    struct ckpt_division cut[CKPT_SPEC_CUTS];
};

/* An entry of the table. */
struct ckpt_want {
    uint32_t tensor; /* in the catalogue */
    uint32_t spec;   /* CKPT_NONE: not divided */
    uint32_t dims;   /* bit d: the box is an interval of dimension d; else it has all of d */
    uint32_t box;    /* where ckpt_wants.boxes has the intervals */
    uint32_t dtype;  /* of the destination, enum ckpt_dtype; CKPT_NONE: as in the view */
};

struct ckpt_wants {
    CKPT_VEC(struct ckpt_grid) grids;
    CKPT_VEC(struct ckpt_spec) specs;
    CKPT_VEC(struct ckpt_want) entries;
    CKPT_VEC(uint64_t) boxes; /* intervals: the first index, the number of indices */
    /* NULL, or the table that owns the grids, specs and entries of this one, too. */
    const struct ckpt_wants *form;
};

/* A table in serialized form: first `form` bytes, which another table may share, then its boxes. */
struct ckpt_table {
    unsigned char *data;
    size_t len, form;
};

/* Free what w owns, not w itself. */
void ckpt_wants_release(struct ckpt_wants *w);

/* Add a grid, unless there is an equal one; returns its index. dim[ndim] and rank[dim[0] * dim[1] *
 * ...] are copied. CKPT_NONE and *err: no memory. */
uint32_t ckpt_wants_grid(struct ckpt_wants *w, uint32_t ndim, const uint32_t *dim,
                         const uint32_t *rank, struct ckpt_err *err);

/* Add a placement, which is copied, unless there is an equal one; returns its index. CKPT_NONE and
 * *err: no memory. */
uint32_t ckpt_wants_spec(struct ckpt_wants *w, const struct ckpt_spec *spec, struct ckpt_err *err);

/* Append an entry: `box` (copied; NULL: the whole) of a tensor of the catalogue, divided by `spec`
 * (CKPT_NONE: not divided). NOMEM. */
int ckpt_wants_add(struct ckpt_wants *w, const struct ckpt_catalog *cat, uint32_t tensor,
                   uint32_t spec, const struct ckpt_box *box, struct ckpt_err *err);

/* The index of a rank in a grid; CKPT_NONE: it is not in the grid. */
uint32_t ckpt_grid_find(const struct ckpt_grid *g, uint32_t rank);

/* The coordinates of a rank in a grid; false: it is not in the grid. */
bool ckpt_grid_index(const struct ckpt_grid *g, uint32_t rank, uint32_t index[CKPT_GRID_DIMS]);

/* The number of the part that a placement gives to a rank, in row-major order of the cuts. Ranks
 * with the same part have the same box of every tensor. CKPT_NONE: the rank is not in the grid. */
uint32_t ckpt_spec_part(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t rank);

/* Compute the box of tensor t that entry e gives to a rank. False: the box has no elements, or the
 * rank is not in the grid. */
bool ckpt_wants_box(const struct ckpt_wants *w, const struct ckpt_want *e,
                    const struct ckpt_tensor *t, uint32_t rank, struct ckpt_box *ret);

/* The number of elements of that box, for a rank with these coordinates in the grid of the entry's
 * placement (NULL: the entry is not divided). */
uint64_t ckpt_wants_numel(const struct ckpt_wants *w, const struct ckpt_want *e,
                          const struct ckpt_tensor *t, const uint32_t *index);

/* Call fn for each part of entry e that has elements in common with the box `with`. `part` is the
 * number of ckpt_spec_part, or 0 if the entry is not divided. Stops when fn returns something other
 * than 0, and returns that. */
int ckpt_wants_parts(const struct ckpt_wants *w, const struct ckpt_want *e,
                     const struct ckpt_tensor *t, const struct ckpt_box *with,
                     int (*fn)(void *ctx, uint32_t part, const struct ckpt_box *box), void *ctx);

/* Call fn for each rank of the grid to which a placement gives this part. Stops as
 * ckpt_wants_parts. */
int ckpt_spec_ranks(const struct ckpt_wants *w, const struct ckpt_spec *s, uint32_t part,
                    int (*fn)(void *ctx, uint32_t rank), void *ctx);

/* Serialize a table: equal tables give equal bytes, and tables whose boxes have other numbers give
 * equal forms. The caller frees ret->data. NOMEM. */
int ckpt_wants_dump(const struct ckpt_wants *w, const struct ckpt_catalog *cat,
                    struct ckpt_table *ret, struct ckpt_err *err);

/* Parse a table from another rank, and check all numbers in it, also against the catalogue and the
 * number of ranks. If `form` is given, the bytes are the boxes alone of a table that has the form
 * of that one, which must outlive it. FORMAT. */
int ckpt_wants_parse(const void *data, size_t len, const struct ckpt_catalog *cat, uint32_t nrank,
                     const struct ckpt_wants *form, struct ckpt_wants *ret, struct ckpt_err *err);

/* Find out whether any rank wants by table w an element that `rank` wants by table `own`. NOMEM. */
int ckpt_wants_meet(const struct ckpt_wants *w, const struct ckpt_wants *own,
                    const struct ckpt_catalog *cat, uint32_t rank, bool *ret, struct ckpt_err *err);

/* The bytes of memory that a table owns. */
uint64_t ckpt_wants_memory(const struct ckpt_wants *w);

/* ---- layouts such as "tp=2,pp=2" (layout.c) ---- */

/* How many ranks a layout is for. USAGE: not a layout, or of too many ranks. */
int ckpt_layout_ranks(const char *layout, uint32_t *ret, struct ckpt_err *err);

/* The class of a rank: all ranks of a class have the same table of wants. USAGE: not a layout, or
 * not one of nrank ranks. */
int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err);

struct ckpt_view;
/* Add to w the wants of a rank (ckpt_load_want_layout). On failure w may have some of them. */
int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err);
