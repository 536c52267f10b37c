/* SPDX-License-Identifier: Apache-2.0 */
/* Who wants what of a tensor, in a domain: its different boxes, and how many ranks want each. */
#ifndef CKPT_LOAD_DEMAND_H
#define CKPT_LOAD_DEMAND_H

#include <stdint.h>

#include "base/vec.h"
#include "load/replicas.h"
#include "tensor/box.h"

struct ckpt_demand {
    struct ckpt_box box;
    uint64_t ranks; /* that want it */
    uint64_t reach; /* where the furthest box so far ends along the first dimension */
};
typedef CKPT_VEC(struct ckpt_demand) ckpt_demands; /* by box.lo */

/* Replica groups of a domain: count[g] ranks of group g are in it. */
struct ckpt_domain {
    const struct ckpt_roster *roster;
    const struct ckpt_replicas *replicas;
    const uint32_t *count;
};

/* What a domain wants of a tensor. */
int ckpt_demand_of(const struct ckpt_domain *domain, uint32_t tensor, ckpt_demands *ret,
                   struct ckpt_err *err);

/* Elements of the box that ranks want, counted once for each rank. */
uint64_t ckpt_demand_numel(const ckpt_demands *demands, const struct ckpt_box *box);

#endif
