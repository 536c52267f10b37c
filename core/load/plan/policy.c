/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a load: their defaults and limits. Chooses readers, threads, O_DIRECT and the
 * sizes of slots. */
#include "load/plan/policy.h"

#include <math.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/sized.h"
#include "tensor/strided.h"

enum {
    CACHED_PIECE = 2 << 20, /* bytes of a piece of cached files: stays in the CPU's cache */
    MOST_THREADS = 8,
    COLD_THREADS = 4,  /* reads that keep a disk busy */
    CACHED_GAP = 4096, /* copying a larger hole costs more than another system call */
    EXACT_RUN = 1,     /* the same if every byte should be read once: no holes are read */
};

/* ---- the options ---- */

enum {
    HOST_BYTES = 256 << 20,
    DEVICE_BYTES = 512 << 20,
    READ_TIMEOUT_MS = 120 * 1000,
    EXCHANGE_TIMEOUT_MS = 300 * 1000,
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

/* ---- the decision ---- */

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
                                          .piece = in_memory ? CACHED_PIECE : 0,
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
    readers = ckpt_cost_choose(&ret->cost, in->cost.setup);
    do {
        if (ckpt_policy_sizes(in, readers, ret, &first) == 0)
            return 0;
    } while (ckpt_policy_less(&readers));
    return ckpt_err_move(err, &first);
}
