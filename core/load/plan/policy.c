/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a load: their defaults and limits. Chooses readers, threads, O_DIRECT and the
 * sizes of slots. */
#include "load/plan/policy.h"

#include <inttypes.h>
#include <math.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/sized.h"
#include "tensor/strided.h"

/* ---- the options ---- */

/* The defaults of options that are 0 (load.h). */
enum {
    HOST_BYTES = 256 << 20,           /* of a rank: 8 ranks of a node take 2 GiB */
    DEVICE_BYTES = 512 << 20,         /* of each GPU, while the load runs */
    READ_TIMEOUT_MS = 120 * 1000,     /* a busy parallel file system stalls for a minute, not two */
    EXCHANGE_TIMEOUT_MS = 300 * 1000, /* more than that, as a rank may wait for another's read */
};

/* Rates by which times can be estimated: infinite times are none. */
static int check_rates(const struct ckpt_rates *r, struct ckpt_err *err)
{
    const double rate[] = {r->node_storage, r->shared_storage, r->page_cache,
                           r->copy,         r->local_link,     r->network};

    for (size_t i = 0; i < sizeof rate / sizeof *rate; i++)
        if (rate[i] != 0 && !(rate[i] >= 1 && isfinite(rate[i])))
            return ckpt_fail(err, CKPT_USAGE,
                             "options.rates has %g: expected 1 or more bytes a second, or 0 for "
                             "what is assumed",
                             rate[i]);
    return 0;
}

int ckpt_load_take_options(struct ckpt_load_options *to, const struct ckpt_load_options *from,
                           struct ckpt_err *err)
{
    if (from && ckpt_sized_take(to, sizeof *to, from, "ckpt_load_options", err) < 0)
        return -1;
    if (to->host_bytes == 0)
        to->host_bytes = HOST_BYTES;
    if (to->device_bytes == 0)
        to->device_bytes = DEVICE_BYTES;
    if (to->read_timeout_ms == 0)
        to->read_timeout_ms = READ_TIMEOUT_MS;
    if (to->exchange_timeout_ms == 0)
        to->exchange_timeout_ms = EXCHANGE_TIMEOUT_MS;
    if (to->readers < CKPT_READERS_AUTO || to->readers > CKPT_READERS_EACH)
        return ckpt_fail(err, CKPT_USAGE, "options.readers is %d", (int)to->readers);
    if (to->direct < CKPT_LOAD_DIRECT_AUTO || to->direct > CKPT_LOAD_DIRECT_ALWAYS)
        return ckpt_fail(err, CKPT_USAGE, "options.direct is %d", (int)to->direct);
    return check_rates(&to->rates, err);
}

/* ---- dividing host_bytes and device_bytes ---- */

enum {
    EACH_UNIT = 1 << 20,      /* bytes of a unit with EACH: it stays in the CPU's cache */
    DEVICE_UNIT = 8 << 20,    /* the same for a device: large enough for an upload */
    CHUNK = 4 << 20,          /* bytes of a chunk, a slice and a unit if ranks share */
    LEAST_CHUNK = 1 << 20,    /* smaller reads are slow */
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

/* EACH: a chunk is one unit, read at once. On a device it is one window, too. */
static void sizes_alone(const struct ckpt_size_input *in, uint64_t host, struct ckpt_slots *ret)
{
    const uint64_t unit = in->device ? DEVICE_UNIT : EACH_UNIT;
    /* a device also uploads from read slots */
    uint32_t ahead = in->device ? 2 * in->threads + 1 : in->threads + 1;

    while (ahead > 2 && host / ahead < unit)
        ahead--;
    ret->windows = in->device ? ALONE_SLOTS : 1;
    ret->sizes.chunk = ckpt_min_u64(unit, host / ahead);
    if (in->device)
        ret->sizes.chunk = ckpt_min_u64(ret->sizes.chunk, device_part(in, ret->windows));
    ret->sizes.unit = ret->sizes.slice = ret->sizes.chunk;
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
    const uint64_t chunk =
        ckpt_min_u64(in->chunk ? in->chunk : CHUNK,
                     ckpt_max_u64(base / READERS, ckpt_min_u64(LEAST_CHUNK, base / 2)));
    ret->sizes.unit = ret->sizes.slice = ret->sizes.chunk = chunk;
    ret->sizes.window = window;
    ret->windows = SLOTS;
    ret->ahead = (uint32_t)ckpt_min_u64(part / chunk, ckpt_max_u64(in->threads + 2, 4));
}

int ckpt_load_sizes(const struct ckpt_size_input *in, struct ckpt_slots *ret, struct ckpt_err *err)
{
    const struct ckpt_load_options *opt = in->opt;
    const uint64_t least = (uint64_t)2 * CKPT_LOAD_CHUNK_LEAST * (in->shared ? SLOTS + 1 : 1);
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

/* ---- the decision ---- */

enum {
    CACHED_CHUNK = 2 << 20, /* bytes of a chunk of cached files: stays in the CPU's cache */
    MOST_THREADS = 8,       /* of a rank; twice as many on a device, where a thread only reads */
    COLD_THREADS = 4,       /* reads that keep a disk busy */
    CACHED_GAP = 4096,      /* copying a larger hole costs more than another system call */
    EXACT_RUN = 1,          /* the same if every byte should be read once: no holes are read */
};

static bool is_cached(const struct ckpt_policy_input *in)
{
    return in->cost.cached > CKPT_LOAD_CACHED;
}

static enum ckpt_direct choose_direct(const struct ckpt_policy_input *in)
{
    if (in->opt->direct == CKPT_LOAD_DIRECT_ALWAYS)
        return CKPT_DIRECT_ALL;
    return in->opt->direct == CKPT_LOAD_DIRECT_NEVER || is_cached(in) ? CKPT_DIRECT_NONE
                                                                      : CKPT_DIRECT_COLD;
}

static uint32_t choose_threads(const struct ckpt_policy_input *in)
{
    const uint64_t least = is_cached(in) ? 1 : COLD_THREADS;
    const uint64_t most = in->cost.device ? 2 * MOST_THREADS : MOST_THREADS;

    if (in->opt->threads)
        return in->opt->threads;
    return (uint32_t)ckpt_min_u64(ckpt_max_u64(in->cpus / in->local, least), most);
}

int ckpt_policy_sizes(const struct ckpt_policy_input *in, enum ckpt_readers readers,
                      struct ckpt_policy *ret, struct ckpt_err *err)
{
    const uint64_t aside = ckpt_load_aside(in->opt);
    const bool device = in->cost.device, shared = readers != CKPT_READERS_EACH;
    const bool in_memory = is_cached(in) && in->cost.nnode == 1 && !device;

    ret->readers = readers;
    ret->direct = choose_direct(in);
    ret->threads = choose_threads(in);
    ckpt_thread_buffers_divide(aside, ret->direct != CKPT_DIRECT_NONE, is_cached(in), &ret->threads,
                               &ret->buffers);
    ret->gap = is_cached(in) ? CACHED_GAP : CKPT_STRIDED_GAP;
    /* holes belong to other units, which another worker or rank reads */
    ret->run = shared ? EXACT_RUN : CKPT_STRIDED_LONG_RUN;
    const struct ckpt_size_input sizes = {.opt = in->opt,
                                          .aside = aside,
                                          .chunk = in_memory ? CACHED_CHUNK : 0,
                                          .threads = ret->threads,
                                          .shared = shared,
                                          .device = device};
    return ckpt_load_sizes(&sizes, &ret->slots, err);
}

struct ckpt_plan_sizes ckpt_policy_once(const struct ckpt_policy_input *in)
{
    struct ckpt_policy once;

    return ckpt_policy_sizes(in, CKPT_READERS_ONCE, &once, NULL) < 0
               ? (struct ckpt_plan_sizes){.slice = CKPT_UNIT_ALIGN}
               : once.slots.sizes;
}

bool ckpt_policy_less(enum ckpt_readers *readers)
{
    if (*readers == CKPT_READERS_EACH)
        return false;
    *readers = *readers == CKPT_READERS_ONCE ? CKPT_READERS_NODE : CKPT_READERS_EACH;
    return true;
}

int ckpt_policy_choose(const struct ckpt_policy_input *in, struct ckpt_policy *ret,
                       struct ckpt_err *err)
{
    enum ckpt_readers readers = in->opt->readers;
    struct ckpt_err first = {0};

    *ret = (struct ckpt_policy){.rates = in->opt->rates};
    ckpt_rates_assume(&ret->rates, in->cost.device);
    ckpt_cost_estimate(&in->cost, &ret->rates, &ret->cost);
    if (in->cost.nrank == 1)
        readers = CKPT_READERS_EACH;
    if (readers != CKPT_READERS_AUTO)
        return ckpt_policy_sizes(in, readers, ret, err);
    readers = in->is_spread ? CKPT_READERS_ONCE : ckpt_cost_choose(&ret->cost, in->cost.setup);
    do {
        if (ckpt_policy_sizes(in, readers, ret, &first) == 0)
            return 0;
    } while (ckpt_policy_less(&readers));
    return ckpt_err_move(err, &first);
}
