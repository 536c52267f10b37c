/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of one rank: what it reads, for whom, and in which order everything travels. agree.c
 * makes it after the ranks have agreed on the job, engine.h executes it, and model.c makes it for
 * `ckpt plan`. It follows from the wants of all ranks and the catalogue alone. A rank plans only
 * the groups of which it is a member, and all members of a group come to the same plan of that
 * group.
 *
 * The boxes of a group (groups.h) are its regions. They are cut into units, boxes that are read
 * whole, in the order of the files. Some members of the group are its readers: each owns a
 * contiguous run of units, with equal numbers of bytes, and reads it in pieces. A piece is sent to
 * all members of the group (broadcast.h). A window is the unit of exchange of a group: one piece of
 * each of some readers, which take turns. Every rank goes through its windows in the same order, by
 * number and then by group, so that no ranks wait for each other in a circle. Bytes that only one
 * rank wants form a group of one member, which reads them and exchanges nothing. */
#ifndef CKPT_LOAD_PLAN_PLAN_H
#define CKPT_LOAD_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/plan/broadcast.h"
#include "load/plan/groups.h"
#include "load/want/job_wants.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { CKPT_UNIT_ALIGN = 64 }; /* bytes to which a unit is rounded up in a buffer */

/* A box of a group, and how it is cut into units: every index of the dimensions order[0] ..
 * order[cut - 1], times `parts` ranges of `step` indices of dimension order[cut], times all of the
 * other dimensions. */
struct ckpt_region {
    struct ckpt_box box;
    uint32_t tensor; /* in the catalogue */
    uint32_t group;  /* in ckpt_plan.groups */
    uint32_t nunit;
    uint8_t order[CKPT_MAX_RANK]; /* dimensions, in descending order of their stride in the file */
    uint8_t cut;
    uint64_t step, parts;
};

struct ckpt_unit {
    uint32_t region;
    uint32_t ordinal; /* number of the unit in its region */
    uint32_t source;  /* file of its first element, in the catalogue; UINT32_MAX: not known */
    uint32_t len;     /* bytes in a buffer, a multiple of CKPT_UNIT_ALIGN */
    uint64_t off;     /* offset of its first element in the file; if there is none, a sort key */
};

/* Units that one reader reads one after the other into one buffer. */
struct ckpt_piece_plan {
    uint32_t group;
    uint32_t number; /* number of its window within the group */
    uint32_t reader; /* index in the group */
    uint32_t lo, hi; /* units [lo, hi) */
    uint32_t len;    /* bytes */
};

/* The pieces [lo, hi), which a group exchanges together. */
struct ckpt_window {
    uint32_t group;
    uint32_t number; /* within the group */
    uint32_t lo, hi;
};

/* Limits in bytes; equal on all ranks that share what they read. */
struct ckpt_plan_sizes {
    uint64_t unit;   /* of a unit; exceeded only by a single element that is larger */
    uint64_t piece;  /* of a piece; >= unit */
    uint64_t window; /* of all pieces of a window; exceeded only by a single piece */
};

struct ckpt_plan {
    const struct ckpt_job_wants *job_wants; /* borrowed; must outlive the plan */
    uint32_t self;                          /* the rank whose plan this is */
    struct ckpt_plan_sizes sizes;
    ckpt_groups groups;               /* of which this rank is a member */
    struct ckpt_broadcast *broadcast; /* per group */
    uint8_t *family; /* per group: 1 + the family of its communicator (families.h); 0: none */
    CKPT_VEC(struct ckpt_region) regions;    /* ordered by tensor */
    CKPT_VEC(struct ckpt_unit) units;        /* by group, then in the order of the files */
    CKPT_VEC(struct ckpt_piece_plan) pieces; /* by number, group and reader */
    CKPT_VEC(struct ckpt_window) windows;    /* of groups of several ranks, in order */
    CKPT_VEC(uint32_t) own;                  /* the pieces that this rank reads, in order */
};

/* Make the plan of rank `self`. job_wants is borrowed for the life of the plan, sharing for this
 * call. star: as ckpt_broadcast_init. LIMIT: there would be too many units, or a unit of 4 GiB. */
int ckpt_plan_new(const struct ckpt_job_wants *job_wants, uint32_t self,
                  const struct ckpt_sharing *sharing, bool star,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret,
                  struct ckpt_err *err);

/* Free a plan; NULL is allowed. */
void ckpt_plan_free(struct ckpt_plan *p);

/* The size of the plan itself in memory, in bytes. */
uint64_t ckpt_plan_memory(const struct ckpt_plan *p);

/* This rank's part in the check that the members of groups have planned alike. The parts of all
 * ranks add up to 0 (modulo 2^64) if all members of every group have the group, and the same plan
 * of it; otherwise they do so only by a chance of about 2^-64. NOMEM. */
int ckpt_plan_claim(const struct ckpt_plan *p, uint64_t *ret, struct ckpt_err *err);

/* The box of a unit. */
void ckpt_plan_unit_box(const struct ckpt_plan *p, uint32_t unit, struct ckpt_box *ret);

/* The tensor of a unit. */
const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit);

/* The number of stored bytes that at least one of the given ranks wants, counted once. It needs no
 * plan: weigh.c calls it. */
int ckpt_plan_bytes(const struct ckpt_job_wants *job_wants, const uint32_t *rank, uint32_t nrank,
                    uint64_t *ret, struct ckpt_err *err);

/* The part of a unit that belongs to one want of this rank. */
struct ckpt_part {
    uint32_t entry;      /* number of the want */
    uint64_t bytes;      /* in the dtype of the view */
    struct ckpt_box box; /* in the tensor */
};
typedef CKPT_VEC(struct ckpt_part) ckpt_parts;

/* Append the parts of a unit that this rank wants, one for each want that overlaps with it.
 * unit_box is the unit's box. NOMEM. */
int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t unit, const struct ckpt_box *unit_box,
                     ckpt_parts *out, struct ckpt_err *err);

#endif
