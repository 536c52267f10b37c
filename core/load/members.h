/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks want what groups.c finds: the ranks of each part of a placement, and groups of those
 * that have any of several parts. */
#ifndef CKPT_LOAD_MEMBERS_H
#define CKPT_LOAD_MEMBERS_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/map.h"
#include "base/vec.h"
#include "load/job_wants.h"

struct ckpt_group {
    uint32_t n, self; /* ranks; which of them this rank is */
    uint32_t *rank;   /* ascending */
};
typedef CKPT_VEC(struct ckpt_group) ckpt_groups;

/* Which ranks may share what they read: all (ONCE), those of one node (NODE), or none (EACH); of
 * these, those of one group of the caller's. */
struct ckpt_sharing {
    enum ckpt_readers readers;
    const uint32_t *node;  /* of each rank */
    const uint32_t *share; /* the caller's group of each rank; NULL: all are in one */
};

typedef CKPT_VEC(uint32_t) ckpt_numbers;

/* The ranks that have one part of a placement, or all of a class. */
struct ckpt_part_ranks {
    uint32_t class, spec, part; /* its key in the map */
    ckpt_numbers rank;
};

/* Lists of numbers, and what is known of each; the map's keys are the lists. */
struct ckpt_known_lists {
    struct ckpt_map map;
    CKPT_VEC(uint32_t *) list;
};

/* Remember a value for a list, if there is none yet; -1: no memory. */
int ckpt_lists_know(struct ckpt_known_lists *k, const uint32_t *list, size_t n, uint32_t value,
                    bool *ret_new);
void ckpt_lists_forget(struct ckpt_known_lists *k);

struct ckpt_members {
    const struct ckpt_job_wants *job_wants;
    const struct ckpt_sharing *sharing;
    uint32_t self;
    CKPT_VEC(struct ckpt_part_ranks *) parts;
    struct ckpt_map part_map, group_map; /* by class, spec and part; by ranks */
    struct ckpt_known_lists unions;      /* of parts: the group of their ranks */
    ckpt_groups *groups;
    struct ckpt_err *err;
};
void ckpt_members_release(struct ckpt_members *m);

/* Does a rank share what it reads with this one? */
bool ckpt_members_share(const struct ckpt_members *m, uint32_t rank);

/* The number of a part of an entry of a class, of which m->parts has the ranks; CKPT_NONE and *err.
 */
uint32_t ckpt_members_part(struct ckpt_members *m, uint32_t class, uint32_t entry, uint32_t part);

/* The group of all ranks that have one of these parts, which are sorted and of which each may stand
 * several times; CKPT_NONE and *err. */
uint32_t ckpt_members_group(struct ckpt_members *m, ckpt_numbers *part);

#endif
