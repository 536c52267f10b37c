/* SPDX-License-Identifier: Apache-2.0 */
/* Requests and replies over TCP. On the wire a request is a struct request_head and its bytes, and
 * a reply a struct reply_head and its bytes, which are the text of the error if there is one. */
#include "comm/tcp/service.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/fdio.h"
#include "base/thread.h"
#include "base/vec.h"
#include "comm/tcp/tcp.h"

enum {
    /* Connections to one other rank. One carries what a network's link does; with several, a
     * request does not wait while another one's file is read. Each is a thread over there. */
    CONNECTIONS = 4,
    MOST_SERVED = 16384,    /* connections of others; more are refused */
    HANDSHAKE_MS = 10000,   /* for a handshake */
    CONNECT_MS = 30000,     /* for a rank to be reached */
    RETRY_MS = 50,          /* between two attempts to reach it */
    STACK = 256 * 1024,     /* bytes of the stack of a thread that answers */
    ACCEPT_TURN_MS = 60000, /* a poll's limit, which nothing depends on */
};

struct request_head {
    uint32_t len, reply_len;
};

struct reply_head {
    uint32_t code; /* enum ckpt_code; 0: none */
    uint32_t len;
};

/* The connections to one other rank. */
struct peer {
    uint32_t rank, nused; /* those in use */
    CKPT_VEC(int) idle;   /* those that are not */
};

struct ckpt_service {
    atomic_uint refs; /* the caller, and each thread */
    uint32_t rank;
    struct ckpt_tcp *tcp;               /* the listener */
    const struct ckpt_service_ops *ops; /* NULL while it is opened: ctx is the caller's */
    void *ctx;
    pthread_mutex_t lock; /* protects all that follows */
    pthread_cond_t freed; /* a connection to a peer is idle, or has ended */
    bool closed;
    CKPT_VEC(struct peer) peers;
    CKPT_VEC(int) served;  /* connections of others */
    pthread_cond_t turned; /* a buffer is idle, or it is the next request's turn */
    uint64_t asked, turn;  /* requests that have come; of them, those that have got a buffer */
    unsigned char *idle[CKPT_SERVICE_ANSWERS]; /* buffers for a request and its reply */
    uint32_t nidle, nbuffer;                   /* nbuffer: those that there are */
};

/* The argument of a thread that answers. */
struct served {
    struct ckpt_service *s;
    int fd;
};

static void service_unref(struct ckpt_service *s)
{
    if (atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_tcp_free(s->tcp);
    for (size_t i = 0; i < s->peers.len; i++)
        ckpt_vec_release(&s->peers.ptr[i].idle);
    ckpt_vec_release(&s->peers);
    ckpt_vec_release(&s->served);
    while (s->nidle)
        free(s->idle[--s->nidle]);
    (void)pthread_mutex_destroy(&s->lock);
    (void)pthread_cond_destroy(&s->freed);
    (void)pthread_cond_destroy(&s->turned);
    if (s->ops)
        s->ops->free(s->ctx);
    free(s);
}

/* ---- moving bytes ---- */

/* Wait until the descriptor is ready. 0; TIMEOUT. */
static int await(int fd, short events, uint32_t timeout_ms, struct ckpt_err *err)
{
    struct pollfd p = {fd, events, 0};
    const uint64_t until = ckpt_now_ms() + timeout_ms;

    for (;;) {
        const uint64_t now = ckpt_now_ms();
        const int rc = now < until ? poll(&p, 1, (int)ckpt_min_u64(until - now, INT32_MAX)) : 0;
        if (rc > 0)
            return 0;
        if (rc == 0)
            return ckpt_fail(err, CKPT_TIMEOUT, "no byte for %.1f s", timeout_ms / 1000.0);
        if (errno != EINTR)
            return ckpt_fail_errno(err, errno, "poll");
    }
}

static int broken(int errnum, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_PEER, "the connection broke%s%s", errnum ? ": " : "",
                     errnum ? strerror(errnum) : "");
}

/* Send or receive all of iov[0..n), which is modified. timeout_ms: without a byte. */
static int move_all(int fd, bool sends, struct iovec *iov, int n, uint32_t timeout_ms,
                    struct ckpt_err *err)
{
    for (iov = ckpt_fdio_advance(iov, &n, 0); n > 0;) {
        struct msghdr m = {.msg_iov = iov,
                           .msg_iovlen = (size_t)ckpt_min_u64((uint64_t)n, IOV_MAX)};
        const ssize_t got = sends ? sendmsg(fd, &m, MSG_NOSIGNAL) : recvmsg(fd, &m, 0);
        if (got < 0 && ckpt_socket_would_block()) {
            if (await(fd, sends ? POLLOUT : POLLIN, timeout_ms, err) < 0)
                return -1;
            continue;
        }
        if (got <= 0)
            return broken(got < 0 ? errno : 0, err);
        iov = ckpt_fdio_advance(iov, &n, (size_t)got);
    }
    return 0;
}

static int send_two(int fd, const void *head, size_t head_len, const void *data, size_t len,
                    uint32_t timeout_ms, struct ckpt_err *err)
{
    struct iovec iov[2] = {{(void *)head, head_len}, {(void *)data, len}};

    return move_all(fd, true, iov, 2, timeout_ms, err);
}

static int receive(int fd, void *data, size_t len, uint32_t timeout_ms, struct ckpt_err *err)
{
    struct iovec iov = {data, len};

    return move_all(fd, false, &iov, 1, timeout_ms, err);
}

/* ---- answering ---- */

/* Let a rank of the job in; false: it is none. */
static bool let_in(const struct ckpt_service *s, int fd)
{
    struct ckpt_handshake h;
    bool moved;

    ckpt_handshake_accept(&h, dup(fd), ckpt_now_ms() + HANDSHAKE_MS);
    for (;;) {
        enum ckpt_handshake_result r = ckpt_handshake_step(&h, &moved);
        if (r == CKPT_HANDSHAKE_ASKED) {
            const bool ours = memcmp(h.its.token, s->tcp->token, sizeof s->tcp->token) == 0 &&
                              h.its.kind == CKPT_TCP_SERVICE;
            r = ours ? ckpt_handshake_answer(&h, s->rank, 0) : CKPT_HANDSHAKE_FAILED;
        }
        if (r != CKPT_HANDSHAKE_WAITING) {
            ckpt_closep(&h.fd);
            return r == CKPT_HANDSHAKE_DONE;
        }
        (void)await(fd, ckpt_handshake_events(&h), HANDSHAKE_MS, NULL);
    }
}

/* Wait for this request's turn, and for a buffer. NULL: the service has ended, or no memory. */
static unsigned char *take_buffer(struct ckpt_service *s)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);
    const uint64_t own = s->asked++;

    while (!s->closed && (own != s->turn || (s->nidle == 0 && s->nbuffer == CKPT_SERVICE_ANSWERS)))
        (void)pthread_cond_wait(&s->turned, &s->lock);
    if (s->closed)
        return NULL;
    s->turn++;
    (void)pthread_cond_broadcast(&s->turned);
    if (s->nidle)
        return s->idle[--s->nidle];
    unsigned char *buf = malloc(CKPT_SERVICE_REQUEST + CKPT_SERVICE_REPLY);
    s->nbuffer += buf != NULL;
    return buf;
}

static void put_buffer(struct ckpt_service *s, unsigned char *buf)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);

    s->idle[s->nidle++] = buf;
    (void)pthread_cond_broadcast(&s->turned);
}

/* Receive the rest of a request to buf, and answer it; false: the connection has ended. */
static bool answer(const struct ckpt_service *s, int fd, const struct request_head *head,
                   unsigned char *buf)
{
    unsigned char *reply = buf + CKPT_SERVICE_REQUEST;
    struct reply_head back = {0};
    struct ckpt_err err = {0};

    if (receive(fd, buf, head->len, HANDSHAKE_MS, NULL) < 0)
        return false;
    if (s->ops->answer(s->ctx, buf, head->len, reply, head->reply_len, &err) == 0)
        back.len = head->reply_len;
    if (err.code) {
        back = (struct reply_head){(uint32_t)err.code, (uint32_t)strlen(err.text)};
        return send_two(fd, &back, sizeof back, err.text, back.len, CONNECT_MS, NULL) == 0;
    }
    return send_two(fd, &back, sizeof back, reply, back.len, CONNECT_MS, NULL) == 0;
}

/* Answer the next request of a connection; false: it has ended. While it is idle it has no buffer.
 */
static bool answer_next(struct ckpt_service *s, int fd)
{
    struct request_head head;
    unsigned char *buf;

    if (receive(fd, &head, sizeof head, UINT32_MAX, NULL) < 0 || head.len > CKPT_SERVICE_REQUEST ||
        head.reply_len > CKPT_SERVICE_REPLY || !(buf = take_buffer(s)))
        return false;
    const bool good = answer(s, fd, &head, buf);
    put_buffer(s, buf);
    return good;
}

static void forget_served(struct ckpt_service *s, int fd)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);

    for (size_t i = 0; i < s->served.len; i++)
        if (s->served.ptr[i] == fd)
            s->served.ptr[i] = s->served.ptr[--s->served.len];
    (void)close(fd);
}

static void *serve(void *arg)
{
    struct served own = *(struct served *)arg;

    free(arg);
    if (let_in(own.s, own.fd))
        while (answer_next(own.s, own.fd))
            ;
    forget_served(own.s, own.fd);
    service_unref(own.s);
    return NULL;
}

/* Start a thread that ends by itself; it has a reference. */
static int start(struct ckpt_service *s, void *(*fn)(void *), void *arg)
{
    atomic_fetch_add(&s->refs, 1);
    const int rc = ckpt_thread_detach(STACK, fn, arg);
    if (rc)
        atomic_fetch_sub(&s->refs, 1);
    return rc ? -1 : 0;
}

/* Serve a connection in a thread of its own; else close it. */
static void begin_serving(struct ckpt_service *s, int fd)
{
    struct served *own = malloc(sizeof *own);
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);

    ckpt_socket_tune(fd);
    if (own && !s->closed && s->served.len < MOST_SERVED && ckpt_vec_push(&s->served, fd) == 0) {
        *own = (struct served){s, fd};
        if (start(s, serve, own) == 0)
            return;
        s->served.len--;
    }
    free(own);
    (void)close(fd);
}

static bool is_closed(struct ckpt_service *s)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);

    return s->closed;
}

static void *accept_all(void *arg)
{
    struct ckpt_service *s = arg;

    while (!is_closed(s)) {
        (void)await(s->tcp->fd, POLLIN, ACCEPT_TURN_MS, NULL);
        const int fd = is_closed(s) ? -1 : accept4(s->tcp->fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            begin_serving(s, fd);
        else if (errno == EMFILE || errno == ENFILE)
            (void)usleep(RETRY_MS * 1000);
    }
    service_unref(s);
    return NULL;
}

/* ---- opening and closing ---- */

/* The host under which other ranks reach this one: over TCP, as they do already; NULL: by its name.
 */
static const char *host_of(const struct ckpt_comm *comm, struct ckpt_tcp_contact *contact)
{
    if (strcmp(ckpt_comm_transport(comm), "tcp") != 0)
        return NULL;
    const struct ckpt_xport_tcp *m = (const struct ckpt_xport_tcp *)comm->x;
    return m->tcp && ckpt_tcp_parse(m->tcp->address, contact, NULL) == 0 ? contact->host : NULL;
}

int ckpt_service_open(const struct ckpt_comm *comm, const struct ckpt_service_ops *ops, void *ctx,
                      struct ckpt_service **ret, struct ckpt_err *err)
{
    struct ckpt_service *s = calloc(1, sizeof *s);
    struct ckpt_tcp_contact contact;

    if (!s)
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    (void)pthread_mutex_init(&s->lock, NULL);
    ckpt_cond_init(&s->freed);
    ckpt_cond_init(&s->turned);
    s->rank = ckpt_comm_rank(comm);
    if (ckpt_tcp_listen(host_of(comm, &contact), &s->tcp, err) < 0) {
        service_unref(s);
        return -1;
    }
    s->ops = ops;
    s->ctx = ctx;
    if (start(s, accept_all, s) < 0) {
        s->ops = NULL; /* ctx stays the caller's */
        service_unref(s);
        return ckpt_nomem(err);
    }
    *ret = s;
    return 0;
}

void ckpt_service_close(struct ckpt_service *s)
{
    if (!s)
        return;
    (void)pthread_mutex_lock(&s->lock);
    s->closed = true;
    (void)pthread_cond_broadcast(&s->turned);
    (void)shutdown(s->tcp->fd, SHUT_RDWR); /* wakes the thread that accepts */
    for (size_t i = 0; i < s->served.len; i++)
        (void)shutdown(s->served.ptr[i], SHUT_RDWR);
    for (size_t i = 0; i < s->peers.len; i++) {
        for (size_t k = 0; k < s->peers.ptr[i].idle.len; k++)
            (void)close(s->peers.ptr[i].idle.ptr[k]);
        s->peers.ptr[i].idle.len = 0;
    }
    (void)pthread_mutex_unlock(&s->lock);
    service_unref(s);
}

const char *ckpt_service_address(const struct ckpt_service *s) { return ckpt_tcp_address(s->tcp); }

/* ---- asking ---- */

/* One handshake with the service; -1: it failed. *ret_refused: by the secret. */
static int dial_once(const struct ckpt_service *s, uint32_t peer, const struct ckpt_tcp_contact *c,
                     uint32_t *attempt, bool *ret_refused)
{
    const struct ckpt_greeting g = {.magic = CKPT_GREETING,
                                    .version = CKPT_TCP_VERSION,
                                    .token = {c->token[0], c->token[1]},
                                    .from = s->rank,
                                    .kind = CKPT_TCP_SERVICE};
    const int fd = ckpt_socket_begin(c->host, c->port, c->nport, attempt);
    struct ckpt_handshake h;
    bool moved;

    if (fd < 0)
        return -1;
    ckpt_handshake_dial(&h, fd, &g, peer, ckpt_now_ms() + HANDSHAKE_MS);
    for (;;) {
        enum ckpt_handshake_result r = ckpt_handshake_step(&h, &moved);
        if (r == CKPT_HANDSHAKE_ASKED)
            r = ckpt_handshake_confirm(&h, 0, NULL);
        *ret_refused = h.refused;
        if (r != CKPT_HANDSHAKE_WAITING)
            return r == CKPT_HANDSHAKE_DONE ? h.fd : -1;
        (void)await(h.fd, ckpt_handshake_events(&h), HANDSHAKE_MS, NULL);
    }
}

static int dial(const struct ckpt_service *s, uint32_t peer, const char *address,
                struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + CONNECT_MS;
    struct ckpt_tcp_contact c;
    uint32_t attempt = 0;
    bool refused = false;

    if (ckpt_tcp_parse(address, &c, err) < 0)
        return -1;
    while (ckpt_now_ms() < until && !refused) {
        const int fd = dial_once(s, peer, &c, &attempt, &refused);
        if (fd >= 0)
            return fd;
        if (attempt == 0)
            (void)usleep(RETRY_MS * 1000);
    }
    return refused
               ? ckpt_fail(err, CKPT_PEER, "it and this rank do not have the same CKPTFS_SECRET")
               : ckpt_fail(err, CKPT_PEER, "it can't be reached at %s port %" PRIu32, c.host,
                           c.port);
}

/* The connections to a rank (under the lock); NULL: no memory. */
static struct peer *peer_of(struct ckpt_service *s, uint32_t rank)
{
    struct peer *p;

    for (size_t i = 0; i < s->peers.len; i++)
        if (s->peers.ptr[i].rank == rank)
            return &s->peers.ptr[i];
    if (ckpt_vec_add(&s->peers, &p) < 0)
        return NULL;
    p->rank = rank;
    return p;
}

/* Get a connection for one request: *ret_fd is -1 if a new one is to be made. */
static int take_connection(struct ckpt_service *s, uint32_t rank, int *ret_fd, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);
    struct peer *p;

    while ((p = peer_of(s, rank)) && p->nused >= CONNECTIONS && !s->closed)
        (void)pthread_cond_wait(&s->freed, &s->lock);
    if (!p)
        return ckpt_nomem(err);
    if (s->closed)
        return ckpt_fail(err, CKPT_CANCELLED, "the checkpoint is being closed");
    *ret_fd = p->idle.len ? p->idle.ptr[--p->idle.len] : -1;
    p->nused++;
    return 0;
}

/* Give it back, if it is good for more requests; fd -1: it is not. */
static void put_connection(struct ckpt_service *s, uint32_t rank, int fd)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&s->lock);
    struct peer *p = peer_of(s, rank);

    p->nused--;
    if (fd >= 0 && (s->closed || ckpt_vec_push(&p->idle, fd) < 0))
        (void)close(fd);
    (void)pthread_cond_broadcast(&s->freed);
}

/* Receive the error of an answer; *ret_whole: the connection is good for more. */
static int take_error(int fd, const struct reply_head *back, uint32_t timeout_ms, bool *ret_whole,
                      struct ckpt_err *err)
{
    char text[sizeof err->text];

    if (back->len >= sizeof text || back->code > CKPT_CANCELLED)
        return ckpt_fail(err, CKPT_PEER, "a damaged reply");
    if (receive(fd, text, back->len, timeout_ms, err) < 0)
        return -1;
    text[back->len] = '\0';
    *ret_whole = true;
    return ckpt_fail(err, (enum ckpt_code)back->code, "%s", text);
}

/* One request over a connection; *ret_whole: that is good for more. */
static int ask(int fd, const void *request, size_t len, const struct iovec *iov, int n,
               uint32_t timeout_ms, bool *ret_whole, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct iovec *copy = malloc(((size_t)n + 1) * sizeof *copy);
    struct request_head head = {(uint32_t)len, 0};
    struct reply_head back;

    *ret_whole = false;
    if (!copy)
        return ckpt_nomem(err);
    memcpy(copy, iov, (size_t)n * sizeof *copy);
    for (int i = 0; i < n; i++)
        head.reply_len += (uint32_t)iov[i].iov_len;
    if (send_two(fd, &head, sizeof head, request, len, timeout_ms, err) < 0 ||
        receive(fd, &back, sizeof back, timeout_ms, err) < 0)
        return -1;
    if (back.code)
        return take_error(fd, &back, timeout_ms, ret_whole, err);
    if (back.len != head.reply_len)
        return ckpt_fail(err, CKPT_PEER, "a damaged reply");
    if (move_all(fd, false, copy, n, timeout_ms, err) < 0)
        return -1;
    *ret_whole = true;
    return 0;
}

int ckpt_service_ask(struct ckpt_service *s, uint32_t peer, const char *address,
                     const void *request, size_t len, const struct iovec *iov, int n,
                     uint32_t timeout_ms, struct ckpt_err *err)
{
    struct ckpt_err own = {0};
    bool whole = false;
    int fd = -1, rc = -1;

    if (take_connection(s, peer, &fd, err) < 0)
        return -1;
    if (fd >= 0) /* something between the machines may have closed it while it was idle */
        rc = ask(fd, request, len, iov, n, timeout_ms, &whole, &own);
    if (rc < 0 && !whole && (fd < 0 || own.code == CKPT_PEER)) {
        own = (struct ckpt_err){0};
        ckpt_closep(&fd);
        fd = dial(s, peer, address, &own);
        rc = fd < 0 ? -1 : ask(fd, request, len, iov, n, timeout_ms, &whole, &own);
    }
    if (!whole)
        ckpt_closep(&fd);
    put_connection(s, peer, whole ? fd : -1);
    return rc < 0 ? ckpt_err_move(err, &own) : 0;
}
