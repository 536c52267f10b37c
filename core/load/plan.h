/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of one rank: what it reads, for whom, and in which order all of it travels. It is made
 * from what all ranks want and from the catalogue alone; a rank plans the groups that it is in, and
 * all members of a group come to the same plan of it.
 *
 * A group's boxes are cut into units, small boxes that are read whole, in the order of the files.
 * Some members are its readers, and have contiguous runs of units with equal bytes; they read them
 * in pieces. A piece goes to all members of the group. A window is what a group exchanges at a
 * time: one piece of some of its readers, who take turns. Ranks go through their windows in one
 * order that is the same everywhere, by number and then by group, so nobody waits in a circle. What
 * a rank alone wants is a group of its own, of which nothing is exchanged. */
#ifndef CKPT_LOAD_PLAN_H
#define CKPT_LOAD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/groups.h"
#include "load/job_wants.h"
#include "load/relay.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { CKPT_UNIT_ALIGN = 64 };

struct ckpt_region {
    struct ckpt_box box;
    uint32_t tensor, group;
    uint32_t nunit;
    uint8_t order[CKPT_MAX_RANK]; /* dimensions, the one with the widest step in the file first */
    uint8_t cut;                  /* order[0..cut) are taken one by one, order[cut] in steps */
    uint64_t step, parts;
};

struct ckpt_unit {
    uint32_t region, ordinal;
    uint32_t source; /* where its first element lies */
    uint32_t len;    /* bytes in a buffer, a multiple of CKPT_UNIT_ALIGN */
    uint64_t off;
};

/* Units that a member of a group reads together, one behind the other in a buffer. */
struct ckpt_piece_plan {
    uint32_t group, number; /* of the window in its group */
    uint32_t reader;        /* an index in the group */
    uint32_t lo, hi;        /* units */
    uint32_t len;           /* bytes */
};

/* What a group exchanges at a time. */
struct ckpt_window {
    uint32_t group, number;
    uint32_t lo, hi; /* pieces */
};

/* The same on all ranks that share what they read. */
struct ckpt_plan_sizes {
    uint64_t unit;   /* bytes of a unit at most (more only where an element is larger) */
    uint64_t piece;  /* bytes of a piece at most; >= unit */
    uint64_t window; /* bytes of the pieces of one window at most, if there are several */
};

struct ckpt_plan {
    const struct ckpt_job_wants *job_wants;
    uint32_t self;
    struct ckpt_plan_sizes sizes;
    ckpt_groups groups;
    struct ckpt_relay *relay; /* of each group */
    uint8_t *family; /* of each group: 1 + the family of its communicator (families.h), or 0 */
    CKPT_VEC(struct ckpt_region) regions;    /* by tensor */
    CKPT_VEC(struct ckpt_unit) units;        /* by group, then in the order of the files */
    CKPT_VEC(struct ckpt_piece_plan) pieces; /* by number, group, reader */
    CKPT_VEC(struct ckpt_window) windows;    /* of groups of several ranks, in their order */
    CKPT_VEC(uint32_t) own;                  /* the pieces that this rank reads, in their order */
};

/* node: of each rank; star: as ckpt_relay_init. */
int ckpt_plan_new(const struct ckpt_job_wants *job_wants, uint32_t self,
                  const struct ckpt_sharing *sharing, bool star,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret,
                  struct ckpt_err *err);
void ckpt_plan_free(struct ckpt_plan *p);

/* Bytes that the plan takes. */
uint64_t ckpt_plan_memory(const struct ckpt_plan *p);

/* A hash over all that the members of a group must agree on. */
uint64_t ckpt_plan_digest(const struct ckpt_plan *p, uint32_t group);

void ckpt_plan_unit_box(const struct ckpt_plan *p, uint32_t unit, struct ckpt_box *ret);
const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit);

/* Bytes of storage that hold what anybody of these ranks wants, counted once. */
int ckpt_plan_bytes(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    uint64_t *ret, struct ckpt_err *err);

/* A part of a unit that a want has. */
struct ckpt_part {
    uint32_t entry; /* in the table of the rank */
    uint64_t bytes;
    struct ckpt_box box; /* in the tensor */
};
typedef CKPT_VEC(struct ckpt_part) ckpt_parts;

/* Append what this rank wants of one unit. */
int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t unit, const struct ckpt_box *unit_box,
                     ckpt_parts *out, struct ckpt_err *err);

#endif
