/* SPDX-License-Identifier: Apache-2.0 */
/* Which groups exchange over a communicator of their own, where ranks have devices. Communicators
 * cost memory and time, so there are few: each family is a division of some ranks into groups that
 * have no rank in common, and is made in one step by all ranks. The groups with the most bytes are
 * served first; the others send and receive in pairs. */
#ifndef CKPT_LOAD_FAMILIES_H
#define CKPT_LOAD_FAMILIES_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"

enum { CKPT_FAMILIES = 4, CKPT_FAMILY_LEAST = 3 }; /* in smaller groups, pairs are as good */

/* A rank says that it is a member of a group. */
struct ckpt_group_claim {
    uint64_t group; /* a hash of its ranks */
    uint64_t bytes; /* that the group exchanges */
    uint32_t n;     /* members */
    uint32_t rank;
};

/* The place of a group: its number among those of its family. */
struct ckpt_group_place {
    uint64_t group;
    uint32_t family, colour;
};
typedef CKPT_VEC(struct ckpt_group_place) ckpt_group_places;

/* Choose, given the claims of all nrank ranks, which are sorted here. Groups whose members have not
 * all claimed, that are too small, or that have all ranks, get no place. */
int ckpt_families_choose(struct ckpt_group_claim *claim, size_t n, uint32_t nrank,
                         ckpt_group_places *ret, struct ckpt_err *err);

#endif
