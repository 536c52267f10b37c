/* SPDX-License-Identifier: Apache-2.0 */
/* Divides groups into divisions, greedily. */
#include "load/plan/divisions.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/sort.h"

int ckpt_group_claim_cmp(const void *pa, const void *pb)
{
    const struct ckpt_group_claim *a = pa, *b = pb;
    int c = ckpt_u64_cmp(b->bytes, a->bytes);

    c = c ? c : ckpt_u64_cmp(a->group, b->group);
    return c ? c : ckpt_u64_cmp(a->rank, b->rank);
}

/* The first division in which none of the n claimants has a group yet; CKPT_DIVISIONS: there is
 * none. taken has a bit per division for each rank. */
static uint32_t free_division(const uint8_t *taken, const struct ckpt_group_claim *claim,
                              uint32_t n)
{
    uint8_t any = 0;
    uint32_t division = 0;

    for (uint32_t i = 0; i < n; i++)
        any |= taken[claim[i].rank];
    while (division < CKPT_DIVISIONS && any >> division & 1)
        division++;
    return division;
}

int ckpt_divisions_choose(struct ckpt_group_claim *claim, size_t n, uint32_t nrank,
                          ckpt_group_places *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint8_t *taken = calloc((size_t)nrank + 1, sizeof *taken);
    uint32_t colours[CKPT_DIVISIONS] = {0};

    if (!taken)
        return ckpt_nomem(err);
    ckpt_sort(claim, n, ckpt_group_claim_cmp);
    for (size_t lo = 0, hi; lo < n; lo = hi) {
        for (hi = lo; hi < n && claim[hi].group == claim[lo].group;)
            hi++;
        const uint32_t members = claim[lo].n;
        if (members >= nrank || hi - lo != members)
            continue;
        const uint32_t division = free_division(taken, &claim[lo], members);
        if (division == CKPT_DIVISIONS)
            continue;
        const struct ckpt_group_place place = {claim[lo].group, division, colours[division]++};
        if (ckpt_vec_push(ret, place) < 0)
            return ckpt_nomem(err);
        for (size_t i = lo; i < hi; i++)
            taken[claim[i].rank] |= (uint8_t)(1 << division);
    }
    return 0;
}
