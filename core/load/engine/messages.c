/* SPDX-License-Identifier: Apache-2.0 */
/* Control messages of a load outside of rounds: a rank tells all others that it has failed, and
 * ranks agree on a pause, in which all stop exchanging after the same window (struct ckpt_pause).
 */
#include <string.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "load/engine/engine_inner.h"

/* ---- a failure ---- */

struct abort_message {
    uint32_t code;
    char text[CKPT_ERR_TEXT];
};

/* Another rank has failed: pass the message on along the tree, and fail with the same error. A rank
 * that has failed before has told its neighbours. */
static void receive_abort(struct ckpt_engine *e, uint32_t from, const unsigned char *data,
                          size_t len)
{
    struct abort_message m;
    struct ckpt_err err = {0};

    if (len != sizeof m || ckpt_engine_has_stopped(e))
        return;
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(e->self, e->size, i, &peer); i++)
        if (peer != from)
            ckpt_comm_send(e->comm, peer, CKPT_CTL_ABORT, data, len);
    memcpy(&m, data, sizeof m);
    m.text[CKPT_ERR_TEXT - 1] = '\0';
    if (m.code == CKPT_OK || m.code > CKPT_CANCELLED || !m.text[0])
        (void)ckpt_fail(&err, CKPT_PEER, "another rank failed, but its error message is damaged");
    else
        (void)ckpt_fail(&err, (enum ckpt_code)m.code, "%s", m.text);
    ckpt_engine_fail(e, &err, false);
}

void ckpt_abort_send(struct ckpt_comm *comm, const struct ckpt_err *why)
{
    struct abort_message m = {.code = (uint32_t)why->code};

    memcpy(m.text, why->text, sizeof m.text);
    for (uint32_t i = 0, peer; ckpt_tree_neighbour(comm->x->rank, comm->x->size, i, &peer); i++)
        ckpt_comm_send(comm, peer, CKPT_CTL_ABORT, &m, sizeof m);
}

/* ---- a pause ---- */

/* Take note of rank 0's announcement, and pass it on to the ranks below. */
static void tell_below(struct ckpt_engine *e, uint32_t last)
{
    e->pause.agreed++;
    e->pause.stop_at = last;
    for (uint32_t k = 0; k < ckpt_tree_children(e->self, e->size); k++)
        ckpt_comm_send(e->comm, ckpt_tree_child(e->self, k), CKPT_CTL_PAUSE_AT, &last, sizeof last);
}

static void receive_pause(struct ckpt_engine *e, uint32_t type, const unsigned char *data,
                          size_t len)
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
    const uint32_t opened =
        e->next_window ? e->plan->windows.ptr[e->next_window - 1].number + 1 : 0;
    const uint32_t most = (uint32_t)ckpt_max_u64(e->pause.furthest, opened);

    e->pause.reported++;
    e->pause.nheard = e->pause.furthest = 0;
    if (e->self == 0)
        tell_below(e, most);
    else
        ckpt_comm_send(e->comm, ckpt_tree_parent(e->self), CKPT_CTL_PAUSE, &most, sizeof most);
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

/* ---- both ---- */

void ckpt_engine_receive(void *engine, uint32_t peer, const unsigned char *data, size_t len)
{
    struct ckpt_engine *e = engine;
    struct ckpt_ctl_head head;

    memcpy(&head, data, sizeof head);
    if (head.type == CKPT_CTL_ABORT)
        receive_abort(e, peer, data + sizeof head, len - sizeof head);
    else if (head.type == CKPT_CTL_PAUSE || head.type == CKPT_CTL_PAUSE_AT)
        receive_pause(e, head.type, data + sizeof head, len - sizeof head);
}
