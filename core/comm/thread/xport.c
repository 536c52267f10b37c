/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are threads of one process. Each pair of ranks has a queue of sends and one of
 * receives; the thread that posts the second of the two copies the bytes. With one rank this is the
 * transport `self`. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "comm/comm.h"

/* One rank's queues; the hub's lock protects them. */
struct box {
    struct ckpt_xfer_queue *recv; /* posted by this rank, per sender */
    struct ckpt_xfer_queue *send; /* posted by others to this rank, per sender */
    struct ckpt_ctl_message *ctl, **ctl_tail;
    pthread_cond_t cond;
    uint64_t events;
    bool gone;
};

struct hub {
    pthread_mutex_t lock;
    uint32_t size, refs;
    struct box box[];
};

struct xport_thread {
    struct ckpt_xport x;
    struct hub *hub;
    uint64_t seen; /* the hub's events that this rank has noticed */
};

static struct xport_thread *self(struct ckpt_xport *x) { return (struct xport_thread *)x; }

static void notify(struct box *b)
{
    b->events++;
    (void)pthread_cond_signal(&b->cond);
}

/* Copy the oldest send of a pair to its oldest receive, if there are both; they have equal sizes.
 */
static int match(struct hub *h, uint32_t from, uint32_t to, struct ckpt_err *err)
{
    struct ckpt_xfer_queue *send = &h->box[to].send[from], *recv = &h->box[to].recv[from];

    while (send->head && recv->head) {
        struct ckpt_xfer *s = send->head, *r = recv->head;
        if (s->len != r->len)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %u sends %zu bytes, rank %u expects %zu",
                             from, s->len, to, r->len);
        memcpy(r->buf, s->buf, s->len);
        ckpt_queue_pop(send);
        ckpt_queue_pop(recv);
        atomic_store(&s->done, true);
        atomic_store(&r->done, true);
        notify(&h->box[from]);
        notify(&h->box[to]);
    }
    return 0;
}

static int thread_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    struct hub *h = self(x)->hub;
    int rc = 0;

    (void)pthread_mutex_lock(&h->lock);
    if (h->box[t->peer].gone) {
        rc = ckpt_fail(err, CKPT_PEER, "%s is gone", ckpt_xport_rank_text(x, t->peer).text);
    } else if (t->send) {
        ckpt_queue_push(&h->box[t->peer].send[x->rank], t);
        rc = match(h, x->rank, t->peer, err);
    } else {
        ckpt_queue_push(&h->box[x->rank].recv[t->peer], t);
        rc = match(h, t->peer, x->rank, err);
    }
    (void)pthread_mutex_unlock(&h->lock);
    return rc;
}

static int thread_progress(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err)
{
    struct hub *h = self(x)->hub;
    int rc = 0;

    (void)pthread_mutex_lock(&h->lock);
    *ret_moved = h->box[x->rank].events != self(x)->seen;
    self(x)->seen = h->box[x->rank].events;
    for (uint32_t r = 0; r < h->size && rc == 0; r++)
        if (h->box[r].gone && h->box[x->rank].recv[r].head && !h->box[x->rank].send[r].head)
            rc = ckpt_fail(err, CKPT_PEER, "%s is gone", ckpt_xport_rank_text(x, r).text);
    (void)pthread_mutex_unlock(&h->lock);
    return rc;
}

static void thread_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    struct hub *h = self(x)->hub;
    struct box *b = &h->box[x->rank];
    const struct timespec until = ckpt_deadline(timeout_ms);

    (void)pthread_mutex_lock(&h->lock);
    while (b->events == self(x)->seen &&
           pthread_cond_timedwait(&b->cond, &h->lock, &until) != ETIMEDOUT)
        ;
    (void)pthread_mutex_unlock(&h->lock);
}

static void thread_kick(struct ckpt_xport *x)
{
    struct hub *h = self(x)->hub;

    (void)pthread_mutex_lock(&h->lock);
    notify(&h->box[x->rank]);
    (void)pthread_mutex_unlock(&h->lock);
}

static int thread_ctl_send(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                           struct ckpt_err *err)
{
    struct hub *h = self(x)->hub;
    struct ckpt_ctl_message *m = malloc(sizeof *m);
    unsigned char *data = malloc(len + 1);

    if (!m || !data) {
        free(m);
        free(data);
        return ckpt_nomem(err);
    }
    memcpy(data, msg, len);
    *m = (struct ckpt_ctl_message){.peer = x->rank, .len = len, .data = data};
    (void)pthread_mutex_lock(&h->lock);
    *h->box[peer].ctl_tail = m;
    h->box[peer].ctl_tail = &m->next;
    notify(&h->box[peer]);
    (void)pthread_mutex_unlock(&h->lock);
    return 0;
}

static int thread_ctl_recv(struct ckpt_xport *x, struct ckpt_ctl_message **ret,
                           struct ckpt_err *err)
{
    struct hub *h = self(x)->hub;
    struct box *b = &h->box[x->rank];

    (void)err;
    (void)pthread_mutex_lock(&h->lock);
    *ret = b->ctl;
    if (b->ctl && !(b->ctl = b->ctl->next))
        b->ctl_tail = &b->ctl;
    (void)pthread_mutex_unlock(&h->lock);
    return *ret != NULL;
}

static bool thread_gone(struct ckpt_xport *x, uint32_t peer)
{
    struct hub *h = self(x)->hub;

    (void)pthread_mutex_lock(&h->lock);
    bool gone = h->box[peer].gone;
    (void)pthread_mutex_unlock(&h->lock);
    return gone;
}

/* No other thread copies to or from this rank's buffers after this. */
static bool thread_cancel(struct ckpt_xport *x)
{
    struct hub *h = self(x)->hub;

    (void)pthread_mutex_lock(&h->lock);
    for (uint32_t r = 0; r < h->size; r++) {
        ckpt_queue_init(&h->box[x->rank].recv[r]);
        ckpt_queue_init(&h->box[r].send[x->rank]);
    }
    (void)pthread_mutex_unlock(&h->lock);
    return true;
}

static void hub_free(struct hub *h)
{
    for (uint32_t r = 0; r < h->size; r++) {
        while (h->box[r].ctl) {
            struct ckpt_ctl_message *m = h->box[r].ctl;
            h->box[r].ctl = m->next;
            ckpt_ctl_free(m);
        }
        free(h->box[r].recv);
        free(h->box[r].send);
        (void)pthread_cond_destroy(&h->box[r].cond);
    }
    (void)pthread_mutex_destroy(&h->lock);
    free(h);
}

static void thread_free(struct ckpt_xport *x)
{
    struct hub *h = self(x)->hub;

    (void)thread_cancel(x);
    (void)pthread_mutex_lock(&h->lock);
    h->box[x->rank].gone = true;
    for (uint32_t r = 0; r < h->size; r++)
        notify(&h->box[r]);
    bool last = --h->refs == 0;
    (void)pthread_mutex_unlock(&h->lock);
    if (last)
        hub_free(h);
    free(x);
}

/* The two transports, "threads" and "self", differ only in their names. */
#define THREAD_OPS(label)                                                                          \
    {                                                                                              \
        .name = (label), .post = thread_post, .progress = thread_progress, .wait = thread_wait,    \
        .kick = thread_kick, .ctl_send = thread_ctl_send, .ctl_recv = thread_ctl_recv,             \
        .gone = thread_gone, .cancel = thread_cancel, .free = thread_free,                         \
    }
static const struct ckpt_xport_ops thread_ops = THREAD_OPS("threads");
static const struct ckpt_xport_ops self_ops = THREAD_OPS("self");

static int hub_new(uint32_t n, struct hub **ret)
{
    struct hub *h = calloc(1, sizeof *h + n * sizeof *h->box);
    bool good = h != NULL;

    if (!h)
        return -1;
    h->size = n;
    h->refs = 1;
    (void)pthread_mutex_init(&h->lock, NULL);
    for (uint32_t r = 0; r < n; r++) {
        struct box *b = &h->box[r];
        ckpt_cond_init(&b->cond);
        b->ctl_tail = &b->ctl;
        b->recv = calloc(n, sizeof *b->recv);
        b->send = calloc(n, sizeof *b->send);
        good &= b->recv && b->send;
        for (uint32_t k = 0; k < n && b->recv && b->send; k++) {
            ckpt_queue_init(&b->recv[k]);
            ckpt_queue_init(&b->send[k]);
        }
    }
    if (!good) {
        hub_free(h);
        return -1;
    }
    *ret = h;
    return 0;
}

int ckpt_comm_threads(uint32_t n, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct hub *h;
    int rc = 0;

    if (n == 0)
        return ckpt_fail(err, CKPT_USAGE, "a comm of no ranks");
    if (hub_new(n, &h) < 0)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++) {
        struct xport_thread *x = rc == 0 ? calloc(1, sizeof *x) : NULL;
        ret[r] = NULL;
        if (!x) {
            rc = ckpt_nomem(err);
            continue;
        }
        x->x = (struct ckpt_xport){
            .ops = n == 1 ? &self_ops : &thread_ops, .rank = r, .size = n, .same_host = true};
        x->hub = h;
        h->refs++;
        rc = ckpt_comm_wrap(&x->x, &ret[r], err);
    }
    for (uint32_t r = 0; r < n && rc < 0; r++) {
        ckpt_comm_free(ret[r]);
        ret[r] = NULL;
    }
    if (--h->refs == 0) /* this function's */
        hub_free(h);
    return rc;
}

int ckpt_comm_self(struct ckpt_comm **ret, struct ckpt_err *err)
{
    return ckpt_comm_threads(1, ret, err);
}
