/* SPDX-License-Identifier: Apache-2.0 */
/* Who is connected: listening, greeting, the neighbours in the tree at the beginning, and others
 * when data is to be exchanged. Of two ranks the one with the greater number calls. Many handshakes
 * go on at once, each with a deadline of its own: a stranger holds up nobody. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "load/comm.h"
#include "load/tcp.h"

enum { HANDSHAKE_MS = 5 * 1000, RETRY_MS = 20, CALLERS = 1024 };

/* ---- listening ---- */

static int random_words(uint64_t *word, size_t n, struct ckpt_err *err)
{
    if (getrandom(word, n * sizeof *word, 0) != (ssize_t)(n * sizeof *word))
        return ckpt_fail_errno(err, errno, "random numbers");
    return 0;
}

static int write_address(struct ckpt_tcp *tcp, const char *host, uint16_t port,
                         struct ckpt_err *err)
{
    struct ckpt_near own;

    ckpt_near_self(&own, &tcp->word);
    int n =
        snprintf(tcp->address, sizeof tcp->address,
                 "%s %u %016" PRIx64 "%016" PRIx64 " %" PRIx64 " %" PRIu64 " %" PRIx64 " %" PRIx64,
                 host, port, tcp->token[0], tcp->token[1], own.node, own.pid, own.at, own.word);
    if (n < 0 || (size_t)n >= sizeof tcp->address)
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    return 0;
}

int ckpt_tcp_listen_at(const char *host, uint16_t port, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    struct ckpt_tcp *tcp = calloc(1, sizeof *tcp);
    uint64_t word = 0;
    char name[200];
    uint16_t got = 0;

    if (!tcp)
        return ckpt_nomem(err);
    tcp->fd = -1;
    if (!host) {
        if (gethostname(name, sizeof name) < 0)
            (void)snprintf(name, sizeof name, "localhost");
        name[sizeof name - 1] = '\0';
        host = name;
    }
    int rc = random_words(tcp->token, 2, err);
    if (rc == 0)
        rc = random_words(&word, 1, err);
    atomic_init(&tcp->word, word ? word : 1);
    if (rc == 0 && (tcp->fd = ckpt_socket_listen(port, &got)) < 0)
        rc = ckpt_fail_errno(err, errno, "listening on TCP port %u", port);
    tcp->allowed = rc == 0 && ckpt_near_allow();
    if (rc == 0)
        rc = write_address(tcp, host, got, err);
    if (rc < 0) {
        ckpt_tcp_free(tcp);
        return -1;
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
    atomic_store(&tcp->word, 0);
    if (tcp->allowed)
        ckpt_near_disallow();
    ckpt_socket_close(&tcp->fd);
    free(tcp);
}

/* ---- addresses ---- */

struct contact {
    char host[200], port[8];
    uint64_t token[2];
    struct ckpt_near near;
};

static int parse_address(const char *address, struct contact *ret, struct ckpt_err *err)
{
    if (sscanf(address,
               "%199s %7s %16" SCNx64 "%16" SCNx64 " %" SCNx64 " %" SCNu64 " %" SCNx64 " %" SCNx64,
               ret->host, ret->port, &ret->token[0], &ret->token[1], &ret->near.node,
               &ret->near.pid, &ret->near.at, &ret->near.word) != 8)
        return ckpt_fail(err, CKPT_USAGE, "'%.200s' is no address of ckpt_tcp_listen", address);
    return 0;
}

/* Do we read the memory of all ranks of this node? Then one of them can serve all. */
int ckpt_tcp_know(struct ckpt_xport_tcp *m, const char *const *address, struct ckpt_err *err)
{
    const uint64_t node = ckpt_node_digest();

    m->x.near = true;
    for (uint32_t r = 0; r < m->x.size; r++) {
        struct contact c;
        if (parse_address(address[r], &c, err) < 0)
            return -1;
        free(m->address[r]);
        if (!(m->address[r] = strdup(address[r])))
            return ckpt_nomem(err);
        m->x.near &= r == m->x.rank || c.near.node != node || ckpt_near_reach(&c.near);
    }
    return 0;
}

/* ---- greeting ---- */

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

static struct ckpt_greeting greeting_to(const struct contact *c, uint32_t rank, uint32_t kind)
{
    return (struct ckpt_greeting){.magic = CKPT_GREETING,
                                  .version = CKPT_TCP_VERSION,
                                  .token = {c->token[0], c->token[1]},
                                  .from = rank,
                                  .kind = kind};
}

/* ---- calling ---- */

/* The rank above, which accepts. */
static int call_above(struct ckpt_xport_tcp *m, const char *address, uint64_t until,
                      struct ckpt_err *err)
{
    const uint32_t to = ckpt_tree_parent(m->x.rank);
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(m, to);
    struct contact c;

    if (!p)
        return ckpt_nomem(err);
    if (parse_address(address, &c, err) < 0)
        return -1;
    const struct ckpt_greeting g = greeting_to(&c, m->x.rank, CKPT_TCP_CONTROL);
    for (;;) {
        int fd = ckpt_socket_dial(c.host, c.port, until);
        if (fd >= 0 && ckpt_tcp_greet(fd, &g, to, until)) {
            p->ctl = fd;
            return 0;
        }
        ckpt_socket_close(&fd);
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " can't be reached at %s port %s",
                             to, c.host, c.port);
        (void)usleep(RETRY_MS * 1000);
    }
}

static int call_begin(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, uint64_t now,
                      struct ckpt_err *err)
{
    struct contact c;

    if (!m->address[p->rank])
        return ckpt_fail(err, CKPT_PEER, "the address of rank %" PRIu32 " is not known", p->rank);
    if (parse_address(m->address[p->rank], &c, err) < 0)
        return -1;
    if (p->since_ms == 0)
        p->since_ms = now;
    if (now > p->since_ms + m->meet_ms)
        return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " can't be reached at %s port %s", p->rank,
                         c.host, c.port);
    p->retry_ms = now + RETRY_MS;
    p->data = ckpt_socket_begin(c.host, c.port);
    p->answer_at = 0;
    if (p->data >= 0)
        p->state = CKPT_TCP_CALLING;
    return 0;
}

static void call_again(struct ckpt_tcp_peer *p)
{
    ckpt_socket_close(&p->data);
    p->state = CKPT_TCP_UNCONNECTED;
}

/* It is connected: say who we are. */
static int call_greet(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved,
                      struct ckpt_err *err)
{
    struct contact c;
    int state = ckpt_socket_connected(p->data);

    if (state == 0)
        return 0;
    if (parse_address(m->address[p->rank], &c, err) < 0)
        return -1;
    const struct ckpt_greeting g = greeting_to(&c, m->x.rank, CKPT_TCP_DATA);
    if (state < 0 || send(p->data, &g, sizeof g, MSG_NOSIGNAL) != sizeof g) {
        call_again(p);
        return 0;
    }
    *moved = true;
    p->state = CKPT_TCP_GREETING;
    return 0;
}

/* The answer: that of the rank meant, and whether it reads our memory. */
static int call_hear(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved,
                     struct ckpt_err *err)
{
    struct contact c;
    ssize_t n = recv(p->data, p->answer + p->answer_at, sizeof p->answer - p->answer_at, 0);

    if (n < 0 && ckpt_socket_would_block())
        return 0;
    if (n <= 0) {
        call_again(p);
        return 0;
    }
    *moved = true;
    p->answer_at += (size_t)n;
    if (p->answer_at < sizeof p->answer)
        return 0;
    if (parse_address(m->address[p->rank], &c, err) < 0)
        return -1;
    struct ckpt_greeting expect = greeting_to(&c, p->rank, CKPT_TCP_DATA);
    p->near.of = c.near;
    p->near.is = p->answer[sizeof expect] && ckpt_near_reach(&c.near);
    const unsigned char both = p->near.is;
    if (memcmp(p->answer, &expect, sizeof expect) != 0 ||
        send(p->data, &both, 1, MSG_NOSIGNAL) != 1)
        call_again(p);
    else
        p->state = CKPT_TCP_OPEN;
    return 0;
}

static int call(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved,
                struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms();

    switch (p->state) {
    case CKPT_TCP_UNCONNECTED:
        if (m->x.rank < p->rank || p->gone || !(p->send.head || p->recv.head) || now < p->retry_ms)
            return 0;
        return call_begin(m, p, now, err);
    case CKPT_TCP_CALLING:
    case CKPT_TCP_GREETING:
        if (now > p->retry_ms + HANDSHAKE_MS)
            call_again(p);
        else if (p->state == CKPT_TCP_CALLING)
            return call_greet(m, p, moved, err);
        else
            return call_hear(m, p, moved, err);
        return 0;
    default:
        return 0;
    }
}

/* ---- being called ---- */

static void accept_callers(struct ckpt_xport_tcp *m, bool *moved)
{
    while (m->callers.len < CALLERS) {
        struct ckpt_tcp_caller c = {.until = ckpt_now_ms() + HANDSHAKE_MS};
        if ((c.fd = accept4(m->tcp->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0)
            return;
        ckpt_socket_tune(c.fd);
        *moved = true;
        if (ckpt_vec_push(&m->callers, c) < 0)
            ckpt_socket_close(&c.fd);
    }
}

/* May this rank call, and for that? Neighbours call for control messages once, others for data. */
static struct ckpt_tcp_peer *known_caller(struct ckpt_xport_tcp *m, const struct ckpt_greeting *g)
{
    const bool control = g->kind == CKPT_TCP_CONTROL;

    if (g->magic != CKPT_GREETING || g->version != CKPT_TCP_VERSION ||
        memcmp(g->token, m->tcp->token, sizeof g->token) != 0 || g->from <= m->x.rank ||
        g->from >= m->x.size || g->kind > CKPT_TCP_CONTROL ||
        (control && ckpt_tree_parent(g->from) != m->x.rank))
        return NULL;
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(m, g->from);
    if (!p || (control ? p->ctl >= 0 || p->gone : p->state != CKPT_TCP_UNCONNECTED))
        return NULL;
    return p;
}

/* 1: it is to say more; 0: its descriptor is a peer's now; -1: it is to be sent away. */
static int answer_caller(struct ckpt_xport_tcp *m, struct ckpt_tcp_caller *c)
{
    struct ckpt_tcp_peer *p = known_caller(m, &c->greeting);
    struct contact its;
    unsigned char answer[sizeof(struct ckpt_greeting) + 1];
    struct ckpt_greeting own = c->greeting;

    if (!p)
        return -1;
    own.from = m->x.rank;
    if (own.kind == CKPT_TCP_CONTROL) {
        if (send(c->fd, &own, sizeof own, MSG_NOSIGNAL) != sizeof own)
            return -1;
        p->ctl = c->fd;
        return 0;
    }
    if (!m->address[p->rank] || parse_address(m->address[p->rank], &its, NULL) < 0)
        return -1;
    memcpy(answer, &own, sizeof own);
    p->near.of = its.near;
    answer[sizeof own] = ckpt_near_reach(&its.near);
    if (send(c->fd, answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer)
        return -1;
    c->confirming = true;
    return 1;
}

static int confirm_caller(struct ckpt_xport_tcp *m, struct ckpt_tcp_caller *c, bool both)
{
    struct ckpt_tcp_peer *p = known_caller(m, &c->greeting);

    if (!p)
        return -1;
    p->near.is = both;
    p->data = c->fd;
    p->state = CKPT_TCP_OPEN;
    return 0;
}

static int hear_caller(struct ckpt_xport_tcp *m, struct ckpt_tcp_caller *c, bool *moved)
{
    unsigned char both = 0;
    unsigned char *to = c->confirming ? &both : (unsigned char *)&c->greeting + c->at;
    const size_t want = c->confirming ? 1 : sizeof c->greeting - c->at;
    ssize_t n = recv(c->fd, to, want, 0);

    if (n < 0 && ckpt_socket_would_block())
        return ckpt_now_ms() > c->until ? -1 : 1;
    if (n <= 0)
        return -1;
    *moved = true;
    if (c->confirming)
        return confirm_caller(m, c, both != 0);
    c->at += (size_t)n;
    return c->at < sizeof c->greeting ? 1 : answer_caller(m, c);
}

int ckpt_tcp_progress_connections(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err)
{
    int rc = 0;

    if (m->cancelled || !m->tcp)
        return 0;
    accept_callers(m, moved);
    for (size_t i = m->callers.len; i-- > 0;) {
        struct ckpt_tcp_caller *c = &m->callers.ptr[i];
        const int heard = hear_caller(m, c, moved);
        if (heard > 0)
            continue;
        if (heard < 0)
            ckpt_socket_close(&c->fd);
        *c = m->callers.ptr[--m->callers.len];
    }
    for (size_t i = 0; i < m->active.len && rc == 0; i++)
        rc = call(m, m->active.ptr[i], moved, err);
    return rc;
}

/* ---- the tree ---- */

uint64_t ckpt_tcp_files(uint32_t rank, uint32_t size)
{
    return (rank == 0 ? size : ckpt_tree_children(rank, size)) + 24;
}

static uint32_t missing_child(const struct ckpt_xport_tcp *m)
{
    const uint32_t n = ckpt_tree_children(m->x.rank, m->x.size);

    for (uint32_t k = 0; k < n; k++) {
        const struct ckpt_tcp_peer *p = m->peer[ckpt_tree_child(m->x.rank, k)];
        if (!p || (p->ctl < 0 && !p->gone))
            return ckpt_tree_child(m->x.rank, k);
    }
    return UINT32_MAX;
}

static int await_below(struct ckpt_xport_tcp *m, uint64_t until, struct ckpt_err *err)
{
    uint32_t missing;

    while ((missing = missing_child(m)) != UINT32_MAX) {
        bool moved = false;
        if (ckpt_tcp_progress_connections(m, &moved, err) < 0)
            return -1;
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " did not connect in time",
                             missing);
        if (!moved)
            m->x.ops->wait(&m->x, RETRY_MS);
    }
    return 0;
}

int ckpt_tcp_join(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *above,
                  uint32_t timeout_ms, struct ckpt_xport_tcp **ret, struct ckpt_err *err)
{
    const uint64_t until = ckpt_now_ms() + timeout_ms;
    struct ckpt_xport_tcp *m = NULL;

    if (ckpt_tcp_new(tcp, rank, size, &m, err) < 0)
        return -1;
    m->meet_ms = timeout_ms;
    if ((rank > 0 && call_above(m, above, until, err) < 0) || await_below(m, until, err) < 0) {
        m->x.ops->free(&m->x);
        return -1;
    }
    *ret = m;
    return 0;
}

int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *const *address,
                     uint32_t timeout_ms, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_xport_tcp *m = NULL;

    if (rank >= size || ckpt_socket_reserve(ckpt_tcp_files(rank, size), err) < 0) {
        ckpt_tcp_free(tcp);
        return rank >= size ? ckpt_fail(err, CKPT_USAGE, "rank %" PRIu32 " of %" PRIu32, rank, size)
                            : -1;
    }
    if (ckpt_tcp_join(tcp, rank, size, rank > 0 ? address[ckpt_tree_parent(rank)] : NULL,
                      timeout_ms, &m, err) < 0)
        return -1;
    if (ckpt_tcp_know(m, address, err) < 0) {
        m->x.ops->free(&m->x);
        return -1;
    }
    return ckpt_comm_wrap(&m->x, ret, err);
}
