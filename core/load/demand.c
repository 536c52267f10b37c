/* SPDX-License-Identifier: Apache-2.0 */
/* The boxes of a tensor that ranks want, sorted: what overlaps a box is found without looking at
 * all. */
#include "load/demand.h"

#include <stdlib.h>

#include "base/ckd.h"
#include "base/err.h"

static int add(ckpt_demands *out, const struct ckpt_wants *w, const struct ckpt_want *e,
               const struct ckpt_tensor *t, uint32_t rank, uint64_t ranks, struct ckpt_err *err)
{
    struct ckpt_demand d = {.ranks = ranks};

    if (ranks == 0 || !ckpt_wants_box(w, e, t, rank, &d.box))
        return 0;
    return ckpt_vec_push(out, d) < 0 ? ckpt_nomem(err) : 0;
}

static int box_cmp(const struct ckpt_box *a, const struct ckpt_box *b)
{
    for (uint32_t d = 0; d < a->rank; d++)
        if (a->lo[d] != b->lo[d])
            return a->lo[d] < b->lo[d] ? -1 : 1;
    for (uint32_t d = 0; d < a->rank; d++)
        if (a->n[d] != b->n[d])
            return a->n[d] < b->n[d] ? -1 : 1;
    return 0;
}

static int demand_cmp(const void *a, const void *b)
{
    return box_cmp(&((const struct ckpt_demand *)a)->box, &((const struct ckpt_demand *)b)->box);
}

static void sort(ckpt_demands *v)
{
    for (size_t i = 1; i < v->len; i++)
        if (demand_cmp(&v->ptr[i - 1], &v->ptr[i]) > 0) { /* most meshes count as boxes do */
            qsort(v->ptr, v->len, sizeof *v->ptr, demand_cmp);
            return;
        }
}

/* Equal boxes become one. */
static void join(ckpt_demands *v)
{
    size_t out = 0;

    for (size_t i = 0; i < v->len; i++) {
        const struct ckpt_box *box = &v->ptr[i].box;
        if (out > 0 && box_cmp(&v->ptr[out - 1].box, box) == 0) {
            v->ptr[out - 1].ranks += v->ptr[i].ranks;
            continue;
        }
        v->ptr[out] = v->ptr[i];
        if (box->rank > 0)
            v->ptr[out].reach =
                ckpt_max_u64(out > 0 ? v->ptr[out - 1].reach : 0, box->lo[0] + box->n[0]);
        out++;
    }
    v->len = out;
}

int ckpt_demand_of(const struct ckpt_domain *domain, uint32_t tensor, ckpt_demands *ret,
                   struct ckpt_err *err)
{
    const struct ckpt_roster *r = domain->roster;
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];

    ret->len = 0;
    for (uint64_t i = r->first[tensor]; i < r->first[tensor + 1]; i++) {
        const struct ckpt_wants *w = &r->table[r->use[i].class];
        const struct ckpt_want *e = &w->entries.ptr[r->use[i].entry];
        for (uint32_t g = 0; g < domain->replicas->n; g++) {
            const uint32_t rank = domain->replicas->rank[g];
            if (r->class_of[rank] == r->use[i].class &&
                add(ret, w, e, t, rank, domain->count[g], err) < 0)
                return -1;
        }
    }
    sort(ret);
    join(ret);
    return 0;
}

uint64_t ckpt_demand_numel(const ckpt_demands *v, const struct ckpt_box *box)
{
    size_t lo = 0, hi = v->len;
    uint64_t numel = 0;
    struct ckpt_box both;

    while (box->rank > 0 && lo < hi) { /* the first that reaches into the box */
        const size_t mid = lo + (hi - lo) / 2;
        if (v->ptr[mid].reach <= box->lo[0])
            lo = mid + 1;
        else
            hi = mid;
    }
    for (; lo < v->len; lo++) {
        if (box->rank > 0 && v->ptr[lo].box.lo[0] >= box->lo[0] + box->n[0])
            break;
        if (ckpt_box_intersect(&v->ptr[lo].box, box, &both))
            numel += ckpt_box_numel(&both) * v->ptr[lo].ranks;
    }
    return numel;
}
