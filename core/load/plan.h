/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of one domain: ranks that share what they read. A pure function of what all ranks want
 * and of the catalogue, so every rank of the domain computes the same one.
 *
 * What anybody of the domain wants is a set of regions (disjoint boxes of tensors). They are cut
 * into units, small boxes that are read whole, which stand in the order of the files. Owners get
 * contiguous runs of units with equal bytes; a window is one piece of the runs of some owners, who
 * take turns: of every `turns`-th owner. The domain of one rank is that rank reading for itself; of
 * all ranks, every byte read once per job. */
#ifndef CKPT_LOAD_PLAN_H
#define CKPT_LOAD_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/want.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

/* What all ranks want: equal tables are one class. Borrowed by plans. */
struct ckpt_roster {
    const struct ckpt_catalog *cat;
    uint32_t nrank, nclass;
    uint32_t *class_of;       /* per rank */
    struct ckpt_wants *table; /* per class */
    /* wants of a tensor: use[first[t]] .. use[first[t+1]], by class, then by entry */
    uint64_t *first;
    struct ckpt_use {
        uint32_t class, entry;
    } * use;
};

/* Takes table and class_of (malloc'ed), whatever comes of it. */
int ckpt_roster_init(struct ckpt_roster *r, const struct ckpt_catalog *cat, uint32_t nrank,
                     uint32_t *class_of, struct ckpt_wants *table, uint32_t nclass,
                     struct ckpt_err *err);
void ckpt_roster_release(struct ckpt_roster *r);

/* The uses of a tensor by a class are use[*ret_lo] .. use[return value]. */
uint64_t ckpt_roster_uses(const struct ckpt_roster *r, uint32_t tensor, uint32_t class,
                          uint64_t *ret_lo);

struct ckpt_region {
    struct ckpt_box box;
    uint32_t tensor;
    uint32_t nunit;
    uint8_t order[CKPT_MAX_RANK]; /* dimensions, the one with the widest step in the file first */
    uint8_t cut;                  /* order[0..cut) are taken one by one, order[cut] in steps */
    uint64_t step, parts;
};

struct ckpt_unit {
    uint32_t region, ordinal;
    uint32_t source; /* where its first element lies */
    uint64_t off;
};

struct ckpt_plan_sizes {
    uint64_t unit;   /* bytes of a unit at most (more only where an element is larger) */
    uint64_t piece;  /* bytes that one owner reads for one window; >= unit */
    uint64_t common; /* 1: what every rank of the domain wants whole is told apart */
    uint64_t turns;  /* owners take turns: each has a piece in every `turns`-th window; 0: as 1 */
};

struct ckpt_plan {
    const struct ckpt_roster *roster;
    uint32_t nowner;
    uint32_t *owner; /* ranks, ascending */
    struct ckpt_plan_sizes sizes;
    CKPT_VEC(struct ckpt_region) regions; /* by tensor */
    CKPT_VEC(struct ckpt_unit) units;     /* in the order of the files */
    uint64_t *region_unit_first; /* units of region i are region_unit[first[i]] ... by ordinal */
    uint32_t *region_unit;
    uint32_t *tensor_region; /* regions of tensor t are tensor_region[t] .. tensor_region[t+1] */
    uint32_t *owner_unit;    /* owner o reads units owner_unit[o] .. owner_unit[o+1] */
    uint32_t nwindow;
    uint32_t *piece_first;         /* owner o's pieces begin at piece_unit[piece_first[o]] */
    CKPT_VEC(uint32_t) piece_unit; /* first unit of a piece; and the end of the owner's run */
    uint64_t bytes;                /* that the domain reads */
    bool *common;                  /* per unit; NULL: none is */
};

/* The plan of the domain of these ranks (ascending). */
int ckpt_plan_new(const struct ckpt_roster *roster, const uint32_t *rank, uint32_t nrank,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret,
                  struct ckpt_err *err);
void ckpt_plan_free(struct ckpt_plan *p);

/* Bytes of storage that hold what anybody of these ranks wants, counted once. */
int ckpt_plan_bytes(const struct ckpt_roster *roster, const uint32_t *rank, uint32_t nrank,
                    uint64_t *ret, struct ckpt_err *err);

/* A hash over all that ranks must agree on. */
uint64_t ckpt_plan_digest(const struct ckpt_plan *p);

void ckpt_plan_unit_box(const struct ckpt_plan *p, uint32_t unit, struct ckpt_box *ret);
const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit);

/* The units that owner o reads for a window: [*ret_lo, *ret_hi). */
void ckpt_plan_piece(const struct ckpt_plan *p, uint32_t o, uint32_t window, uint32_t *ret_lo,
                     uint32_t *ret_hi);

/* Which owner, and which of its windows, a unit belongs to. */
void ckpt_plan_find(const struct ckpt_plan *p, uint32_t unit, uint32_t *ret_owner,
                    uint32_t *ret_window);

/* Do all ranks of the domain want all of the unit? Such units are broadcast, and not among sends
 * and receives. The next run of them in [lo, hi): false if there is none. */
static inline bool ckpt_plan_is_common(const struct ckpt_plan *p, uint32_t unit)
{
    return p->common && p->common[unit];
}
bool ckpt_plan_common_run(const struct ckpt_plan *p, uint32_t lo, uint32_t hi, uint32_t *ret_lo,
                          uint32_t *ret_hi);

/* A part of a unit that a rank wants. */
struct ckpt_part {
    uint32_t peer; /* the rank that wants it, or the owner's rank that sends it */
    uint32_t unit;
    uint32_t entry; /* in the table of the rank that wants it */
    uint32_t window;
    struct ckpt_box box; /* in the tensor */
    uint64_t bytes;
};
typedef CKPT_VEC(struct ckpt_part) ckpt_parts;

/* Append what others of the domain want of units [lo, hi), by peer, then unit, then entry. */
int ckpt_plan_sends(const struct ckpt_plan *p, uint32_t self, uint32_t lo, uint32_t hi,
                    ckpt_parts *out, struct ckpt_err *err);

/* Append what `self` wants of units that others read, by window, then peer, unit, entry. */
int ckpt_plan_receives(const struct ckpt_plan *p, uint32_t self, ckpt_parts *out,
                       struct ckpt_err *err);

/* Append what `rank` wants of one unit. */
int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t rank, uint32_t unit,
                     const struct ckpt_box *unit_box, ckpt_parts *out, struct ckpt_err *err);

#endif
