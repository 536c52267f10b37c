/* SPDX-License-Identifier: Apache-2.0 */
/* Dividing host_bytes and device_bytes. */
#include "load/plan/budget.h"

#include <inttypes.h>

#include "base/ckd.h"
#include "base/err.h"
#include "device/device.h"
#include "tensor/strided.h"

enum {
    EACH_UNIT = 1 << 20,      /* bytes of a unit with EACH: it stays in the CPU's cache */
    DEVICE_UNIT = 8 << 20,    /* the same for a device: large enough for an upload */
    ONCE_UNIT = 4 << 20,      /* the same if ranks share */
    PIECE = 4 << 20,          /* bytes of a piece if ranks share and there is room for it */
    LEAST_PIECE = 1 << 20,    /* smaller reads are slow; windows get fewer readers instead */
    READERS = 8,              /* readers of a window, enough to keep a storage busy */
    SLOTS = 3,                /* window slots */
    BOUNCE = 1 << 20,         /* the largest bounce buffer */
    CACHED_BOUND = 512 << 10, /* the largest bounding range of cached files */
    ASIDE_LEAST = 256 << 10,  /* bytes of buffers of one worker, at least */
    ASIDE = 64 << 20,         /* bytes of buffers of all workers, at most */
};

/* ---- the workers' buffers: a quarter of host_bytes, within limits ---- */

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

void ckpt_thread_buffers_divide(uint64_t aside, bool direct, bool cached, uint32_t *threads,
                                struct ckpt_thread_buffers *ret)
{
    while (*threads > 1 && aside / *threads < ASIDE_LEAST)
        --*threads;
    const uint64_t each = aside / *threads, bound = cached ? CACHED_BOUND : CKPT_STRIDED_BOUND;
    ret->bounce = 0;
    if (direct)
        ret->bounce = ckpt_min_u64(each / 2, BOUNCE) / CKPT_BOUNCE_ALIGN * CKPT_BOUNCE_ALIGN;
    ret->bound = ckpt_min_u64((each - ret->bounce) / CKPT_STRIDED_KEPT, bound);
}

/* ---- slots ---- */

/* On a device each slot has a mark. */
static uint32_t with_marks(uint64_t ahead, uint32_t windows, bool device)
{
    return (uint32_t)(device ? ckpt_min_u64(ahead, CKPT_DEVICE_MARKS - windows) : ahead);
}

/* EACH: a piece is one unit, read at once. There are no windows. */
static void sizes_alone(uint64_t budget, uint32_t threads, bool device, struct ckpt_slots *ret)
{
    const uint64_t unit = device ? DEVICE_UNIT : EACH_UNIT;
    uint32_t ahead =
        device ? 2 * threads + 1 : threads + 1; /* a device also uploads from read slots */

    ret->windows = 1;
    ahead = with_marks(ahead, ret->windows, device);
    while (ahead > 2 && budget / ahead < unit)
        ahead--;
    ret->sizes.piece = ret->sizes.unit = ckpt_min_u64(unit, budget / ahead);
    ret->sizes.window = 0;
    ret->ahead = ahead;
}

/* Ranks share: a quarter of the budget is for read slots, and a quarter for each window slot. A
 * window has eight readers, unless their pieces would be too small. The sizes must not depend on
 * anything that differs from rank to rank (`threads` may only change `ahead`). */
static void sizes_shared(uint64_t budget, uint64_t window, uint64_t piece, uint32_t threads,
                         bool device, struct ckpt_slots *ret)
{
    const uint64_t part = budget / (SLOTS + 1);

    window = ckpt_min_u64(part, window ? window : (uint64_t)READERS * PIECE);
    piece =
        ckpt_min_u64(piece, ckpt_max_u64(window / READERS, ckpt_min_u64(LEAST_PIECE, window / 2)));
    ret->sizes.piece = piece;
    ret->sizes.unit = ckpt_min_u64(ONCE_UNIT, piece);
    ret->sizes.window = window;
    ret->windows = SLOTS;
    ret->ahead =
        with_marks(ckpt_min_u64(part / piece, ckpt_max_u64(threads + 2, 4)), SLOTS, device);
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
        sizes_shared(budget, opt->window_bytes, in->piece ? in->piece : PIECE, in->threads,
                     in->device, ret);
    else
        sizes_alone(budget, in->threads, in->device, ret);
    return 0;
}
