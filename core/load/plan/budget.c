/* SPDX-License-Identifier: Apache-2.0 */
/* Dividing host_bytes and device_bytes. */
#include "load/plan/budget.h"

#include <inttypes.h>

#include "base/ckd.h"
#include "base/err.h"
#include "tensor/strided.h"

enum {
    EACH_UNIT = 1 << 20,      /* bytes of a unit with EACH: it stays in the CPU's cache */
    DEVICE_UNIT = 8 << 20,    /* the same for a device: large enough for an upload */
    PIECE = 4 << 20,          /* bytes of a piece, a slice and a unit if ranks share */
    LEAST_PIECE = 1 << 20,    /* smaller reads are slow */
    READERS = 8,              /* a window has room for as many of the largest slices */
    SLOTS = 3,                /* window slots if ranks share */
    ALONE_SLOTS = 6,          /* of a device if they do not: uploads in flight */
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

/* An eighth of device_bytes is for lists of copies. */
static uint64_t device_part(const struct ckpt_size_input *in, uint32_t slots)
{
    return (in->opt->device_bytes - in->opt->device_bytes / 8) / slots;
}

/* EACH: a piece is one unit, read at once. On a device it is one window, too. */
static void sizes_alone(const struct ckpt_size_input *in, uint64_t host, struct ckpt_slots *ret)
{
    const uint64_t unit = in->device ? DEVICE_UNIT : EACH_UNIT;
    /* a device also uploads from read slots */
    uint32_t ahead = in->device ? 2 * in->threads + 1 : in->threads + 1;

    while (ahead > 2 && host / ahead < unit)
        ahead--;
    ret->windows = in->device ? ALONE_SLOTS : 1;
    ret->sizes.piece = ckpt_min_u64(unit, host / ahead);
    if (in->device)
        ret->sizes.piece = ckpt_min_u64(ret->sizes.piece, device_part(in, ret->windows));
    ret->sizes.unit = ret->sizes.slice = ret->sizes.piece;
    ret->sizes.window = 0;
    ret->ahead = ahead;
}

/* Ranks share: in host memory, a quarter of the budget is for read slots, and a quarter for each
 * window slot. Windows in device memory need host memory only if they are verified. The sizes must
 * not depend on anything that differs from rank to rank (`threads` may only change `ahead`). */
static void sizes_shared(const struct ckpt_size_input *in, uint64_t host, struct ckpt_slots *ret)
{
    const bool alone = in->device && !in->opt->verify;
    const uint64_t part = alone ? host / 2 : host / (SLOTS + 1);
    uint64_t window = alone ? device_part(in, SLOTS) : part;

    if (in->device)
        window = ckpt_min_u64(window, device_part(in, SLOTS));
    if (in->opt->window_bytes)
        window = ckpt_min_u64(window, in->opt->window_bytes);
    const uint64_t base = ckpt_min_u64(part, window);
    const uint64_t piece =
        ckpt_min_u64(in->piece ? in->piece : PIECE,
                     ckpt_max_u64(base / READERS, ckpt_min_u64(LEAST_PIECE, base / 2)));
    ret->sizes.unit = ret->sizes.slice = ret->sizes.piece = piece;
    ret->sizes.window = window;
    ret->windows = SLOTS;
    ret->ahead = (uint32_t)ckpt_min_u64(part / piece, ckpt_max_u64(in->threads + 2, 4));
}

int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err)
{
    const struct ckpt_load_options *opt = in->opt;
    const uint64_t least = (uint64_t)2 * CKPT_LOAD_PIECE_LEAST * (in->shared ? SLOTS + 1 : 1);
    const uint64_t host = opt->host_bytes > in->aside ? opt->host_bytes - in->aside : 0;
    const bool tight = in->device && opt->device_bytes < 2 * least;

    if (host < least || tight)
        return ckpt_fail(
            err, CKPT_LIMIT, "%s is %" PRIu64 ", but ranks that %s need at least %" PRIu64,
            tight ? "device_bytes" : "host_bytes", tight ? opt->device_bytes : opt->host_bytes,
            in->shared ? "share what they read" : "read for themselves",
            tight ? 2 * least : ckpt_load_host_bytes(least));
    if (in->shared)
        sizes_shared(in, host, ret);
    else
        sizes_alone(in, host, ret);
    ret->sizes.ahead = opt->verify ? 0 : ret->ahead; /* a hash follows each slice in its buffer */
    ret->sizes.device = in->device;
    return 0;
}
