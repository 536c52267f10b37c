/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory the slots of an engine need to execute a plan. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "load/plan/plan.h"

struct ckpt_engine_mode {
    bool verify; /* the XXH3 hash of each slice is sent with it and compared by the receiver */
    bool device; /* windows and destinations are in device memory, */
    bool hosts;  /* but some of this rank's destinations in host memory */
};

/* The memory of one slot, exactly as much as the largest chunk or window of the plan needs. */
struct ckpt_engine_sizes {
    uint64_t read;    /* bytes of a chunk, in a read slot */
    uint64_t receive; /* bytes of all slices of a window, in a window slot */
    uint64_t copies;  /* device: number of copy descriptors of a window slot */
    uint64_t fetch;   /* device: pinned bytes to which a window is downloaded */
    uint64_t window_host,
        window_device; /* all bytes of a window slot, on the host and the device */
};

/* Bytes of a buffer after each slice: room for its hash, which keeps the next slice aligned. */
static inline uint64_t ckpt_chunk_tail(const struct ckpt_engine_mode *mode)
{
    return mode->verify ? CKPT_UNIT_ALIGN : 0;
}

/* The distance of neighbouring slices in the buffer of a window. */
static inline uint64_t ckpt_slice_stride(const struct ckpt_stream *s,
                                         const struct ckpt_engine_mode *mode)
{
    return s->slice + ckpt_chunk_tail(mode);
}

/* The buffer of one of the all-gathers of a window: where it begins in the window's, and the bytes
 * of a rank. In two steps, each rail's slices lie together: they are what a member gives in the
 * second. */
static inline size_t ckpt_step_buffer(const struct ckpt_stream *s,
                                      const struct ckpt_engine_mode *mode, uint32_t step,
                                      size_t *ret_len)
{
    const size_t slice = ckpt_slice_stride(s, mode), rail = slice * s->step[0].n;

    *ret_len = step == 1 ? rail : slice;
    return s->nstep == 2 && step == 0 ? rail * s->step[1].self : 0;
}

/* Compute the memory that the slots of a plan need. NOMEM. */
int ckpt_engine_measure(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err);
