/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank divides its memory: windows, and what its threads need to read. */
#include <inttypes.h>

#include "base/ckd.h"
#include "base/err.h"
#include "load/device.h"
#include "load/load_inner.h"
#include "tensor/region.h"

enum {
    EACH_UNIT = 1 << 20,   /* of a rank that reads for itself: stays in the CPU's cache */
    DEVICE_UNIT = 8 << 20, /* the same for a device: worth an upload */
    ONCE_UNIT = 4 << 20,
    WINDOW = 64 << 20,
    SLOTS = 3, /* windows in flight */
    BOUNCE = 1 << 20,
    HOT_BOUND = 512 << 10,   /* bounding ranges of what is in the page cache */
    ASIDE_LEAST = 256 << 10, /* of one thread */
    ASIDE = 64 << 20,        /* of all together, at most */
};

/* ---- what threads read through: a quarter of host_bytes, within limits ---- */

static uint64_t within_limits(uint64_t bytes)
{
    return ckpt_min_u64(ckpt_max_u64(bytes, ASIDE_LEAST), ASIDE);
}

uint64_t ckpt_load_aside(const struct ckpt_load_options *opt)
{
    return within_limits(opt->host_bytes / 4);
}

uint64_t ckpt_load_host_bytes(uint64_t windows)
{
    return windows + within_limits((windows + 2) / 3);
}

void ckpt_load_share(uint64_t aside, bool direct, bool hot, uint32_t *threads,
                     struct ckpt_load_share *ret)
{
    while (*threads > 1 && aside / *threads < ASIDE_LEAST)
        --*threads;
    const uint64_t each = aside / *threads, bound = hot ? HOT_BOUND : CKPT_REGION_BOUND;
    ret->bounce = 0;
    if (direct)
        ret->bounce = ckpt_min_u64(each / 2, BOUNCE) / CKPT_BOUNCE_ALIGN * CKPT_BOUNCE_ALIGN;
    ret->bound = ckpt_min_u64((each - ret->bounce) / CKPT_REGION_KEPT, bound);
}

/* ---- windows ---- */

/* A rank that reads for itself: a window is one read. */
static void sizes_alone(uint64_t budget, uint32_t threads, bool device, struct ckpt_plan_sizes *ret,
                        uint32_t *ret_slots)
{
    const uint64_t unit = device ? DEVICE_UNIT : EACH_UNIT;
    uint32_t slots = device ? 2 * threads + 1 : threads + 1; /* on a device uploads last, too */

    if (device && slots > CKPT_DEVICE_MARKS)
        slots = CKPT_DEVICE_MARKS;
    while (slots > 2 && budget / slots < unit)
        slots--;
    ret->piece = ret->unit = ckpt_min_u64(unit, budget / slots);
    *ret_slots = slots;
}

/* Each owner has a piece in every window, if that is a good piece; else they take turns. Pieces are
 * smaller only where the memory has no room for a good one of one owner. */
static void sizes_shared(uint64_t slot, uint64_t window, uint32_t ndomain,
                         struct ckpt_plan_sizes *ret)
{
    uint64_t piece = window / ndomain, readers = ndomain;

    if (piece < CKPT_LOAD_PIECE_GOOD) {
        /* eight readers at a time keep a storage busy, and large pieces make few messages */
        piece = ckpt_max_u64(ckpt_min_u64(window / 8, CKPT_LOAD_PIECE_TURNS), CKPT_LOAD_PIECE_GOOD);
        piece = ckpt_max_u64(ckpt_min_u64(piece, window), CKPT_LOAD_PIECE_LEAST);
        piece = ckpt_min_u64(piece, slot / 3);
        readers = ckpt_max_u64(ckpt_min_u64(window / piece, slot / piece - 2), 1);
    }
    ret->piece = piece;
    ret->unit = ckpt_min_u64(ONCE_UNIT, piece);
    ret->turns = (ndomain + readers - 1) / readers;
}

int ckpt_load_sizes(const struct ckpt_load_options *opt, uint32_t ndomain, uint64_t bytes,
                    uint32_t threads, bool device, uint64_t aside, struct ckpt_plan_sizes *ret,
                    uint32_t *ret_slots, struct ckpt_err *err)
{
    const uint64_t least = (uint64_t)2 * CKPT_LOAD_PIECE_LEAST * (ndomain == 1 ? 1 : 3);
    const uint64_t host = opt->host_bytes > aside ? opt->host_bytes - aside : 0;
    const bool tight = device && opt->device_bytes < host;
    const uint64_t budget = tight ? opt->device_bytes : host;
    uint64_t slot, window;

    if (budget < least)
        return ckpt_fail(err, CKPT_LIMIT,
                         "%s is %" PRIu64 ", but %" PRIu32
                         " ranks that share what they read need at least %" PRIu64,
                         tight ? "device_bytes" : "host_bytes",
                         tight ? opt->device_bytes : opt->host_bytes, ndomain,
                         tight ? least : ckpt_load_host_bytes(least));
    *ret = (struct ckpt_plan_sizes){0};
    if (ndomain == 1) {
        sizes_alone(budget, threads, device, ret, ret_slots);
        return 0;
    }
    /* a slot holds what is read, what is gathered to be sent, and at most a window of others */
    *ret_slots = budget / SLOTS / 3 >= CKPT_LOAD_PIECE_LEAST ? SLOTS : 2;
    slot = budget / *ret_slots;
    window = ckpt_min_u64(opt->window_bytes ? opt->window_bytes : WINDOW,
                          slot / (ndomain + 2) * ndomain);
    /* and short loads have several windows too, so that reading and sending overlap */
    window =
        ckpt_min_u64(window, ckpt_max_u64(bytes / 8, (uint64_t)ndomain * CKPT_LOAD_PIECE_GOOD));
    sizes_shared(slot, window, ndomain, ret);
    return 0;
}
