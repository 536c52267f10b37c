/* SPDX-License-Identifier: Apache-2.0 */
/* Pausing a load: all ranks stop exchanging after the same window (struct ckpt_pause). */
#include <string.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "load/engine/engine_inner.h"

/* The number of the last window that this rank has opened, plus one; 0: none. */
static uint32_t own_count(const struct ckpt_engine *e)
{
    return e->next_window ? e->plan->windows.ptr[e->next_window - 1].number + 1 : 0;
}

/* Take note of rank 0's announcement, and pass it on to the ranks below. */
static void tell_below(struct ckpt_engine *e, uint32_t last)
{
    e->pause.agreed++;
    e->pause.stop_at = last;
    for (uint32_t k = 0; k < ckpt_tree_children(e->self, e->size); k++)
        (void)ckpt_comm_send(e->comm, ckpt_tree_child(e->self, k), CKPT_CTL_PAUSE_AT, &last,
                             sizeof last, NULL);
}

void ckpt_pause_receive(struct ckpt_engine *e, uint32_t type, const unsigned char *data, size_t len)
{
    uint32_t count;

    if (len != sizeof count)
        return;
    memcpy(&count, data, sizeof count);
    if (type == CKPT_CTL_PAUSE_AT) {
        tell_below(e, count);
        return;
    }
    e->pause.nheard++;
    e->pause.furthest = (uint32_t)ckpt_max_u64(e->pause.furthest, count);
}

/* Report to the rank above, as this rank and all ranks below are to pause. Rank 0 announces. */
static void tell_above(struct ckpt_engine *e)
{
    const uint32_t most = (uint32_t)ckpt_max_u64(e->pause.furthest, own_count(e));

    e->pause.reported++;
    e->pause.nheard = e->pause.furthest = 0;
    if (e->self == 0)
        tell_below(e, most);
    else
        (void)ckpt_comm_send(e->comm, ckpt_tree_parent(e->self), CKPT_CTL_PAUSE, &most, sizeof most,
                             NULL);
}

bool ckpt_pause_allows(struct ckpt_engine *e, const struct ckpt_window *w)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool wanted = e->pause.wanted, agreed = e->pause.agreed == e->pause.asked;
    (void)pthread_mutex_unlock(&e->lock);
    return !wanted || (agreed && w->number < e->pause.stop_at);
}

bool ckpt_pause_turn(struct ckpt_engine *e)
{
    const bool more = e->next_window < e->plan->windows.len &&
                      ckpt_pause_allows(e, &e->plan->windows.ptr[e->next_window]);

    (void)pthread_mutex_lock(&e->lock);
    const bool wanted = e->pause.wanted, tell = wanted && e->pause.reported < e->pause.asked;
    if (wanted && e->pause.agreed == e->pause.asked && !more && e->nclosed == e->next_window &&
        !e->pause.reached) {
        e->pause.reached = true;
        (void)pthread_cond_broadcast(&e->news);
    }
    (void)pthread_mutex_unlock(&e->lock);
    if (tell && e->pause.nheard == ckpt_tree_children(e->self, e->size))
        tell_above(e);
    return wanted && !more;
}

int ckpt_pause_check(struct ckpt_engine *e, uint64_t now, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool waits = e->pause.wanted && e->pause.agreed != e->pause.asked;
    const uint64_t since = e->pause.since_ms;
    (void)pthread_mutex_unlock(&e->lock);
    return waits && now > since + e->opt.exchange_timeout_ms
               ? ckpt_fail(err, CKPT_TIMEOUT,
                           "a pause was asked for here, but within %.1f s not on all ranks",
                           e->opt.exchange_timeout_ms / 1000.0)
               : 0;
}

static bool is_paused(const struct ckpt_engine *e) { return e->pause.reached; }

int ckpt_engine_pause(struct ckpt_engine *e, uint32_t timeout_ms, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&e->lock);
    if (!e->pause.wanted) {
        e->pause.asked++;
        e->pause.wanted = true;
        e->pause.since_ms = ckpt_now_ms();
        ckpt_engine_kick(e);
    }
    (void)pthread_mutex_unlock(&e->lock);
    return ckpt_engine_wait_for(e, timeout_ms, is_paused, err);
}

int ckpt_engine_resume(struct ckpt_engine *e, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&e->lock);
    const bool wanted = e->pause.wanted, over = e->finished, reached = e->pause.reached;
    (void)pthread_mutex_unlock(&e->lock);
    if (!wanted || over)
        return 0;
    if (!reached)
        return ckpt_fail(err, CKPT_USAGE, "the load is not paused yet");
    if (e->device && e->device->ops->begin(e->device, err) < 0)
        return -1;
    (void)pthread_mutex_lock(&e->lock);
    e->pause.wanted = e->pause.reached = false;
    ckpt_engine_kick(e);
    (void)pthread_mutex_unlock(&e->lock);
    return 0;
}
