/* SPDX-License-Identifier: Apache-2.0 */
/* The load behind include/ckptfs/load.h: load.c (wants, running), agree.c (the plan that all ranks
 * agree on), reload.c, layout.c. */
#ifndef CKPT_LOAD_LOAD_INNER_H
#define CKPT_LOAD_LOAD_INNER_H

#include <ckptfs/load.h>

#include "load/cost.h"
#include "load/device.h"
#include "load/engine.h"
#include "load/families.h"
#include "load/plan.h"
#include "load/want.h"
#include "run/checkpoint.h"

struct ckpt_load {
    struct ckpt_view *view;
    struct ckpt_comm *comm;
    struct ckpt_load_options opt;
    struct ckpt_wants wants; /* of this rank; entry i is want i */
    CKPT_VEC(struct ckpt_target) target;
    CKPT_VEC(void *) user;     /* the caller's pointers, of the first wants */
    enum ckpt_readers readers; /* after planning: not AUTO */
    struct ckpt_rates rates;   /* and what it was decided by */
    struct ckpt_engine_parts parts;
    struct ckpt_engine_options engine_opt;
    struct ckpt_engine_sizes sizes;
    uint64_t needed_bytes, unique_bytes;
    uint64_t plan_ns;
    uint64_t wanted; /* a hash of what all ranks want; 0: they have not agreed on it */
    bool planned;    /* once at least */
    bool ready;      /* there is a plan to be started */
    bool started;    /* and nothing is planned since */
    bool exchanges;  /* some rank has windows */
    struct ckpt_device_family family[CKPT_FAMILIES];
    struct ckpt_engine *engine;
};

/* The number of a tensor; MISSING. */
int ckpt_load_find(const struct ckpt_load *load, const char *tensor, uint32_t *ret,
                   struct ckpt_err *err);

/* Add a want of catalogue tensor t: box may be NULL, spec CKPT_NONE. */
int ckpt_load_add(struct ckpt_load *load, uint32_t t, uint32_t spec, const struct ckpt_box *box,
                  const struct ckpt_dest *dest, size_t *ret_want, struct ckpt_err *err);

/* COLLECTIVE. Make the plan: all ranks come to the same end. They agree on what they want if
 * parts.job_wants is not there yet. rc and *err are this rank's verdict so far. */
int ckpt_load_agree(struct ckpt_load *load, int rc, struct ckpt_err *err);

/* Bytes that a rank wants; *ret_stored: as they lie in storage. */
int ckpt_load_needed(const struct ckpt_job_wants *job_wants, uint32_t rank, uint64_t *ret_bytes,
                     uint64_t *ret_stored, struct ckpt_err *err);

/* Where ranks run, and with whom they share: numbers below nnode and nshare, which are at most as
 * many as there are ranks. */
struct ckpt_load_places {
    const uint32_t *node, *share; /* share: NULL if nshare is 0: all share */
    uint32_t nnode, nshare;
};

/* The bytes of a job, given what all ranks want and where they are: those of *in; the rest of it
 * stays as it is. */
int ckpt_load_weigh(const struct ckpt_job_wants *job_wants, const struct ckpt_load_places *at,
                    struct ckpt_cost_input *in, struct ckpt_err *err);

/* ---- budget.c ---- */

/* Files of which more than this is in the page cache are read through it. */
#define CKPT_LOAD_HOT 0.9

enum { CKPT_LOAD_PIECE_LEAST = 16 << 10 }; /* the least that a rank reads at a time */

/* How the memory for windows is divided. The sizes are the same on all ranks that share what they
 * read; how many pieces a rank reads ahead, and how many windows it has in flight, is its own
 * affair. */
struct ckpt_slots {
    struct ckpt_plan_sizes sizes;
    uint32_t ahead, windows;
};

/* What the threads of a rank may read through, of host_bytes; the rest is for windows, and the same
 * on all ranks. */
uint64_t ckpt_load_aside(const struct ckpt_load_options *opt);

/* The host_bytes that leave so much for windows. */
uint64_t ckpt_load_host_bytes(uint64_t windows);

/* Of one thread. */
struct ckpt_load_share {
    uint64_t bounce; /* its bounce buffer, if reads are direct */
    uint64_t bound; /* the largest bounding range, of which it keeps CKPT_STRIDED_KEPT times that */
};

/* Less threads where there would be too little for each to be of use. hot: all files are in the
 * page cache. */
void ckpt_load_share(uint64_t aside, bool direct, bool hot, uint32_t *threads,
                     struct ckpt_load_share *ret);

/* What the sizes follow from. */
struct ckpt_size_input {
    const struct ckpt_load_options *opt;
    uint64_t aside; /* of opt's host_bytes: not for windows */
    uint64_t piece; /* at most so much is read at a time by ranks that share; 0: what suits */
    uint32_t threads;
    bool shared; /* by several ranks */
    bool device; /* what is read goes to device memory */
};

/* LIMIT if host_bytes (or device_bytes) is too little for any. */
int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err);

/* ---- residency.c, layout.c ---- */

/* Of some of a checkpoint's files: bytes that are in the page cache (sampled), all bytes, and
 * whether they are on a storage that machines share. */
struct ckpt_residency {
    double resident, bytes;
    bool shared;
};

/* Look at those files that are this rank's share of the look. */
void ckpt_load_residency(const struct ckpt_catalog *cat, uint32_t rank, uint32_t size,
                         struct ckpt_residency *ret);
/* The part that is in the page cache, 0 to 1; also 1 if no file was looked at. */
double ckpt_residency_part(const struct ckpt_residency *r);

/* Ranks with the same number want the same under a layout, but for their places in its grids. */
int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err);

/* Wants of one rank under a layout, added to w. */
int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err);

#endif
