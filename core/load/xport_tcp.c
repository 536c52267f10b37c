/* SPDX-License-Identifier: Apache-2.0 */
/* TCP between processes: two connections a pair, data (bytes in the order of posting, no frames:
 * both sides know the sizes) and control (length, then the message), so that a word of an error
 * never waits behind data. Processes of one machine that may read each other's memory do that; the
 * data connection then says where transfers lie, and which were taken. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "load/comm.h"
#include "load/near.h"
#include "load/tcp.h"

enum {
    MAX_CTL = 1 << 30,
    HANDSHAKE_MS = 10 * 1000,
    FLUSH_MS = 2000,
};

struct queue {
    struct ckpt_xfer *head, **tail;
};

/* A control message on its way out. */
struct outgoing {
    struct outgoing *next;
    size_t len, at;
    unsigned char data[]; /* with its length in front */
};

/* A word about the transfer of that number: it lies at this address, or (0) it was taken. */
struct note {
    uint64_t number, address;
};

/* A peer whose memory we read. Transfers are counted each way. */
struct near {
    bool is;
    struct ckpt_near of;
    uint64_t nsend, nrecv;
    CKPT_VEC(uint64_t) early; /* addresses that came before their receives were posted */
    size_t nearly;            /* of which so many are used */
    CKPT_VEC(struct note) out;
    size_t out_at; /* bytes of it that are sent */
    struct note in;
    size_t in_at;
    CKPT_VEC(struct note) taken; /* under the lock: by workers, to be said */
    bool lost;                   /* the same: its memory can't be read any more */
    bool failed;                 /* the pump knows it */
};

struct peer {
    int data, ctl;
    bool gone; /* its control connection ended */
    struct queue send, recv;
    struct near near;
    struct outgoing *out, **out_tail;
    uint32_t in_len; /* of the control message that comes in */
    size_t in_at;    /* bytes of length and message so far */
    unsigned char *in;
};

struct incoming {
    struct incoming *next;
    uint32_t peer;
    size_t len;
    void *data;
};

struct xport_tcp {
    struct ckpt_xport x;
    struct peer *peer;
    struct incoming *in, **in_tail;
    struct pollfd *poll; /* 2 a peer, and the event */
    int event;
    atomic_ullong word; /* peers may read our buffers; 0: not any more */
    bool allowed;
    pthread_mutex_t lock; /* near.taken, near.lost */
};

static struct xport_tcp *self(struct ckpt_xport *x) { return (struct xport_tcp *)x; }

static void queue_init(struct queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static void queue_pop(struct queue *q)
{
    if (!(q->head = q->head->next))
        q->tail = &q->head;
}

static struct ckpt_xfer *queue_take(struct queue *q, uint64_t number)
{
    struct ckpt_xfer **at = &q->head, *t;

    while (*at && (*at)->at != number)
        at = &(*at)->next;
    if (!(t = *at))
        return NULL;
    if (!(*at = t->next))
        q->tail = at;
    return t;
}

/* ---- near peers ---- */

static void lies_at(struct ckpt_xfer *t, uint64_t address)
{
    t->priv.word = address;
    t->there = true;
    atomic_store(&t->done, true);
}

static int say(struct near *n, uint64_t number, uint64_t address)
{
    const struct note note = {number, address};

    return ckpt_vec_push(&n->out, note);
}

/* True: it is posted, and need not be queued. */
static int near_post(struct near *n, struct ckpt_xfer *t, bool *ret_done, struct ckpt_err *err)
{
    *ret_done = false;
    if (t->send) {
        t->at = n->nsend++;
        return say(n, t->at, (uint64_t)(uintptr_t)t->buf) < 0 ? ckpt_nomem(err) : 0;
    }
    t->at = n->nrecv++;
    if (n->nearly < n->early.len) {
        lies_at(t, n->early.ptr[n->nearly++]);
        *ret_done = true;
    }
    if (n->nearly == n->early.len)
        n->nearly = n->early.len = 0;
    return 0;
}

static int hear(struct peer *p, const struct note *note)
{
    struct near *n = &p->near;
    struct ckpt_xfer *t;

    if (note->address == 0) {
        if (!(t = queue_take(&p->send, note->number)))
            return -1;
        atomic_store(&t->done, true);
        return 0;
    }
    if (!p->recv.head)
        return ckpt_vec_push(&n->early, note->address);
    if (p->recv.head->at != note->number)
        return -1;
    t = queue_take(&p->recv, note->number);
    lies_at(t, note->address);
    return 0;
}

static bool tcp_fetch(struct ckpt_xport *x, const struct ckpt_xfer *t, void *buf, size_t len,
                      size_t off)
{
    struct xport_tcp *m = self(x);
    struct near *n = &m->peer[t->peer].near;

    if (ckpt_near_read(&n->of, buf, len, t->priv.word + off))
        return true;
    (void)pthread_mutex_lock(&m->lock);
    n->lost = true;
    (void)pthread_mutex_unlock(&m->lock);
    x->ops->kick(x);
    return false;
}

static void tcp_fetched(struct ckpt_xport *x, const struct ckpt_xfer *t)
{
    struct xport_tcp *m = self(x);
    struct near *n = &m->peer[t->peer].near;
    const struct note note = {t->at, 0};

    (void)pthread_mutex_lock(&m->lock);
    n->lost |= ckpt_vec_push(&n->taken, note) < 0;
    (void)pthread_mutex_unlock(&m->lock);
    x->ops->kick(x);
}

/* What the workers did; false: they could not. */
static bool near_collect(struct xport_tcp *m, struct near *n)
{
    bool good;

    (void)pthread_mutex_lock(&m->lock);
    good = !n->lost && ckpt_vec_reserve(&n->out, n->taken.len + 1) == 0;
    for (size_t i = 0; i < n->taken.len && good; i++)
        n->out.ptr[n->out.len++] = n->taken.ptr[i];
    n->taken.len = 0;
    (void)pthread_mutex_unlock(&m->lock);
    return good;
}

static void near_clear(struct xport_tcp *m, struct near *n)
{
    (void)pthread_mutex_lock(&m->lock);
    ckpt_vec_release(&n->taken);
    (void)pthread_mutex_unlock(&m->lock);
    ckpt_vec_release(&n->early);
    ckpt_vec_release(&n->out);
    n->nearly = n->out_at = n->in_at = 0;
}

/* ---- moving bytes ---- */

static int tcp_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    struct peer *p = &self(x)->peer[t->peer];
    struct queue *q = t->send ? &p->send : &p->recv;

    if (p->data < 0)
        return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", t->peer);
    bool done = false;
    if (p->near.is && near_post(&p->near, t, &done, err) < 0)
        return -1;
    if (done)
        return 0;
    t->next = NULL;
    *q->tail = t;
    q->tail = &t->next;
    return 0;
}

/* -1: the connection is over. */
static int push_data(struct peer *p, bool *moved)
{
    while (p->send.head) {
        struct ckpt_xfer *t = p->send.head;
        ssize_t n = send(p->data, (char *)t->buf + t->at, t->len - t->at, MSG_NOSIGNAL);
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        *moved = true;
        t->at += (size_t)n;
        if (t->at == t->len) {
            queue_pop(&p->send);
            atomic_store(&t->done, true);
        }
    }
    return 0;
}

static int pull_data(struct peer *p, bool *moved)
{
    while (p->recv.head) {
        struct ckpt_xfer *t = p->recv.head;
        ssize_t n = recv(p->data, (char *)t->buf + t->at, t->len - t->at, 0);
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (n == 0)
            return -1;
        *moved = true;
        t->at += (size_t)n;
        if (t->at == t->len) {
            queue_pop(&p->recv);
            atomic_store(&t->done, true);
        }
    }
    return 0;
}

static int push_notes(struct near *n, int fd, bool *moved)
{
    const size_t all = n->out.len * sizeof *n->out.ptr;

    while (n->out_at < all) {
        ssize_t got = send(fd, (char *)n->out.ptr + n->out_at, all - n->out_at, MSG_NOSIGNAL);
        if (got < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        *moved = true;
        n->out_at += (size_t)got;
    }
    n->out.len = n->out_at = 0;
    return 0;
}

static int pull_notes(struct peer *p, bool *moved)
{
    struct near *n = &p->near;

    for (;;) {
        ssize_t got = recv(p->data, (char *)&n->in + n->in_at, sizeof n->in - n->in_at, 0);
        if (got < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (got == 0)
            return -1;
        *moved = true;
        n->in_at += (size_t)got;
        if (n->in_at < sizeof n->in)
            continue;
        n->in_at = 0;
        if (hear(p, &n->in) < 0)
            return -1;
    }
}

static int move_data(struct xport_tcp *m, struct peer *p, bool *moved)
{
    if (!p->near.is)
        return push_data(p, moved) < 0 || pull_data(p, moved) < 0 ? -1 : 0;
    p->near.failed = !near_collect(m, &p->near);
    return p->near.failed || push_notes(&p->near, p->data, moved) < 0 || pull_notes(p, moved) < 0
               ? -1
               : 0;
}

static int push_ctl(struct peer *p, bool *moved)
{
    while (p->out) {
        struct outgoing *o = p->out;
        ssize_t n = send(p->ctl, o->data + o->at, o->len - o->at, MSG_NOSIGNAL);
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

static int take_message(struct xport_tcp *m, uint32_t number, struct peer *p)
{
    struct incoming *in = malloc(sizeof *in);

    if (!in)
        return -1;
    *in = (struct incoming){.peer = number, .len = p->in_len, .data = p->in};
    p->in = NULL;
    p->in_at = 0;
    *m->in_tail = in;
    m->in_tail = &in->next;
    return 0;
}

static int pull_ctl(struct xport_tcp *m, uint32_t number, bool *moved)
{
    struct peer *p = &m->peer[number];

    for (;;) {
        const size_t head = sizeof p->in_len;
        unsigned char *to =
            p->in_at < head ? (unsigned char *)&p->in_len + p->in_at : p->in + (p->in_at - head);
        size_t want = p->in_at < head ? head - p->in_at : head + p->in_len - p->in_at;
        ssize_t n = want ? recv(p->ctl, to, want, 0) : 0;
        if (n < 0)
            return ckpt_socket_would_block() ? 0 : -1;
        if (n == 0 && want)
            return -1;
        *moved = true;
        p->in_at += (size_t)n;
        if (p->in_at == head && !p->in &&
            (p->in_len > MAX_CTL || !(p->in = malloc((size_t)p->in_len + 1))))
            return -1;
        if (p->in_at >= head && p->in_at == head + p->in_len && take_message(m, number, p) < 0)
            return -1;
    }
}

static int tcp_progress(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err)
{
    struct xport_tcp *m = self(x);
    int rc = 0;

    *ret_moved = false;
    for (uint32_t r = 0; r < x->size; r++) {
        struct peer *p = &m->peer[r];
        if (p->ctl >= 0 && (push_ctl(p, ret_moved) < 0 || pull_ctl(m, r, ret_moved) < 0)) {
            /* what came before the end was taken; what goes out is lost */
            bool ignored;
            (void)pull_ctl(m, r, &ignored);
            ckpt_socket_close(&p->ctl);
            p->gone = true;
        }
        if (p->data >= 0 && move_data(m, p, ret_moved) < 0)
            ckpt_socket_close(&p->data);
        if (p->data < 0 && (p->send.head || p->recv.head || p->near.failed) && rc == 0)
            rc = ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
    }
    return rc;
}

static void tcp_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    struct xport_tcp *m = self(x);
    nfds_t n = 0;
    uint64_t ignored;

    for (uint32_t r = 0; r < x->size; r++) {
        const struct peer *p = &m->peer[r];
        if (p->ctl >= 0)
            m->poll[n++] = (struct pollfd){p->ctl, (short)(POLLIN | (p->out ? POLLOUT : 0)), 0};
        if (p->data >= 0 && p->near.is)
            m->poll[n++] =
                (struct pollfd){p->data, (short)(POLLIN | (p->near.out.len ? POLLOUT : 0)), 0};
        else if (p->data >= 0 && (p->send.head || p->recv.head))
            m->poll[n++] = (struct pollfd){
                p->data, (short)((p->recv.head ? POLLIN : 0) | (p->send.head ? POLLOUT : 0)), 0};
    }
    m->poll[n++] = (struct pollfd){m->event, POLLIN, 0};
    (void)poll(m->poll, n, (int)timeout_ms);
    if (m->poll[n - 1].revents)
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
    struct peer *p = &self(x)->peer[to];
    const uint32_t head = (uint32_t)len;
    struct outgoing *o;
    bool moved;

    if (p->gone)
        return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", to);
    if (len > MAX_CTL)
        return ckpt_fail(err, CKPT_LIMIT, "a message of %zu bytes", len);
    if (!(o = malloc(sizeof *o + sizeof head + len)))
        return ckpt_nomem(err);
    *o = (struct outgoing){.len = sizeof head + len};
    memcpy(o->data, &head, sizeof head);
    memcpy(o->data + sizeof head, msg, len);
    *p->out_tail = o;
    p->out_tail = &o->next;
    (void)push_ctl(p, &moved); /* an end is noticed by progress */
    return 0;
}

static int tcp_ctl_recv(struct ckpt_xport *x, uint32_t *ret_peer, void **ret_msg, size_t *ret_len,
                        struct ckpt_err *err)
{
    struct xport_tcp *m = self(x);
    struct incoming *in = m->in;

    (void)err;
    if (!in)
        return 0;
    if (!(m->in = in->next))
        m->in_tail = &m->in;
    *ret_peer = in->peer;
    *ret_msg = in->data;
    *ret_len = in->len;
    free(in);
    return 1;
}

static bool tcp_gone(struct ckpt_xport *x, uint32_t peer) { return self(x)->peer[peer].gone; }

/* The streams are cut in the middle of a transfer: they are of no use any more. */
static bool tcp_cancel(struct ckpt_xport *x)
{
    struct xport_tcp *m = self(x);

    atomic_store(&m->word, 0); /* before any buffer goes */
    for (uint32_t r = 0; r < x->size; r++) {
        near_clear(m, &m->peer[r].near);
        ckpt_socket_close(&m->peer[r].data);
        queue_init(&m->peer[r].send);
        queue_init(&m->peer[r].recv);
    }
    return true;
}

static bool any_outgoing(const struct xport_tcp *m)
{
    for (uint32_t r = 0; r < m->x.size; r++)
        if (m->peer[r].out && m->peer[r].ctl >= 0)
            return true;
    return false;
}

static void tcp_free(struct ckpt_xport *x)
{
    struct xport_tcp *m = self(x);
    const uint64_t until = ckpt_now_ms() + FLUSH_MS;
    bool moved;

    atomic_store(&m->word, 0);
    if (m->allowed)
        ckpt_near_disallow();
    while (m->peer && m->event >= 0 && any_outgoing(m) && ckpt_now_ms() < until) {
        (void)tcp_progress(x, &moved, NULL);
        if (!moved)
            tcp_wait(x, 10);
    }
    for (uint32_t r = 0; m->peer && r < x->size; r++) {
        struct peer *p = &m->peer[r];
        near_clear(m, &p->near);
        ckpt_socket_close(&p->data);
        ckpt_socket_close(&p->ctl);
        while (p->out) {
            struct outgoing *o = p->out;
            p->out = o->next;
            free(o);
        }
        free(p->in);
    }
    while (m->in) {
        struct incoming *in = m->in;
        m->in = in->next;
        free(in->data);
        free(in);
    }
    ckpt_socket_close(&m->event);
    (void)pthread_mutex_destroy(&m->lock);
    free(m->peer);
    free(m->poll);
    free(m);
}

static const struct ckpt_xport_ops tcp_ops = {
    .name = "tcp",
    .post = tcp_post,
    .progress = tcp_progress,
    .fetch = tcp_fetch,
    .fetched = tcp_fetched,
    .wait = tcp_wait,
    .kick = tcp_kick,
    .ctl_send = tcp_ctl_send,
    .ctl_recv = tcp_ctl_recv,
    .gone = tcp_gone,
    .cancel = tcp_cancel,
    .free = tcp_free,
    .one_shot = true,
};

/* ---- connecting ---- */

static uint64_t random_token(void)
{
    uint64_t token = 0;
    FILE *f = fopen("/dev/urandom", "re");

    if (f) {
        (void)!fread(&token, sizeof token, 1, f);
        (void)fclose(f);
    }
    return token ? token : ckpt_now_ms();
}

int ckpt_tcp_listen_at(const char *host, uint16_t port, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    struct ckpt_tcp *tcp = calloc(1, sizeof *tcp);
    char name[200];
    uint16_t got = 0;

    if (!tcp)
        return ckpt_nomem(err);
    if (!host) {
        if (gethostname(name, sizeof name) < 0)
            (void)snprintf(name, sizeof name, "localhost");
        name[sizeof name - 1] = '\0';
        host = name;
    }
    tcp->token = random_token();
    tcp->fd = ckpt_socket_listen(port, &got);
    if (tcp->fd < 0) {
        int e = errno;
        free(tcp);
        return ckpt_fail_errno(err, e, "listening on TCP port %u", port);
    }
    int n = snprintf(tcp->address, sizeof tcp->address, "%s %u %016" PRIx64, host, got, tcp->token);
    if (n < 0 || (size_t)n >= sizeof tcp->address) {
        ckpt_tcp_free(tcp);
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    }
    *ret = tcp;
    return 0;
}

int ckpt_tcp_listen(const char *host, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    return ckpt_tcp_listen_at(host, 0, ret, err);
}

const char *ckpt_tcp_address(const struct ckpt_tcp *tcp) { return tcp->address; }

void ckpt_tcp_free(struct ckpt_tcp *tcp)
{
    if (!tcp)
        return;
    ckpt_socket_close(&tcp->fd);
    free(tcp);
}

bool ckpt_tcp_greet(int fd, const struct ckpt_greeting *g, uint32_t to, uint64_t until)
{
    struct ckpt_greeting answer = *g, got;

    answer.from = to;
    return ckpt_socket_send_all(fd, g, sizeof *g, until) == 0 &&
           ckpt_socket_recv_all(fd, &got, sizeof got, until) == 0 &&
           memcmp(&got, &answer, sizeof got) == 0;
}

bool ckpt_tcp_answer(int fd, struct ckpt_greeting g, uint32_t own, uint64_t until)
{
    g.from = own;
    return ckpt_socket_send_all(fd, &g, sizeof g, until) == 0;
}

/* Connect to a rank below us; it accepts. */
static int call_rank(const char *address, uint32_t rank, uint32_t to, uint32_t kind, uint64_t until,
                     int *ret_fd, struct ckpt_err *err)
{
    char host[200], port[8];
    struct ckpt_greeting g = {
        .magic = CKPT_GREETING, .version = CKPT_TCP_VERSION, .from = rank, .kind = kind};

    if (sscanf(address, "%199s %7s %" SCNx64, host, port, &g.token) != 3)
        return ckpt_fail(err, CKPT_USAGE, "'%.200s' is no address of ckpt_tcp_listen", address);
    for (;;) {
        int fd = ckpt_socket_dial(host, port, until);
        if (fd >= 0 && ckpt_tcp_greet(fd, &g, to, until)) {
            *ret_fd = fd;
            return 0;
        }
        ckpt_socket_close(&fd);
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " can't be reached at %s port %s",
                             to, host, port);
        (void)usleep(20 * 1000);
    }
}

/* Accept one of the ranks above us; strangers are sent away. */
static int accept_rank(struct xport_tcp *m, const struct ckpt_tcp *tcp, uint64_t until,
                       struct ckpt_err *err)
{
    struct pollfd p = {tcp->fd, POLLIN, 0};
    struct ckpt_greeting g;

    for (;;) {
        uint64_t now = ckpt_now_ms();
        if (now >= until) {
            uint32_t missing = m->x.rank + 1;
            while (m->peer[missing].data >= 0 && m->peer[missing].ctl >= 0)
                missing++;
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " did not connect in time",
                             missing);
        }
        (void)poll(&p, 1, (int)ckpt_min_u64(until - now, 1000));
        int fd = accept4(tcp->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            continue;
        ckpt_socket_tune(fd);
        if (ckpt_socket_recv_all(fd, &g, sizeof g,
                                 ckpt_min_u64(until, ckpt_now_ms() + HANDSHAKE_MS)) == 0 &&
            g.magic == CKPT_GREETING && g.version == CKPT_TCP_VERSION && g.token == tcp->token &&
            g.from > m->x.rank && g.from < m->x.size && g.kind < 2) {
            int *slot = g.kind ? &m->peer[g.from].ctl : &m->peer[g.from].data;
            if (*slot < 0 && ckpt_tcp_answer(fd, g, m->x.rank, until)) {
                *slot = fd;
                return 0;
            }
        }
        ckpt_socket_close(&fd);
    }
}

static int xport_new(uint32_t rank, uint32_t size, struct xport_tcp **ret, struct ckpt_err *err)
{
    struct xport_tcp *m = calloc(1, sizeof *m);

    if (!m)
        return ckpt_nomem(err);
    m->x = (struct ckpt_xport){.ops = &tcp_ops, .rank = rank, .size = size};
    (void)pthread_mutex_init(&m->lock, NULL);
    atomic_init(&m->word, random_token());
    m->in_tail = &m->in;
    m->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    m->peer = calloc(size, sizeof *m->peer);
    m->poll = calloc((size_t)size * 2 + 1, sizeof *m->poll);
    for (uint32_t r = 0; m->peer && r < size; r++) {
        struct peer *p = &m->peer[r];
        p->data = p->ctl = -1;
        queue_init(&p->send);
        queue_init(&p->recv);
        p->out_tail = &p->out;
    }
    if (!m->peer || !m->poll || m->event < 0) {
        tcp_free(&m->x);
        return ckpt_nomem(err);
    }
    *ret = m;
    return 0;
}

/* Which peers are so near that we read their memory, and they ours? Both must. */
static int meet_near(struct xport_tcp *m, uint64_t until, struct ckpt_err *err)
{
    struct ckpt_near own;
    int rc = 0;

    m->allowed = m->x.size > 1 && ckpt_near_allow();
    ckpt_near_self(&own, &m->word);
    for (uint32_t step = 0; step < 4; step++)
        for (uint32_t r = 0; r < m->x.size && rc == 0; r++) {
            struct near *n = &m->peer[r].near;
            const int fd = m->peer[r].data;
            unsigned char yes = n->is, theirs = 0;
            if (r == m->x.rank)
                continue;
            if (step == 0)
                rc = ckpt_socket_send_all(fd, &own, sizeof own, until);
            else if (step == 1 && (rc = ckpt_socket_recv_all(fd, &n->of, sizeof n->of, until)) == 0)
                n->is = ckpt_near_reach(&n->of);
            else if (step == 2)
                rc = ckpt_socket_send_all(fd, &yes, sizeof yes, until);
            else if (step == 3 &&
                     (rc = ckpt_socket_recv_all(fd, &theirs, sizeof theirs, until)) == 0)
                n->is = yes && theirs;
            if (rc < 0)
                (void)ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
        }
    m->x.near = true;
    for (uint32_t r = 0; r < m->x.size; r++)
        m->x.near &= r == m->x.rank || m->peer[r].near.is || m->peer[r].near.of.node != own.node;
    return rc;
}

int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *const *address,
                     uint32_t timeout_ms, struct ckpt_comm **ret, struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + timeout_ms;
    struct xport_tcp *m = NULL;
    int rc = 0;

    if (rank >= size)
        rc = ckpt_fail(err, CKPT_USAGE, "rank %" PRIu32 " of %" PRIu32, rank, size);
    if (rc == 0)
        rc = ckpt_socket_reserve(ckpt_tcp_files(size), err);
    if (rc == 0)
        rc = xport_new(rank, size, &m, err);
    for (uint32_t r = 0; r < rank && rc == 0; r++) {
        rc = call_rank(address[r], rank, r, 0, until, &m->peer[r].data, err);
        if (rc == 0)
            rc = call_rank(address[r], rank, r, 1, until, &m->peer[r].ctl, err);
    }
    for (uint32_t k = 0; rc == 0 && k < 2 * (size - rank - 1); k++)
        rc = accept_rank(m, tcp, until, err);
    if (rc == 0)
        rc = meet_near(m, until, err);
    ckpt_tcp_free(tcp);
    if (rc < 0) {
        if (m)
            tcp_free(&m->x);
        return -1;
    }
    return ckpt_comm_wrap(&m->x, ret, err);
}
