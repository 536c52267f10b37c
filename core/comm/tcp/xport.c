/* SPDX-License-Identifier: Apache-2.0 */
/* Moving bytes over TCP. Control messages travel along the tree of ranks, from neighbour to
 * neighbour. Two ranks that exchange data have a data connection, made when it is first needed; it
 * carries the bytes of transfers in the order of posting, without frames, because both sides know
 * the sizes. Between processes of one machine that can read each other's memory, it carries notes
 * about where the bytes are, and which transfers were copied (same_host.c). */
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/tcp/tcp.h"

enum {
    MAX_CTL = 1 << 30, /* bytes of a control message: a rank that is sent more takes it for lies */
    FIRST_ROOM = 64 << 10, /* bytes allocated for a message before more than its frame is there */
    FLUSH_MS = 2000, /* how long the end waits until messages to neighbours are sent: a rank's last
                        word says why a load has failed, and a dead neighbour takes none */
};

static struct ckpt_xport_tcp *self(struct ckpt_xport *x) { return (struct ckpt_xport_tcp *)x; }

/* Has the control connection ended? */
static bool is_gone(const struct ckpt_tcp_peer *p) { return p->ctl.state == CKPT_TCP_CLOSED; }

static void close_data(struct ckpt_tcp_peer *p)
{
    ckpt_closep(&p->data.fd);
    p->data.state = CKPT_TCP_CLOSED;
}

/* ---- moving bytes ---- */

static int tcp_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(self(x), t->peer);

    if (!p)
        return ckpt_nomem(err);
    if (p->data.state == CKPT_TCP_CLOSED || is_gone(p) || self(x)->cancelled)
        return ckpt_fail(err, CKPT_PEER, "%s is gone", ckpt_xport_rank_text(x, t->peer).text);
    bool done = false;
    if (p->data.state == CKPT_TCP_OPEN && p->same_host.active &&
        ckpt_tcp_same_host_post(self(x), p, t, &done, err) < 0)
        return -1;
    if (!done)
        ckpt_queue_push(t->send ? &p->send : &p->recv, t);
    return 0;
}

/* Move bytes of the transfers of one direction. -1: the connection ended. */
static int move_queue(struct ckpt_xport_tcp *m, int fd, struct ckpt_xfer_queue *q, bool *moved)
{
    while (q->head) {
        struct ckpt_xfer *t = q->head;
        char *at = (char *)t->buf + t->at;
        const size_t len = t->len - t->at;
        const ssize_t n = !len      ? 0
                          : t->send ? send(fd, at, len, MSG_NOSIGNAL)
                                    : recv(fd, at, len, 0);
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (n == 0 && len)
            return -1;
        *moved = true;
        t->at += (size_t)n;
        m->x.moved += (size_t)n;
        if (t->at < t->len)
            continue;
        ckpt_queue_pop(q);
        atomic_store(&t->done, true);
    }
    return 0;
}

static int move_data(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved)
{
    if (p->same_host.active)
        return ckpt_tcp_same_host_move(m, p, moved);
    return move_queue(m, p->data.fd, &p->send, moved) < 0 ||
                   move_queue(m, p->data.fd, &p->recv, moved) < 0
               ? -1
               : 0;
}

/* ---- control messages ---- */

/* The neighbour in the tree that forwards messages to a rank, or the rank itself. */
static uint32_t next_hop(const struct ckpt_xport *x, uint32_t to)
{
    for (uint32_t at = to; at > 0; at = ckpt_tree_parent(at))
        if (ckpt_tree_parent(at) == x->rank)
            return at;
    return ckpt_tree_parent(x->rank);
}

static int push_ctl(struct ckpt_tcp_peer *p, bool *moved)
{
    while (p->out) {
        struct ckpt_tcp_outgoing *o = p->out;
        ssize_t n = send(p->ctl.fd, o->data + o->at, o->len - o->at, MSG_NOSIGNAL);
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        *moved = true;
        o->at += (size_t)n;
        if (o->at < o->len)
            continue;
        if (!(p->out = o->next))
            p->out_tail = &p->out;
        free(o);
    }
    return 0;
}

/* Queue a message for the neighbour that is next on its way. */
static int queue_message(struct ckpt_xport_tcp *m, const struct ckpt_tcp_frame *frame,
                         const void *msg, struct ckpt_err *err)
{
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(m, next_hop(&m->x, frame->to));
    struct ckpt_tcp_outgoing *o = malloc(sizeof *o + sizeof *frame + frame->len);
    bool moved;

    if (!o || !p) {
        free(o);
        return ckpt_nomem(err);
    }
    if (is_gone(p)) {
        free(o);
        return ckpt_fail(err, CKPT_PEER, "%s is gone", ckpt_xport_rank_text(&m->x, p->rank).text);
    }
    o->next = NULL;
    o->len = sizeof *frame + frame->len;
    o->at = 0;
    memcpy(o->data, frame, sizeof *frame);
    if (frame->len)
        memcpy(o->data + sizeof *frame, msg, frame->len);
    *p->out_tail = o;
    p->out_tail = &o->next;
    if (p->ctl.state == CKPT_TCP_OPEN)
        (void)push_ctl(p, &moved); /* progress will notice the end of the connection */
    return 0;
}

static int take_message(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p)
{
    struct ckpt_ctl_message *in;

    p->in_at = 0;
    if (p->in_frame.to != m->x.rank) { /* other ranks notice if it cannot be forwarded */
        (void)queue_message(m, &p->in_frame, p->in, NULL);
        free(p->in);
        p->in = NULL;
        return 0;
    }
    if (!(in = malloc(sizeof *in))) {
        m->x.nomem_peer = p->rank + 1;
        return -1;
    }
    *in =
        (struct ckpt_ctl_message){.peer = p->in_frame.from, .len = p->in_frame.len, .data = p->in};
    p->in = NULL;
    *m->in_tail = in;
    m->in_tail = &in->next;
    return 0;
}

/* Make room for `need` bytes of the message. The buffer doubles as bytes arrive, so that a frame
 * with a large length alone allocates nothing. */
static int make_room(struct ckpt_tcp_peer *p, size_t need)
{
    const size_t cap = (size_t)ckpt_min_u64(ckpt_max_u64(p->in_frame.len, need),
                                            p->in ? ckpt_max_u64(need, 2 * (uint64_t)p->in_cap)
                                                  : ckpt_max_u64(need, FIRST_ROOM));
    unsigned char *in = p->in && p->in_cap >= need ? p->in : realloc(p->in, cap);

    if (!in)
        return -1;
    if (in != p->in || p->in_cap < need)
        p->in_cap = cap;
    p->in = in;
    return 0;
}

/* Check a frame: may such a message arrive from this neighbour? */
static int take_frame(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p)
{
    const struct ckpt_tcp_frame *f = &p->in_frame;

    if (f->len > MAX_CTL || f->from >= m->x.size || f->to >= m->x.size ||
        (f->to != m->x.rank && next_hop(&m->x, f->to) == p->rank))
        return -1;
    if (make_room(p, 1) == 0)
        return 0;
    m->x.nomem_peer = p->rank + 1;
    return -1;
}

/* Where the next bytes of frame and message belong, and how many there is room for. */
static unsigned char *next_bytes(struct ckpt_tcp_peer *p, size_t *ret_want)
{
    const size_t head = sizeof p->in_frame;
    const size_t body = p->in_frame.len;

    if (p->in_at < head) {
        *ret_want = head - p->in_at;
        return (unsigned char *)&p->in_frame + p->in_at;
    }
    const size_t at = p->in_at - head;
    if (at == p->in_cap && at < body && make_room(p, at + 1) < 0)
        return NULL;
    *ret_want = (size_t)ckpt_min_u64(body, p->in_cap) - at;
    return p->in + at;
}

static int pull_ctl(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved)
{
    const size_t head = sizeof p->in_frame;

    for (;;) {
        size_t want = 0;
        unsigned char *to = next_bytes(p, &want);
        ssize_t n = to && want ? recv(p->ctl.fd, to, want, 0) : 0;
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (!to)
            m->x.nomem_peer = p->rank + 1;
        if (!to || (n == 0 && want))
            return -1;
        *moved = true;
        p->in_at += (size_t)n;
        if (p->in_at == head && !p->in && take_frame(m, p) < 0)
            return -1;
        if (p->in_at >= head && p->in_at == head + p->in_frame.len && take_message(m, p) < 0)
            return -1;
    }
}

/* ---- progress ---- */

static int progress_peer(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved,
                         struct ckpt_err *err)
{
    if (p->ctl.state == CKPT_TCP_OPEN && (push_ctl(p, moved) < 0 || pull_ctl(m, p, moved) < 0)) {
        /* receive what was sent before the end; messages to the peer are lost */
        bool ignored;
        (void)pull_ctl(m, p, &ignored);
        ckpt_closep(&p->ctl.fd);
        p->ctl.state = CKPT_TCP_CLOSED;
    }
    if (p->data.state == CKPT_TCP_OPEN && ckpt_tcp_same_host_open(m, p, err) < 0)
        return -1;
    if (p->data.state == CKPT_TCP_OPEN && move_data(m, p, moved) < 0)
        close_data(p);
    if ((p->data.state == CKPT_TCP_CLOSED || is_gone(p)) &&
        (p->send.head || p->recv.head || p->same_host.lost) && p->data.state != CKPT_TCP_OPEN)
        return ckpt_xport_fail_gone(&m->x, p->rank, err);
    return 0;
}

static int tcp_progress(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err)
{
    struct ckpt_xport_tcp *m = self(x);
    struct ckpt_err first = {0};
    int rc;

    *ret_moved = false;
    rc = ckpt_tcp_progress_connections(m, ret_moved, &first);
    for (size_t i = 0; i < m->active.len; i++)
        if (progress_peer(m, m->active.ptr[i], ret_moved, rc < 0 ? NULL : &first) < 0)
            rc = -1;
    return rc < 0 ? ckpt_err_move(err, &first) : 0;
}

static int add_poll(struct ckpt_xport_tcp *m, int fd, int events)
{
    const struct pollfd p = {fd, (short)events, 0};

    return ckpt_vec_push(&m->poll, p);
}

static void poll_peer(struct ckpt_xport_tcp *m, const struct ckpt_tcp_peer *p)
{
    if (p->ctl.state == CKPT_TCP_OPEN)
        (void)add_poll(m, p->ctl.fd, POLLIN | (p->out ? POLLOUT : 0));
    if (p->rendezvous.state == CKPT_TCP_OPEN)
        (void)add_poll(m, p->rendezvous.fd, POLLIN);
    if (p->data.state == CKPT_TCP_OPEN && p->same_host.active)
        (void)add_poll(m, p->data.fd, POLLIN | (p->same_host.out.len ? POLLOUT : 0));
    else if (p->data.state == CKPT_TCP_OPEN && (p->send.head || p->recv.head))
        (void)add_poll(m, p->data.fd, (p->recv.head ? POLLIN : 0) | (p->send.head ? POLLOUT : 0));
}

static void tcp_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    struct ckpt_xport_tcp *m = self(x);
    uint64_t ignored;

    m->poll.len = 0;
    if (add_poll(m, m->event, POLLIN) < 0)
        return;
    if (m->tcp && m->handshakes.len < CKPT_TCP_HANDSHAKES && !m->cancelled)
        (void)add_poll(m, m->tcp->fd, POLLIN);
    if (m->rendezvous.listener >= 0 && m->handshakes.len < CKPT_TCP_HANDSHAKES)
        (void)add_poll(m, m->rendezvous.listener, POLLIN);
    for (size_t i = 0; i < m->handshakes.len && !m->cancelled; i++)
        (void)add_poll(m, m->handshakes.ptr[i].fd, ckpt_handshake_events(&m->handshakes.ptr[i]));
    for (size_t i = 0; i < m->active.len; i++)
        poll_peer(m, m->active.ptr[i]);
    (void)poll(m->poll.ptr, m->poll.len, (int)timeout_ms);
    if (m->poll.ptr[0].revents)
        (void)!read(m->event, &ignored, sizeof ignored);
}

static void tcp_kick(struct ckpt_xport *x)
{
    const uint64_t one = 1;

    (void)!write(self(x)->event, &one, sizeof one);
}

static int tcp_ctl_send(struct ckpt_xport *x, uint32_t to, const void *msg, size_t len,
                        struct ckpt_err *err)
{
    const struct ckpt_tcp_frame frame = {(uint32_t)len, x->rank, to};

    if (len > MAX_CTL)
        return ckpt_fail(err, CKPT_LIMIT, "a message of %zu bytes is longer than %d", len, MAX_CTL);
    return queue_message(self(x), &frame, msg, err);
}

static int tcp_ctl_recv(struct ckpt_xport *x, struct ckpt_ctl_message **ret, struct ckpt_err *err)
{
    struct ckpt_xport_tcp *m = self(x);

    (void)err;
    *ret = m->in;
    if (m->in && !(m->in = m->in->next))
        m->in_tail = &m->in;
    return *ret != NULL;
}

static bool tcp_gone(struct ckpt_xport *x, uint32_t peer)
{
    const struct ckpt_tcp_peer *p = self(x)->peer[peer];

    return p && is_gone(p);
}

/* The data connections may be in the middle of a transfer, and are closed. */
static bool tcp_cancel(struct ckpt_xport *x)
{
    struct ckpt_xport_tcp *m = self(x);

    m->cancelled = true;
    for (size_t i = 0; i < m->active.len; i++) {
        struct ckpt_tcp_peer *p = m->active.ptr[i];
        ckpt_tcp_same_host_clear(m, &p->same_host);
        close_data(p);
        ckpt_queue_init(&p->send);
        ckpt_queue_init(&p->recv);
    }
    return true;
}

/* Data connections are made anew when they are needed. */
static void tcp_renew(struct ckpt_xport *x)
{
    struct ckpt_xport_tcp *m = self(x);

    m->cancelled = false;
    m->renewed++;
    for (size_t i = 0; i < m->active.len; i++) {
        struct ckpt_tcp_peer *p = m->active.ptr[i];
        p->data = (struct ckpt_tcp_link){
            .state = is_gone(p) ? CKPT_TCP_CLOSED : CKPT_TCP_UNCONNECTED, .fd = -1};
        p->same_host.nsend = p->same_host.nrecv = 0;
        p->same_host.active = false;
        atomic_store(&p->same_host.lost, false);
    }
}

/* ---- life ---- */

static bool any_outgoing(const struct ckpt_xport_tcp *m)
{
    for (size_t i = 0; i < m->active.len; i++)
        if (m->active.ptr[i]->out && m->active.ptr[i]->ctl.state == CKPT_TCP_OPEN)
            return true;
    return false;
}

static void peer_free(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p)
{
    ckpt_tcp_same_host_clear(m, &p->same_host);
    ckpt_shm_leave(&p->same_host.view);
    close_data(p);
    ckpt_closep(&p->ctl.fd);
    ckpt_closep(&p->rendezvous.fd);
    while (p->out) {
        struct ckpt_tcp_outgoing *o = p->out;
        p->out = o->next;
        free(o);
    }
    free(p->in);
    free(p);
}

static void tcp_free(struct ckpt_xport *x)
{
    struct ckpt_xport_tcp *m = self(x);
    const uint64_t until = ckpt_now_ms() + FLUSH_MS;
    bool moved;

    (void)tcp_cancel(x);
    while (m->event >= 0 && any_outgoing(m) && ckpt_now_ms() < until) {
        (void)tcp_progress(x, &moved, NULL);
        if (!moved)
            tcp_wait(x, 10);
    }
    for (size_t i = 0; i < m->active.len; i++)
        peer_free(m, m->active.ptr[i]);
    while (m->in) {
        struct ckpt_ctl_message *in = m->in;
        m->in = in->next;
        ckpt_ctl_free(in);
    }
    for (size_t i = 0; i < m->handshakes.len; i++)
        ckpt_closep(&m->handshakes.ptr[i].fd);
    ckpt_tcp_end_rendezvous(m);
    for (uint32_t r = 0; m->address && r < x->size; r++)
        free(m->address[r]);
    ckpt_tcp_free(m->tcp);
    ckpt_closep(&m->event);
    ckpt_vec_release(&m->active);
    ckpt_vec_release(&m->handshakes);
    ckpt_vec_release(&m->poll);
    (void)pthread_mutex_destroy(&m->lock);
    free(m->address);
    free(m->peer);
    free(m);
}

static void *tcp_shm(struct ckpt_xport *x, uint64_t len)
{
    return self(x)->tcp ? ckpt_shm_map(&self(x)->tcp->shm, len) : NULL;
}

static const struct ckpt_xport_ops tcp_ops = {
    .name = "tcp",
    .post = tcp_post,
    .progress = tcp_progress,
    .shm = tcp_shm,
    .fetched = ckpt_tcp_fetched,
    .wait = tcp_wait,
    .kick = tcp_kick,
    .ctl_send = tcp_ctl_send,
    .ctl_recv = tcp_ctl_recv,
    .gone = tcp_gone,
    .cancel = tcp_cancel,
    .renew = tcp_renew,
    .free = tcp_free,
};

int ckpt_tcp_new(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, struct ckpt_xport_tcp **ret,
                 struct ckpt_err *err)
{
    struct ckpt_xport_tcp *m = calloc(1, sizeof *m);

    if (!m) {
        ckpt_tcp_free(tcp);
        return ckpt_nomem(err);
    }
    m->x = (struct ckpt_xport){.ops = &tcp_ops, .rank = rank, .size = size};
    m->tcp = tcp;
    (void)pthread_mutex_init(&m->lock, NULL);
    m->in_tail = &m->in;
    m->rendezvous.listener = -1;
    m->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    m->peer = calloc((size_t)size + 1, sizeof *m->peer);
    m->address = calloc((size_t)size + 1, sizeof *m->address);
    if (!m->peer || !m->address || m->event < 0) {
        tcp_free(&m->x);
        return ckpt_nomem(err);
    }
    *ret = m;
    return 0;
}
