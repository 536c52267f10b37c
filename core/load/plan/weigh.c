/* SPDX-License-Identifier: Apache-2.0 */
/* Computes how many bytes a job, its nodes and its ranks want, by replica group. */
#include "load/plan/weigh.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/sort.h"
#include "load/plan/plan.h"
#include "load/want/replicas.h"
#include "tensor/read.h"

/* A rank's coordinates in the grid of a placement; `in`: it is in the grid. */
struct position {
    bool in;
    uint32_t index[CKPT_GRID_DIMS];
};

static void find_positions(const struct ckpt_wants *w, uint32_t rank, struct position *position)
{
    for (size_t s = 0; s < w->specs.len; s++)
        position[s].in =
            ckpt_grid_index(&w->grids.ptr[w->specs.ptr[s].grid], rank, position[s].index);
}

int ckpt_load_needed(const struct ckpt_job_wants *job_wants, uint32_t rank, uint64_t *ret_bytes,
                     uint64_t *ret_stored, struct ckpt_err *err)
{
    const struct ckpt_wants *w = &job_wants->table[job_wants->class_of[rank]];
    ckpt_cleanup(ckpt_freep) struct position *position = calloc(w->specs.len + 1, sizeof *position);

    *ret_bytes = *ret_stored = 0;
    if (!position)
        return ckpt_nomem(err);
    find_positions(w, rank, position);
    for (size_t i = 0; i < w->entries.len; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        const struct ckpt_tensor *t = &job_wants->cat->tensors.ptr[e->tensor];
        if (e->spec != CKPT_NONE && !position[e->spec].in)
            continue;
        const uint64_t numel =
            ckpt_wants_numel(w, e, t, e->spec == CKPT_NONE ? NULL : position[e->spec].index);
        *ret_bytes += numel * ckpt_dtype_size(t->dtype);
        *ret_stored += numel * ckpt_dtype_size(ckpt_tensor_stored(t)->dtype);
    }
    return 0;
}

/* The bytes that each rank of a group wants: in the dtypes of the view, and as stored. */
struct weight {
    uint64_t needed, stored;
};

struct weighing {
    const struct ckpt_job_wants *job_wants;
    struct ckpt_replicas replicas;
    struct weight *weight;
    bool disjoint; /* no two groups want the same byte */
    /* results of unique_of, by a hash of the groups: nodes with the same groups want the same */
    struct {
        XXH128_hash_t groups;
        uint64_t unique;
    } * known;
    uint32_t nknown;
};

/* The stored bytes that these groups (ascending, no duplicates) want, counted once. */
static int unique_of(struct weighing *w, const uint32_t *group, uint32_t n, uint32_t *rank,
                     uint64_t *ret, struct ckpt_err *err)
{
    const XXH128_hash_t hash = XXH3_128bits(group, n * sizeof *group);

    if (w->disjoint) {
        *ret = 0;
        for (uint32_t i = 0; i < n; i++)
            *ret += w->weight[group[i]].stored;
        return 0;
    }
    for (uint32_t i = 0; i < w->nknown; i++)
        if (XXH128_isEqual(w->known[i].groups, hash)) {
            *ret = w->known[i].unique;
            return 0;
        }
    for (uint32_t i = 0; i < n; i++)
        rank[i] = w->replicas.rank[group[i]];
    if (ckpt_plan_bytes(w->job_wants, rank, n, ret, err) < 0)
        return -1;
    w->known[w->nknown].groups = hash;
    w->known[w->nknown++].unique = *ret;
    return 0;
}

/* Add one node, whose ranks are in the groups group[0..n). */
static int weigh_node(struct weighing *w, uint32_t *group, uint32_t n, uint32_t *rank,
                      struct ckpt_cost_input *in, struct ckpt_err *err)
{
    uint64_t needed = 0, unique;
    uint32_t out = 0;

    for (uint32_t i = 0; i < n; i++)
        needed += w->weight[group[i]].needed;
    qsort(group, n, sizeof *group, ckpt_u32s_cmp);
    for (uint32_t i = 0; i < n; i++)
        if (out == 0 || group[out - 1] != group[i])
            group[out++] = group[i];
    if (unique_of(w, group, out, rank, &unique, err) < 0)
        return -1;
    in->node_needed = ckpt_max_u64(in->node_needed, needed);
    in->node_unique = ckpt_max_u64(in->node_unique, unique);
    in->sum_node_unique += unique;
    return 0;
}

/* Add all nodes. first[nnode + 2], group[nrank] and rank[nrank] are room for lists. */
static int weigh_nodes(struct weighing *w, const uint32_t *node, uint32_t nnode, uint32_t *first,
                       uint32_t *group, uint32_t *rank, struct ckpt_cost_input *in,
                       struct ckpt_err *err)
{
    memset(first, 0, (nnode + 2) * sizeof *first);
    for (uint32_t r = 0; r < w->job_wants->nrank; r++)
        first[node[r]]++;
    for (uint32_t k = 1; k <= nnode; k++) /* ends, which the next loop turns into beginnings */
        first[k] += first[k - 1];
    for (uint32_t r = w->job_wants->nrank; r-- > 0;)
        group[--first[node[r]]] = w->replicas.of[r];
    for (uint32_t k = 0; k < nnode; k++)
        if (weigh_node(w, group + first[k], first[k + 1] - first[k], rank, in, err) < 0)
            return -1;
    return 0;
}

/* Number the cells: the ranks of one node in one group of options.share. */
static int number_cells(const struct ckpt_load_places *at, uint32_t nrank, uint32_t *cell,
                        uint32_t *ret_n)
{
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = malloc(((size_t)nrank + 1) * sizeof *key);

    if (!key)
        return -1;
    for (uint32_t r = 0; r < nrank; r++) {
        key[r][0] = at->node[r];
        key[r][1] = at->share[r];
    }
    return ckpt_map_number((const uint64_t(*)[2])key, nrank, cell, NULL, ret_n);
}

/* Compute shared_unique and node_shared_unique, for ranks that share only within a group of
 * options.share. Groups, and cells, are weighed as if they were nodes. */
static int weigh_shares(struct weighing *w, const struct ckpt_load_places *at, uint32_t *first,
                        uint32_t *group, uint32_t *rank, struct ckpt_cost_input *in,
                        struct ckpt_err *err)
{
    struct ckpt_cost_input shares = {0}, cells = {0};
    ckpt_cleanup(ckpt_freep) uint32_t *cell = malloc((w->job_wants->nrank + 1) * sizeof *cell);
    uint32_t ncell;

    if (!cell || number_cells(at, w->job_wants->nrank, cell, &ncell) < 0)
        return ckpt_nomem(err);
    if (weigh_nodes(w, at->share, at->nshare, first, group, rank, &shares, err) < 0 ||
        weigh_nodes(w, cell, ncell, first, group, rank, &cells, err) < 0)
        return -1;
    in->shared_unique = shares.sum_node_unique;
    in->node_shared_unique = ckpt_max_u64(in->node_unique, cells.sum_node_unique / at->nnode);
    return 0;
}

static int weigh(struct weighing *w, const struct ckpt_load_places *at, struct ckpt_cost_input *in,
                 struct ckpt_err *err)
{
    const uint32_t n = w->job_wants->nrank;
    ckpt_cleanup(ckpt_freep) uint32_t *first = malloc((n + 2) * sizeof *first);
    ckpt_cleanup(ckpt_freep) uint32_t *group = malloc((n + 1) * sizeof *group);
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc((n + 1) * sizeof *rank);
    uint64_t stored = 0;

    w->weight = calloc(w->replicas.n + 1, sizeof *w->weight);
    w->known = calloc(3 * (size_t)n + 1, sizeof *w->known);
    if (!first || !group || !rank || !w->weight || !w->known)
        return ckpt_nomem(err);
    for (uint32_t g = 0; g < w->replicas.n; g++) {
        if (ckpt_load_needed(w->job_wants, w->replicas.rank[g], &w->weight[g].needed,
                             &w->weight[g].stored, err) < 0)
            return -1;
        in->needed += w->weight[g].needed * w->replicas.count[g];
        stored += w->weight[g].stored;
    }
    if (ckpt_plan_bytes(w->job_wants, w->replicas.rank, w->replicas.n, &in->unique, err) < 0)
        return -1;
    w->disjoint = in->disjoint = stored == in->unique;
    if (weigh_nodes(w, at->node, at->nnode, first, group, rank, in, err) < 0)
        return -1;
    return at->nshare > 1 ? weigh_shares(w, at, first, group, rank, in, err) : 0;
}

int ckpt_load_weigh(const struct ckpt_job_wants *job_wants, const struct ckpt_load_places *at,
                    struct ckpt_cost_input *in, struct ckpt_err *err)
{
    struct weighing w = {.job_wants = job_wants};

    in->nrank = job_wants->nrank;
    in->nnode = at->nnode;
    if (ckpt_replicas_init(&w.replicas, job_wants, err) < 0)
        return -1;
    int rc = weigh(&w, at, in, err);
    ckpt_replicas_release(&w.replicas);
    free(w.weight);
    free(w.known);
    return rc;
}
