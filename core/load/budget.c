/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank divides its memory: windows, and what its threads need to read. */
#include <inttypes.h>

#include "base/ckd.h"
#include "base/err.h"
#include "load/device.h"
#include "load/load_inner.h"
#include "tensor/strided.h"

enum {
    EACH_UNIT = 1 << 20,   /* of a rank that reads for itself: stays in the CPU's cache */
    DEVICE_UNIT = 8 << 20, /* the same for a device: worth an upload */
    ONCE_UNIT = 4 << 20,
    PIECE = 4 << 20,       /* of ranks that share what they read, if there is room for it */
    LEAST_PIECE = 1 << 20, /* what is worth a read */
    READERS = 8,           /* of a window: they keep a storage busy */
    SLOTS = 3,             /* windows in flight */
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
    const uint64_t each = aside / *threads, bound = hot ? HOT_BOUND : CKPT_STRIDED_BOUND;
    ret->bounce = 0;
    if (direct)
        ret->bounce = ckpt_min_u64(each / 2, BOUNCE) / CKPT_BOUNCE_ALIGN * CKPT_BOUNCE_ALIGN;
    ret->bound = ckpt_min_u64((each - ret->bounce) / CKPT_STRIDED_KEPT, bound);
}

/* ---- windows ---- */

/* A rank that reads for itself: a piece is one read. */
static void sizes_alone(uint64_t budget, uint32_t threads, bool device, struct ckpt_slots *ret)
{
    const uint64_t unit = device ? DEVICE_UNIT : EACH_UNIT;
    uint32_t ahead = device ? 2 * threads + 1 : threads + 1; /* on a device uploads last, too */

    if (device && ahead > CKPT_DEVICE_MARKS)
        ahead = CKPT_DEVICE_MARKS;
    while (ahead > 2 && budget / ahead < unit)
        ahead--;
    ret->sizes.piece = ret->sizes.unit = ckpt_min_u64(unit, budget / ahead);
    ret->sizes.window = 0;
    ret->ahead = ahead;
    ret->windows = 1;
}

/* Ranks that share: a part for pieces that are read ahead, the same for each window in flight.
 * Eight readers a window, if the pieces stay good. The sizes don't depend on what differs from rank
 * to rank: all must cut alike. */
static void sizes_shared(uint64_t budget, uint64_t window, uint64_t piece, uint32_t threads,
                         struct ckpt_slots *ret)
{
    const uint64_t part = budget / (SLOTS + 1);

    window = ckpt_min_u64(part, window ? window : (uint64_t)READERS * PIECE);
    piece =
        ckpt_min_u64(piece, ckpt_max_u64(window / READERS, ckpt_min_u64(LEAST_PIECE, window / 2)));
    ret->sizes.piece = piece;
    ret->sizes.unit = ckpt_min_u64(ONCE_UNIT, piece);
    ret->sizes.window = window;
    ret->windows = SLOTS;
    ret->ahead = (uint32_t)ckpt_min_u64(part / piece, ckpt_max_u64(threads + 2, 4));
}

int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err)
{
    const struct ckpt_load_options *opt = in->opt;
    const uint64_t least = (uint64_t)2 * CKPT_LOAD_PIECE_LEAST * (in->shared ? SLOTS + 1 : 1);
    const uint64_t host = opt->host_bytes > in->aside ? opt->host_bytes - in->aside : 0;
    const bool tight = in->device && opt->device_bytes < host;
    const uint64_t budget = tight ? opt->device_bytes : host;

    if (budget < least)
        return ckpt_fail(
            err, CKPT_LIMIT, "%s is %" PRIu64 ", but ranks that %s need at least %" PRIu64,
            tight ? "device_bytes" : "host_bytes", tight ? opt->device_bytes : opt->host_bytes,
            in->shared ? "share what they read" : "read for themselves",
            tight ? least : ckpt_load_host_bytes(least));
    if (in->shared)
        sizes_shared(budget, opt->window_bytes, in->piece ? in->piece : PIECE, in->threads, ret);
    else
        sizes_alone(budget, in->threads, in->device, ret);
    return 0;
}
