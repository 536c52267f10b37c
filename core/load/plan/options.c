/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a load: their defaults and limits. */
#include "load/plan/options.h"

#include <math.h>

#include "base/err.h"
#include "base/sized.h"

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
