/* SPDX-License-Identifier: Apache-2.0 */
/* Weighs the wants of ranks, group by group. */
#include "load/plan/weigh.h"

#include <stdlib.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "load/plan/groups.h"
#include "tensor/read.h"
#include "tensor/strided.h"

/* A rank's coordinates in the grid of a placement; `in`: it is in the grid. */
struct position {
    bool in;
    uint32_t index[CKPT_GRID_DIMS];
};

int ckpt_load_needed(const struct ckpt_job_wants *job_wants, uint32_t rank, uint64_t *ret_bytes,
                     uint64_t *ret_stored, struct ckpt_err *err)
{
    const struct ckpt_wants *w = &job_wants->table[job_wants->class_of[rank]];
    ckpt_cleanup(ckpt_freep) struct position *position = calloc(w->specs.len + 1, sizeof *position);

    *ret_bytes = *ret_stored = 0;
    if (!position)
        return ckpt_nomem(err);
    for (size_t s = 0; s < w->specs.len; s++)
        position[s].in =
            ckpt_grid_index(&w->grids.ptr[w->specs.ptr[s].grid], rank, position[s].index);
    for (size_t i = 0; i < w->entries.len; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        const struct ckpt_tensor *t = &job_wants->cat->tensors.ptr[e->tensor];
        if ((e->spec != CKPT_NONE && !position[e->spec].in) ||
            (job_wants->skip && job_wants->skip[e->tensor]))
            continue;
        const uint64_t numel =
            ckpt_wants_numel(w, e, t, e->spec == CKPT_NONE ? NULL : position[e->spec].index);
        *ret_bytes += numel * ckpt_dtype_size(t->dtype);
        *ret_stored += numel * ckpt_dtype_size(ckpt_tensor_stored(t)->dtype);
    }
    return 0;
}

/* Has every rank of the grid a part of its own? */
static bool divides_all(const struct ckpt_wants *w, const struct ckpt_spec *s)
{
    const struct ckpt_grid *g = &w->grids.ptr[s->grid];
    uint32_t cut = 0;

    for (uint32_t k = 0; k < s->ncut; k++)
        cut |= 1u << s->cut[k].axis;
    for (uint32_t d = 0; d < g->ndim; d++)
        if (g->dim[d] > 1 && !(cut >> d & 1))
            return false;
    return true;
}

bool ckpt_class_is_alone(const struct ckpt_job_wants *r, uint32_t class)
{
    const struct ckpt_wants *w = &r->table[class];

    if (w->form || r->next[class] != CKPT_NONE)
        return false;
    for (size_t i = 0; i < w->entries.len; i++) {
        const struct ckpt_want *e = &w->entries.ptr[i];
        if (e->spec == CKPT_NONE || r->first[e->tensor + 1] - r->first[e->tensor] != 1 ||
            !divides_all(w, &w->specs.ptr[e->spec]) ||
            ckpt_tensor_is_decoded(&r->cat->tensors.ptr[e->tensor]))
            return false;
    }
    return true;
}

/* Count a group at its first member, and at the first in each node. node_seen[nnode] has the last
 * `number` with which a node was met. */
static void add_group(const struct ckpt_weighing *w, const struct ckpt_group *g, uint64_t bytes,
                      bool shared, uint32_t *node_seen, uint32_t number)
{
    for (uint32_t i = 0; i < g->n; i++) {
        struct ckpt_weight *weight = &w->weight[g->rank[i]];
        uint32_t *seen = &node_seen[w->at->node[g->rank[i]]];
        const uint64_t once = i == 0 ? bytes : 0, in_node = *seen != number ? bytes : 0;
        *seen = number;
        *(shared ? &weight->shared : &weight->unique) += once;
        *(shared ? &weight->node_shared : &weight->node_unique) += in_node;
    }
}

static uint32_t count_nodes(const struct ckpt_weighing *w, const struct ckpt_group *g,
                            uint32_t *node_seen, uint32_t number)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < g->n; i++) {
        n += node_seen[w->at->node[g->rank[i]]] != number;
        node_seen[w->at->node[g->rank[i]]] = number;
    }
    return n;
}

/* Count a box of a group at its file; `shared`: a second rank of the node is in the group. */
static void use_file(struct ckpt_file_use *use, const struct ckpt_tensor *t,
                     const struct ckpt_box *box, uint64_t bytes, bool shared)
{
    uint64_t first, end, off;
    uint32_t source;

    ckpt_box_range(box, t->dim, &first, &end);
    if (!ckpt_tensor_place(t, first, &source, &off))
        return;
    use[source].wanted += bytes;
    use[source].again += shared ? bytes : 0;
}

static bool has_another_of_node(const struct ckpt_weighing *w, const struct ckpt_group *g,
                                uint32_t rank)
{
    for (uint32_t i = 0; i < g->n; i++)
        if (g->rank[i] != rank && w->at->node[g->rank[i]] == w->at->node[rank])
            return true;
    return false;
}

/* Find the groups of a rank and their stored bytes, and add those that are not known. */
static int add_groups(struct ckpt_weighing *w, uint32_t rank, bool shared, struct ckpt_err *err)
{
    const struct ckpt_sharing sharing = {CKPT_READERS_ONCE, w->at->node,
                                         shared ? w->at->share : NULL};
    ckpt_cleanup(ckpt_groups_release) ckpt_groups groups = {0};
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_group_boxes boxes = {0};
    ckpt_cleanup(ckpt_freep) uint64_t *bytes = NULL;
    ckpt_cleanup(ckpt_freep) uint32_t *seen = calloc((size_t)w->at->nnode + 1, sizeof *seen);

    if (ckpt_groups_find(w->job_wants, rank, &sharing, &groups, &boxes, err) < 0)
        return -1;
    if (!seen || !(bytes = calloc(groups.len + 1, sizeof *bytes)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < boxes.len; i++) {
        const struct ckpt_group_box *b = &boxes.ptr[i];
        const struct ckpt_tensor *t =
            ckpt_tensor_stored(&w->job_wants->cat->tensors.ptr[b->tensor]);
        const uint64_t len = ckpt_box_numel(&b->box) * ckpt_dtype_size(t->dtype);
        bytes[b->group] += len;
        if (w->use && !shared)
            use_file(w->use, t, &b->box, len, has_another_of_node(w, &groups.ptr[b->group], rank));
    }
    w->weight[rank].latency = 0;
    for (uint32_t g = 0; g < groups.len; g++) {
        const struct ckpt_group *group = &groups.ptr[g];
        bool new;
        w->weight[rank].latency +=
            ckpt_cost_latency(w->device, w->logarithmic, group->n,
                              count_nodes(w, group, seen, 2 * g + 1), bytes[g], w->sizes);
        if (ckpt_lists_know(&w->known[shared], group->rank, group->n, 0, &new) < 0)
            return ckpt_nomem(err);
        if (new)
            add_group(w, group, bytes[g], shared, seen, 2 * g + 2);
    }
    return 0;
}

int ckpt_load_weigh(struct ckpt_weighing *w, uint32_t rank, struct ckpt_err *err)
{
    struct ckpt_weight *own = &w->weight[rank];
    uint64_t stored;

    if (ckpt_load_needed(w->job_wants, rank, &own->needed, &stored, err) < 0)
        return -1;
    if (ckpt_class_is_alone(w->job_wants, w->job_wants->class_of[rank])) {
        own->unique = own->node_unique = own->shared = own->node_shared = stored;
        return 0;
    }
    if (add_groups(w, rank, false, err) < 0)
        return -1;
    return w->at->nshare > 1 ? add_groups(w, rank, true, err) : 0;
}

void ckpt_weighing_release(struct ckpt_weighing *w)
{
    ckpt_lists_forget(&w->known[0]);
    ckpt_lists_forget(&w->known[1]);
}

int ckpt_load_add_weights(const struct ckpt_weight *weight, uint32_t nrank,
                          const struct ckpt_load_places *at, struct ckpt_cost_input *in,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_weight *node = calloc((size_t)at->nnode + 1, sizeof *node);
    uint64_t shared = 0, cells = 0;

    if (!node)
        return ckpt_nomem(err);
    in->nrank = nrank;
    in->nnode = at->nnode;
    for (uint32_t r = 0; r < nrank; r++) {
        in->needed += weight[r].needed;
        in->unique += weight[r].unique;
        in->sum_node_unique += weight[r].node_unique;
        shared += weight[r].shared;
        cells += weight[r].node_shared;
        if (weight[r].latency > in->latency)
            in->latency = weight[r].latency;
        node[at->node[r]].needed += weight[r].needed;
        node[at->node[r]].unique += weight[r].node_unique;
    }
    for (uint32_t k = 0; k < at->nnode; k++) {
        in->node_needed = ckpt_max_u64(in->node_needed, node[k].needed);
        in->node_unique = ckpt_max_u64(in->node_unique, node[k].unique);
    }
    if (at->nshare > 1) {
        in->shared_unique = shared;
        in->node_shared_unique = ckpt_max_u64(in->node_unique, cells / at->nnode);
    }
    return 0;
}
