/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the groups that exchange over a communicator of their own, if the transport has them
 * (NCCL, MPI). agree.c calls it on rank 0 when the ranks compare their plans.
 *
 * A communicator costs memory and time, so there are few. A division is a set of groups that have
 * no rank in common: all ranks make the communicators of a division together, by one split, in
 * which a group is a colour. There are at most CKPT_DIVISIONS. Groups with more bytes are served
 * first; the others exchange by sends and receives between pairs of ranks. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "device/device.h"

/* The fewest members of a group that is better off with a communicator than with pairs. */
enum { CKPT_DIVISION_LEAST = 3 };

/* One rank's statement that it is a member of a group. */
struct ckpt_group_claim {
    uint64_t group; /* hash of the group's ranks */
    uint64_t bytes; /* bytes that the group exchanges */
    uint32_t n;     /* number of members */
    uint32_t rank;  /* the rank that claims */
};

/* For qsort: groups with the most bytes first; the claims of a group stand together. */
int ckpt_group_claim_cmp(const void *a, const void *b);

/* A group that gets a communicator: its division, and its number in that division. */
struct ckpt_group_place {
    uint64_t group; /* hash of the group's ranks */
    uint32_t division, colour;
};
typedef CKPT_VEC(struct ckpt_group_place) ckpt_group_places;

/* Append the places of the groups that get a communicator, given the n claims of all nrank ranks,
 * which are sorted in place. A group gets none if not all of its members have claimed it, if it has
 * all ranks, or if no division has room for it. NOMEM. */
int ckpt_divisions_choose(struct ckpt_group_claim *claim, size_t n, uint32_t nrank,
                          ckpt_group_places *ret, struct ckpt_err *err);
