/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers between processes of one machine that map each other's shared memory: the data
 * connection carries notes about where the bytes of a transfer are, and which transfers are used
 * up. */
#include <sys/socket.h>

#include "base/err.h"
#include "comm/tcp/tcp.h"

static int set_place(struct ckpt_tcp_same_host *n, struct ckpt_xfer *t, uint64_t off)
{
    if (!(t->there = ckpt_shm_at(&n->view, off, t->len)))
        return -1;
    atomic_store(&t->done, true);
    return 0;
}

static int queue_note(struct ckpt_tcp_peer *p, uint64_t number, uint64_t off)
{
    const struct ckpt_tcp_note note = {number, off};

    return ckpt_vec_push(&p->same_host.out, note);
}

int ckpt_tcp_same_host_post(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, struct ckpt_xfer *t,
                            bool *ret_done, struct ckpt_err *err)
{
    struct ckpt_tcp_same_host *n = &p->same_host;

    *ret_done = false;
    if (t->send) {
        t->at = n->nsend++;
        uint64_t off;
        if (!ckpt_shm_offset(&m->tcp->shm, t->buf, &off))
            return ckpt_fail(err, CKPT_USAGE, "bytes that are sent are not in shared memory");
        return queue_note(p, t->at, off) < 0 ? ckpt_nomem(err) : 0;
    }
    t->at = n->nrecv++;
    if (n->nearly < n->early.len) {
        if (set_place(n, t, n->early.ptr[n->nearly++]) < 0)
            return ckpt_xport_fail_gone(&m->x, p->rank, err);
        *ret_done = true;
    }
    if (n->nearly == n->early.len)
        n->nearly = n->early.len = 0;
    return 0;
}

static int take_note(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p,
                     const struct ckpt_tcp_note *note)
{
    struct ckpt_tcp_same_host *n = &p->same_host;
    struct ckpt_xfer *t;

    if (note->off == 0) {
        if (!(t = ckpt_queue_take(&p->send, note->number)))
            return -1;
        atomic_store(&t->done, true);
        return 0;
    }
    if (!p->recv.head) {
        if (ckpt_vec_push(&n->early, note->off) == 0)
            return 0;
        m->x.nomem_peer = p->rank + 1;
        return -1;
    }
    if (p->recv.head->at != note->number)
        return -1;
    t = ckpt_queue_take(&p->recv, note->number);
    return set_place(n, t, note->off);
}

void ckpt_tcp_fetched(struct ckpt_xport *x, const struct ckpt_xfer *t)
{
    struct ckpt_xport_tcp *m = ((struct ckpt_xport_tcp *)x);
    struct ckpt_tcp_same_host *n = &m->peer[t->peer]->same_host;
    const struct ckpt_tcp_note note = {t->at, 0};

    (void)pthread_mutex_lock(&m->lock);
    if (ckpt_vec_push(&n->used, note) < 0)
        atomic_store(&n->lost, true);
    (void)pthread_mutex_unlock(&m->lock);
    x->ops->kick(x);
}

/* Queue notes about the transfers that workers have used up. False: no memory. */
static bool queue_used(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p)
{
    struct ckpt_tcp_same_host *n = &p->same_host;
    bool good;

    (void)pthread_mutex_lock(&m->lock);
    good = !n->lost;
    for (size_t i = 0; i < n->used.len && good; i++)
        if (!(good = queue_note(p, n->used.ptr[i].number, n->used.ptr[i].off) == 0))
            m->x.nomem_peer = p->rank + 1;
    n->used.len = 0;
    (void)pthread_mutex_unlock(&m->lock);
    return good;
}

void ckpt_tcp_same_host_clear(struct ckpt_xport_tcp *m, struct ckpt_tcp_same_host *n)
{
    (void)pthread_mutex_lock(&m->lock);
    ckpt_vec_release(&n->used);
    (void)pthread_mutex_unlock(&m->lock);
    ckpt_vec_release(&n->early);
    ckpt_vec_release(&n->out);
    n->nearly = n->out_at = n->in_at = 0;
}

static int push_notes(struct ckpt_tcp_same_host *n, int fd, bool *moved)
{
    const size_t len = n->out.len * sizeof *n->out.ptr;

    while (n->out_at < len) {
        ssize_t got = send(fd, (char *)n->out.ptr + n->out_at, len - n->out_at, MSG_NOSIGNAL);
        if (got < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        *moved = true;
        n->out_at += (size_t)got;
    }
    n->out.len = n->out_at = 0;
    return 0;
}

static int pull_notes(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved)
{
    struct ckpt_tcp_same_host *n = &p->same_host;

    for (;;) {
        ssize_t got = recv(p->data.fd, (char *)&n->in + n->in_at, sizeof n->in - n->in_at, 0);
        if (got < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (got == 0)
            return -1;
        *moved = true;
        n->in_at += (size_t)got;
        if (n->in_at < sizeof n->in)
            continue;
        n->in_at = 0;
        if (take_note(m, p, &n->in) < 0)
            return -1;
    }
}

int ckpt_tcp_same_host_open(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, struct ckpt_err *err)
{
    if (!p->same_host.active || p->same_host.nsend || p->same_host.nrecv)
        return 0;
    for (struct ckpt_xfer *t = p->send.head; t; t = t->next) {
        bool ignored;
        if (ckpt_tcp_same_host_post(m, p, t, &ignored, err) < 0)
            return -1;
    }
    for (struct ckpt_xfer *t = p->recv.head; t; t = t->next)
        t->at = p->same_host.nrecv++;
    return 0;
}

int ckpt_tcp_same_host_move(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved)
{
    return !queue_used(m, p) || push_notes(&p->same_host, p->data.fd, moved) < 0 ||
                   pull_notes(m, p, moved) < 0
               ? -1
               : 0;
}
