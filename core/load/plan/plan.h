/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of one rank: what it reads, for whom, and in which order everything travels. agree.c
 * makes it after the ranks have agreed on the job, engine.h executes it, and model.c makes it for
 * `ckpt plan`. It follows from the wants of all ranks and the catalogue alone. A rank plans only
 * the groups of which it is a member, and all members of a group come to the same plan of that
 * group.
 *
 * The boxes of a group (groups.h) are its regions. They are cut into units, boxes that are read
 * whole, and all units in the order of the files are the group's stream of bytes. Of n members, the
 * i-th reads the i-th of n equal spans of the stream; where members have different files, units are
 * ordered by the member that reads them (holders.h), and spans differ. What is read and what is
 * exchanged are cut
 * apart: a rank reads its span in chunks, and window k of a group exchanges the k-th slice of every
 * member's span, in one all-gather. A chunk fills the slices of one or several windows. Every rank
 * goes through its windows in the same order, by number and then by group, so that no ranks wait
 * for each other in a circle.
 *
 *     stream   |<------- span of member 0 ------->|<------- span of member 1 ------->| ...
 *     slices   |   0   |   1   |   2   |   3   |  |   0   |   1   |   2   |   3   |
 *     window 1          ^^^^^^^                            ^^^^^^^
 *
 * Bytes that only one rank wants form a group of one member, which reads them chunk by chunk, each
 * of whole units, and exchanges nothing. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "load/plan/broadcast.h"
#include "load/plan/groups.h"
#include "load/want/job_wants.h"
#include "tensor/box.h"
#include "tensor/catalog.h"

enum { CKPT_UNIT_ALIGN = 64 }; /* bytes to which a unit is rounded up in a buffer */

/* A box of a group, and how it is cut into units: every index of the dimensions order[0] ..
 * order[cut - 1], times `nrange` ranges of `step` indices of dimension order[cut], times all of the
 * other dimensions. */
struct ckpt_region {
    struct ckpt_box box;
    uint32_t tensor; /* in the catalogue */
    uint32_t group;  /* in ckpt_plan.groups */
    uint32_t nunit;
    uint32_t entry; /* the only want of this rank, which has all of it; or CKPT_NONE */
    uint8_t order[CKPT_MAX_RANK]; /* dimensions, in descending order of their stride in the file */
    uint8_t cut;
    bool holes; /* reading it reads what lies between its runs, too */
    uint64_t step, nrange;
};

struct ckpt_unit {
    uint32_t region;
    uint32_t ordinal; /* number of the unit in its region */
    uint32_t source;  /* file of its first element, in the catalogue; UINT32_MAX: not known */
    uint32_t len;     /* bytes in the stream, a multiple of CKPT_UNIT_ALIGN */
    uint64_t off;     /* offset of its first element in the file; if there is none, a sort key */
    uint64_t at;      /* where it begins in the group's stream */
};

/* One collective of a window's exchange: an all-gather of these ranks. */
struct ckpt_collective {
    uint32_t n, self;     /* number of ranks, and the index of this one */
    const uint32_t *rank; /* borrowed */
    uint8_t division;     /* of the communicator, see CKPT_DIVISION_ALL; set by agree.c */
};

/* Communicators: of all ranks of the job, of this rank's group in division f (1 + f, divisions.h),
 * or none, so that the ranks send to each other in pairs. */
enum { CKPT_DIVISION_ALL = 0, CKPT_DIVISION_NONE = 0xff };

/* The stream of a group. The slices of a window lie in a buffer one after the other. If the group
 * has several members on each of several nodes, the exchange takes two steps: first each rail, the
 * members with the same place in their nodes, then the members of each node, which have a rail's
 * slices each. */
struct ckpt_stream {
    uint32_t lo, hi;  /* units */
    uint64_t len;     /* bytes */
    uint64_t *span;   /* member i reads bytes [span[i], span[i + 1]); owned. NULL: spans are equal,
                         nwindow slices each */
    uint32_t slice;   /* bytes of a slice, a multiple of CKPT_UNIT_ALIGN */
    uint32_t nwindow; /* slices of the longest span */
    uint32_t nstep;   /* 1 or 2 steps; 0: one member */
    bool pairs;       /* spans differ so much that ranks send to each other in pairs: all-gathers,
                         in which all slices are equally long, would move too much */
    struct ckpt_collective step[2];
    uint32_t *members; /* ranks of the steps that are not the whole group; owned */
};

/* Bytes of the stream that this rank reads into one buffer. */
struct ckpt_chunk {
    uint32_t group;
    uint32_t number; /* of the first window that needs it, within the group */
    uint64_t lo;     /* its first byte in the stream */
    uint32_t len;    /* bytes */
};

/* A window of a group. */
struct ckpt_window {
    uint32_t group;
    uint32_t number; /* within the group */
    uint32_t chunk;  /* this rank's, which has its slice; CKPT_NONE: the slice is empty */
};

/* Limits in bytes. */
struct ckpt_plan_sizes {
    /* These members are equal on all ranks that share what they read: */
    uint64_t unit;   /* of a unit; exceeded only by a single element that is larger */
    uint64_t slice;  /* of a slice; >= CKPT_UNIT_ALIGN */
    uint64_t window; /* of all slices of a window; exceeded only where slices are the smallest */
    /* These members may differ from rank to rank: */
    uint64_t chunk; /* of a chunk; exceeded only by a single slice or unit */
    uint32_t ahead; /* number of chunks that can be read at the same time */
    bool device;    /* groups of one member have windows, too */
};

struct ckpt_plan {
    const struct ckpt_job_wants *job_wants; /* borrowed; must outlive the plan */
    uint32_t self;                          /* the rank whose plan this is */
    struct ckpt_plan_sizes sizes;
    ckpt_groups groups;                   /* of which this rank is a member */
    struct ckpt_broadcast *broadcast;     /* per group */
    struct ckpt_stream *stream;           /* per group */
    CKPT_VEC(struct ckpt_region) regions; /* ordered by tensor */
    CKPT_VEC(struct ckpt_unit)
    units;                                /* by group, then in the order of the files; with spans
                                             of their own, by member before that */
    CKPT_VEC(struct ckpt_chunk) chunks;   /* that this rank reads, by number and group */
    CKPT_VEC(struct ckpt_window) windows; /* by number and group */
    bool exchanges;                       /* some group has several members */
    uint32_t held;                        /* chunks that must be held at the same time */
    bool *again; /* per source: ckpt_plan_find_again; NULL: no rank of the node reads anything that
                    this one reads */
};

/* A rank wants `wanted` bytes of a file; other ranks of its node want `again` of these, too. */
struct ckpt_file_use {
    uint64_t wanted, again;
};

/* Make the plan of rank `self`. job_wants is borrowed for the life of the plan, sharing for this
 * call. star: as ckpt_broadcast_init. LIMIT: there would be too many units, or a unit of 4 GiB. */
int ckpt_plan_new(const struct ckpt_job_wants *job_wants, uint32_t self,
                  const struct ckpt_sharing *sharing, bool star,
                  const struct ckpt_plan_sizes *sizes, struct ckpt_plan **ret,
                  struct ckpt_err *err);

/* With EACH and several ranks on the node: find the files of which other ranks of the node read
 * what this rank reads, and more than a few bytes. use: per source of the catalogue. NOMEM. */
int ckpt_plan_find_again(struct ckpt_plan *p, const struct ckpt_file_use *use,
                         struct ckpt_err *err);

/* Do other ranks of the node read the bytes of a unit, too? Then only the page cache reads them
 * once. They do in the files that ckpt_plan_find_again has found, and where holes are read, which
 * are what other ranks want. */
bool ckpt_plan_reads_again(const struct ckpt_plan *p, uint32_t unit);

/* Free a plan; NULL is allowed. */
void ckpt_plan_free(struct ckpt_plan *p);
CKPT_CLEANUP_BY(ckpt_plan_free, struct ckpt_plan)

/* The size of the plan itself in memory, in bytes. */
uint64_t ckpt_plan_memory(const struct ckpt_plan *p);

/* This rank's part in the check that the members of groups have planned alike. The parts of all
 * ranks add up to 0 (modulo 2^64) if all members of every group have the group, and the same plan
 * of it; otherwise they do so only by a chance of about 2^-64. */
uint64_t ckpt_plan_claim(const struct ckpt_plan *p);

/* The box of a unit. */
void ckpt_plan_unit_box(const struct ckpt_plan *p, uint32_t unit, struct ckpt_box *ret);

/* The tensor of a unit. */
const struct ckpt_tensor *ckpt_plan_unit_tensor(const struct ckpt_plan *p, uint32_t unit);

/* The bytes of the stream that a member reads: [*ret_lo, *ret_hi). */
void ckpt_plan_span(const struct ckpt_plan *p, uint32_t group, uint32_t member, uint64_t *ret_lo,
                    uint64_t *ret_hi);

/* The member that reads byte `at` of the stream, at < its length. */
uint32_t ckpt_plan_reader(const struct ckpt_plan *p, uint32_t group, uint64_t at);

/* The bytes of the stream that are a member's slice of a window: [*ret_lo, *ret_hi), which is
 * empty beyond the end of the member's span. */
void ckpt_plan_slice(const struct ckpt_plan *p, const struct ckpt_window *w, uint32_t member,
                     uint64_t *ret_lo, uint64_t *ret_hi);

/* The number of windows that a chunk feeds: 0 if it is placed without one. */
uint32_t ckpt_plan_fed(const struct ckpt_plan *p, const struct ckpt_chunk *chunk);

/* Where a member's slice lies in the buffer of a window: the number of slices before it. */
uint32_t ckpt_plan_place(const struct ckpt_plan *p, uint32_t group, uint32_t member);

/* The first unit of a group that ends behind byte `at` of the stream; the number behind its last
 * one: there is none. */
uint32_t ckpt_plan_unit_at(const struct ckpt_plan *p, uint32_t group, uint64_t at);

/* Call fn for the boxes of a unit whose bytes lie in [lo, hi) of the stream: the whole box, or a
 * few that are a part of it. `at` is where a box begins in the stream; its elements follow each
 * other there, row-major. Stops when fn returns something other than 0, and returns that. */
typedef int ckpt_plan_box_fn(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at);
int ckpt_plan_boxes(const struct ckpt_plan *p, uint32_t unit, uint64_t lo, uint64_t hi,
                    ckpt_plan_box_fn *fn, void *ctx);

/* The most boxes of a unit of this rank (number of dimensions) that ckpt_plan_boxes finds. */
#define CKPT_UNIT_BOXES(rank) ((rank) ? 2 * (uint64_t)(rank)-1 : 1)

/* The overlap of a unit with one want of this rank. */
struct ckpt_overlap {
    uint32_t entry;      /* number of the want */
    uint64_t bytes;      /* in the dtype of the view */
    struct ckpt_box box; /* in the tensor */
};
typedef CKPT_VEC(struct ckpt_overlap) ckpt_overlaps;

/* Append the overlaps of a unit, or of a box in it, with the wants of this rank: one for each want
 * that has any of it. NOMEM. */
int ckpt_plan_wanted(const struct ckpt_plan *p, uint32_t unit, const struct ckpt_box *box,
                     ckpt_overlaps *out, struct ckpt_err *err);
