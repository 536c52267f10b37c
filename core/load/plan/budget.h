/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank divides host_bytes and device_bytes among slots and the workers' own buffers. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "load/plan/plan.h"

/* Above this fraction in the page cache, files count as cached: reads go through the page cache. */
#define CKPT_LOAD_CACHED 0.9

enum { CKPT_LOAD_PIECE_LEAST = 16 << 10 }; /* bytes of the smallest piece that is planned for */

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
