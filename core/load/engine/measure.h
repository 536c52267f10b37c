/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory the slots of an engine need to execute a plan. */
#ifndef CKPT_LOAD_ENGINE_MEASURE_H
#define CKPT_LOAD_ENGINE_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#include "load/plan/plan.h"

struct ckpt_engine_mode {
    bool verify; /* the XXH3 hash of each piece is sent with it and compared by the receiver */
    bool device; /* windows and destinations are in device memory */
};

/* The memory of one slot, exactly as much as the largest piece or window of the plan needs. */
struct ckpt_engine_sizes {
    uint64_t read;                       /* bytes of a piece that this rank reads, in a read slot */
    uint64_t receive;                    /* bytes of the pieces of a window that other ranks read */
    uint64_t units;                      /* number of units of a piece */
    uint64_t read_copies;                /* device: number of copy descriptors of a read slot */
    uint64_t window_copies;              /* device: number of copy descriptors of a window slot */
    uint64_t read_host, read_device;     /* all bytes of a read slot, in host and device memory */
    uint64_t window_host, window_device; /* all bytes of a window slot, likewise */
};

/* Bytes of a buffer after each piece: room for its hash, which keeps the next piece aligned. */
static inline uint64_t ckpt_piece_tail(const struct ckpt_engine_mode *mode)
{
    return mode->verify ? CKPT_UNIT_ALIGN : 0;
}

/* Compute the memory that the slots of a plan need. NOMEM. */
int ckpt_engine_measure(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err);

#endif
