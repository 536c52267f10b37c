/* SPDX-License-Identifier: Apache-2.0 */
/* Decides how a load is done: which ranks read, with how many threads, whether past the page cache,
 * in windows and chunks of what size. The decision depends on sizes and rates alone. agree.c calls
 * it before each plan, and model.c for `ckpt plan`, so that a load does what `ckpt plan` says. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "io/direct.h"
#include "load/plan/cost.h"
#include "load/plan/plan.h"

/* Copy the caller's options, whose struct may be older and shorter (NULL: none are given), and fill
 * in defaults. *to is zero-initialised. USAGE: the size or an option is out of range. */
int ckpt_load_take_options(struct ckpt_load_options *to, const struct ckpt_load_options *from,
                           struct ckpt_err *err);

/* ---- memory: how a rank divides host_bytes and device_bytes among slots and the workers' buffers
 * ---- */

/* Above this fraction in the page cache, files count as cached: reads go through the page cache. */
#define CKPT_LOAD_CACHED 0.9

enum { CKPT_LOAD_CHUNK_LEAST = 16 << 10 }; /* bytes of the smallest chunk that is planned for */

/* Sizes and numbers of slots. Those sizes of which plan.h says so must be equal on all ranks that
 * share what they read; `ahead` and `windows` may differ. */
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

/* These numbers determine the sizes of slots. */
struct ckpt_size_input {
    const struct ckpt_load_options *opt;
    uint64_t aside; /* bytes of host_bytes that are not for slots */
    uint64_t chunk; /* limit of a chunk's bytes if ranks share; 0: 4 MiB */
    uint32_t threads;
    bool shared; /* ranks share what they read (readers are not EACH) */
    bool device; /* destinations are in device memory */
};

/* Choose the slots. LIMIT: host_bytes or device_bytes has no room for the smallest ones; the text
 * says how much is needed. */
int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err);

/* ---- the decision ---- */

/* `local` and `cpus` may differ from rank to rank; the decisions that all ranks must share do not
 * depend on them. */
struct ckpt_policy_input {
    const struct ckpt_load_options *opt; /* defaults filled in */
    struct ckpt_cost_input cost;
    uint32_t local;            /* number of ranks on this rank's node, itself included */
    uint32_t cpus;             /* number of processors of this rank's node */
    struct ckpt_file_use *use; /* per source of the catalogue, of this rank; NULL in `ckpt plan` */
    bool is_spread;            /* ranks have different files, which are best read once */
};

struct ckpt_policy {
    struct ckpt_rates rates;   /* given in the options, or assumed */
    struct ckpt_cost cost;     /* estimated by these rates */
    enum ckpt_readers readers; /* not AUTO */
    enum ckpt_direct direct;
    uint32_t threads;                   /* reading threads of this rank */
    struct ckpt_thread_buffers buffers; /* of each thread */
    uint64_t gap, run;                  /* for struct ckpt_box_cost, in bytes */
    struct ckpt_slots slots;
};

/* Decide everything. If the options ask for AUTO, take the fastest way; if its slots do not fit,
 * ways in which fewer ranks share, down to EACH. LIMIT: host_bytes or device_bytes has no room for
 * any of these. */
int ckpt_policy_choose(const struct ckpt_policy_input *in, struct ckpt_policy *ret,
                       struct ckpt_err *err);

/* Decide everything but the readers, which the caller gives (not AUTO): agree.c does so if a plan
 * did not fit. *ret has been filled by ckpt_policy_choose. LIMIT as there. */
int ckpt_policy_sizes(const struct ckpt_policy_input *in, enum ckpt_readers readers,
                      struct ckpt_policy *ret, struct ckpt_err *err);

/* The sizes that a load would have in which all ranks share, by which it is weighed; the least if
 * there is no room for it. */
struct ckpt_plan_sizes ckpt_policy_once(const struct ckpt_policy_input *in);

/* Step from ONCE to NODE and from NODE to EACH. False, and nothing changes, after EACH. */
bool ckpt_policy_less(enum ckpt_readers *readers);
