/* SPDX-License-Identifier: Apache-2.0 */
/* struct ckpt_load, which is behind include/ckptfs/load.h, and the functions that its modules
 * share. In the order of a load's phases: load.c and layout.c (declaring wants), agree.c (the
 * agreement and the plan, with job.c, weigh.c and budget.c), load.c again (start,
 * waiting, end), reload.c (another run). */
#ifndef CKPT_LOAD_LOAD_INNER_H
#define CKPT_LOAD_LOAD_INNER_H

#include <ckptfs/load.h>

#include "device/device.h"
#include "load/engine/engine.h"
#include "load/plan/cost.h"
#include "load/plan/families.h"
#include "load/plan/plan.h"
#include "load/want/want.h"
#include "run/checkpoint.h"

struct ckpt_load {
    struct ckpt_view *view;              /* a reference is held */
    struct ckpt_comm *comm;              /* borrowed */
    struct ckpt_load_options opt;        /* defaults filled in */
    struct ckpt_wants wants;             /* of this rank; entry i is want i */
    CKPT_VEC(struct ckpt_target) target; /* destination of each want */
    CKPT_VEC(void *) user;          /* the caller's pointers; wants beyond its length have none */
    enum ckpt_readers readers;      /* as planned: not AUTO */
    struct ckpt_rates rates;        /* by which the plan was chosen */
    struct ckpt_engine_parts parts; /* the plan, between planning and the start */
    struct ckpt_engine_options engine_opt;
    struct ckpt_engine_sizes sizes;
    uint64_t needed_bytes, unique_bytes; /* as in struct ckpt_load_stats */
    uint64_t plan_ns;                    /* duration of planning */
    uint64_t wants_hash; /* hash of the wants of all ranks; 0: they have not been exchanged */
    bool planned;        /* a plan has succeeded at least once */
    bool ready;          /* there is a plan that has not been started */
    bool started;        /* started since the last plan, or the start failed for good */
    bool exchanges;      /* some rank sends something to another */
    struct ckpt_device_family family[CKPT_FAMILIES];
    struct ckpt_engine *engine; /* NULL: never started, or taken back by a reload */
};

/* Copy the caller's options, whose struct may be older and shorter (NULL: none are given), and fill
 * in defaults. *to is zero-initialised. USAGE: the size or an option is out of range. */
int ckpt_load_take_options(struct ckpt_load_options *to, const struct ckpt_load_options *from,
                           struct ckpt_err *err);

/* Look up a tensor's number in the catalogue. MISSING: there is none of that name. */
int ckpt_load_find(const struct ckpt_load *load, const char *tensor, uint32_t *ret,
                   struct ckpt_err *err);

/* Add a want of tensor t: of `box` (NULL: the whole tensor), divided as `spec` of load->wants says
 * (CKPT_NONE: not divided). dest as in ckpt_load_want. On failure no want is added. */
int ckpt_load_add(struct ckpt_load *load, uint32_t t, uint32_t spec, const struct ckpt_box *box,
                  const struct ckpt_dest *dest, size_t *ret_want, struct ckpt_err *err);

/* COLLECTIVE. Agree on a plan; the result is the same on all ranks. The wants of all ranks are
 * exchanged unless parts.job_wants is there already (reload). rc and *err are the result of what
 * this rank did before: if it is negative on any rank, all ranks fail. */
int ckpt_load_agree(struct ckpt_load *load, int rc, struct ckpt_err *err);

/* The bytes that a rank wants: *ret_bytes in the dtypes of the view, *ret_stored in those of the
 * stored tensors. NOMEM. */
int ckpt_load_needed(const struct ckpt_job_wants *job_wants, uint32_t rank, uint64_t *ret_bytes,
                     uint64_t *ret_stored, struct ckpt_err *err);

/* The node and the group of options.share of each rank, numbered from 0. */
struct ckpt_load_places {
    const uint32_t *node;  /* per rank, less than nnode */
    const uint32_t *share; /* per rank, less than nshare; NULL if nshare is 0 */
    uint32_t nnode;
    uint32_t nshare; /* 0 or 1: all ranks share */
};

/* Compute the numbers of ranks, nodes and bytes in *in, and `disjoint`. The caller sets the other
 * members. */
int ckpt_load_weigh(const struct ckpt_job_wants *job_wants, const struct ckpt_load_places *at,
                    struct ckpt_cost_input *in, struct ckpt_err *err);

/* ---- budget.c: how host_bytes and device_bytes are divided ---- */

/* Above this fraction in the page cache, files count as cached: reads go through the page cache. */
#define CKPT_LOAD_CACHED 0.9

enum { CKPT_LOAD_PIECE_LEAST = 16 << 10 }; /* bytes of the smallest piece that is planned for */

/* Sizes and numbers of slots. The sizes must be equal on all ranks that share what they read,
 * because all must cut units, pieces and windows alike; `ahead` and `windows` may differ. */
struct ckpt_slots {
    struct ckpt_plan_sizes sizes;
    uint32_t ahead;   /* number of read slots */
    uint32_t windows; /* number of window slots */
};

/* The part of host_bytes that is set aside for the workers' own buffers: a quarter, but at least
 * 256 KiB and at most 64 MiB. The rest is for slots and the plan. It depends on host_bytes alone,
 * and so is equal on all ranks. */
uint64_t ckpt_load_aside(const struct ckpt_load_options *opt);

/* The inverse: a host_bytes that leaves `windows` bytes, or hardly more, after ckpt_load_aside. */
uint64_t ckpt_load_host_bytes(uint64_t windows);

/* The buffers of one worker, in bytes. */
struct ckpt_thread_buffers {
    uint64_t bounce; /* bounce buffer for O_DIRECT; 0 if reads are not direct */
    uint64_t bound;  /* largest bounding range (tensor/strided.h); a worker keeps up to
                        CKPT_STRIDED_KEPT times as much */
};

/* Divide `aside` bytes among *threads workers. Lowers *threads, to 1 at the least, until each
 * worker has 256 KiB. cached: all files are in the page cache, where smaller ranges do. */
void ckpt_thread_buffers_divide(uint64_t aside, bool direct, bool cached, uint32_t *threads,
                                struct ckpt_thread_buffers *ret);

/* What slot sizes depend on. */
struct ckpt_size_input {
    const struct ckpt_load_options *opt;
    uint64_t aside; /* bytes of host_bytes that are not for slots */
    uint64_t piece; /* limit of a piece's bytes if ranks share; 0: 4 MiB */
    uint32_t threads;
    bool shared; /* ranks share what they read (readers are not EACH) */
    bool device; /* destinations are in device memory */
};

/* Choose the slots. LIMIT: host_bytes or device_bytes has no room for the smallest ones; the text
 * says how much is needed. */
int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err);

/* ---- layout.c: wants from a layout such as "tp=2,pp=2" ---- */

/* The class of a rank: all ranks of a class have the same table of wants. USAGE: not a layout, or
 * not one of nrank ranks. */
int ckpt_layout_class(const char *layout, uint32_t rank, uint32_t nrank, uint32_t *ret,
                      struct ckpt_err *err);

/* Add to w the wants of a rank (ckpt_load_want_layout). On failure w may have some of them. */
int ckpt_layout_wants(const struct ckpt_view *view, const char *layout, uint32_t rank,
                      uint32_t nrank, struct ckpt_wants *w, struct ckpt_err *err);

#endif
