/* SPDX-License-Identifier: Apache-2.0 */
/* Who reads, with how many threads, in windows of what size. */
#include "load/policy.h"

#include "base/ckd.h"
#include "base/err.h"
#include "tensor/strided.h"

enum {
    HOT_PIECE = 2 << 20, /* of what is in memory: stays in the CPU's cache */
    MOST_THREADS = 8,
    COLD_THREADS = 4, /* what a disk wants in flight */
    HOT_GAP = 4096,   /* reading on in the page cache is as dear as another call */
    LONG_RUN = 4096,  /* is read alone rather than with what lies between */
    EXACT_RUN = 1,    /* where every byte is to be read once: all are */
};

static bool is_hot(const struct ckpt_policy_input *in) { return in->cost.hot > CKPT_LOAD_HOT; }

/* Ranks of a node that read for themselves may want the same bytes: the page cache reads them once.
 */
static enum ckpt_direct choose_direct(const struct ckpt_policy_input *in, enum ckpt_readers readers)
{
    if (in->opt->direct == CKPT_LOAD_DIRECT_ALWAYS)
        return CKPT_DIRECT_ALL;
    if (in->opt->direct == CKPT_LOAD_DIRECT_NEVER || is_hot(in) ||
        (readers == CKPT_READERS_EACH && in->local > 1))
        return CKPT_DIRECT_NONE;
    return CKPT_DIRECT_COLD;
}

static uint32_t choose_threads(const struct ckpt_policy_input *in)
{
    const uint64_t least = is_hot(in) ? 1 : COLD_THREADS;
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
    const bool cached = is_hot(in) && in->cost.nnode == 1 && !device;

    ret->readers = readers;
    ret->direct = choose_direct(in, readers);
    ret->threads = choose_threads(in);
    ckpt_load_share(aside, ret->direct != CKPT_DIRECT_NONE, is_hot(in), &ret->threads, &ret->share);
    ret->gap = is_hot(in) ? HOT_GAP : CKPT_STRIDED_GAP;
    /* what lies in holes is another unit's, read by another worker or rank */
    ret->run = shared ? EXACT_RUN : LONG_RUN;
    const struct ckpt_size_input sizes = {.opt = in->opt,
                                          .aside = aside,
                                          .piece = cached ? HOT_PIECE : 0,
                                          .threads = ret->threads,
                                          .shared = shared,
                                          .device = device};
    return ckpt_load_sizes(&sizes, &ret->slots, err);
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
    readers = ckpt_cost_choose(&ret->cost);
    do {
        if (ckpt_policy_sizes(in, readers, ret, &first) == 0)
            return 0;
    } while (ckpt_policy_less(&readers));
    return ckpt_fail(err, first.code, "%s", first.text);
}
