/* SPDX-License-Identifier: Apache-2.0 */
/* Making connections: to the neighbours in the tree at the beginning, and to other ranks when data
 * is to be exchanged with them. Of two ranks, the one with the greater number dials. Many
 * handshakes go on side by side, each with a deadline of its own, so that a stranger delays nobody.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "comm/tcp/listen.h"
#include "comm/tcp/tcp.h"

enum {
    HANDSHAKE_MS = 5 * 1000,
    RETRY_MS = 20,
    CALLERS = 1024,
    PARTING_MS = 2000, /* a parent that gives up may still say why */
};

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
    struct ckpt_same_host own;

    ckpt_same_host_self(&own, &tcp->word);
    int n =
        snprintf(tcp->address, sizeof tcp->address,
                 "%s %u %016" PRIx64 "%016" PRIx64 " %" PRIx64 " %" PRIu64 " %" PRIx64 " %" PRIx64,
                 host, port, tcp->token[0], tcp->token[1], own.node, own.pid, own.at, own.word);
    if (n < 0 || (size_t)n >= sizeof tcp->address)
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    return 0;
}

/* The host that other ranks dial: that of CKPTFS_INTERFACE, else the given one, else this machine's
 * name. */
static int choose_host(const char *host, char ret[CKPT_HOST_BYTES], struct ckpt_err *err)
{
    if (ckpt_listen_interface(ret, err) < 0)
        return -1;
    if (ret[0])
        return 0;
    if (host && strlen(host) >= CKPT_HOST_BYTES)
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    if (host)
        (void)strcpy(ret, host);
    else if (gethostname(ret, CKPT_HOST_BYTES) < 0)
        (void)strcpy(ret, "localhost");
    ret[CKPT_HOST_BYTES - 1] = '\0';
    return 0;
}

static int listen_into(struct ckpt_tcp *tcp, const char *host, struct ckpt_err *err)
{
    char given[CKPT_HOST_BYTES], address[CKPT_HOST_BYTES];
    struct ckpt_ports ports;
    uint64_t word = 0;
    uint16_t port = 0;
    bool secret;

    if (ckpt_secret_is_set(&secret, err) < 0 || ckpt_listen_ports(&ports, err) < 0 ||
        choose_host(host, given, err) < 0 || random_words(tcp->token, 2, err) < 0 ||
        random_words(&word, 1, err) < 0)
        return -1;
    tcp->first = word ? word : 1;
    atomic_init(&tcp->word, tcp->first);
    if ((tcp->fd = ckpt_listen(given, ports, address, &port, err)) < 0)
        return -1;
    return write_address(tcp, address, port, err);
}

int ckpt_tcp_listen(const char *host, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    struct ckpt_tcp *tcp = calloc(1, sizeof *tcp);

    if (!tcp)
        return ckpt_nomem(err);
    tcp->fd = -1;
    if (listen_into(tcp, host, err) < 0) {
        ckpt_tcp_free(tcp);
        return -1;
    }
    *ret = tcp;
    return 0;
}

const char *ckpt_tcp_address(const struct ckpt_tcp *tcp) { return tcp->address; }

void ckpt_tcp_free(struct ckpt_tcp *tcp)
{
    if (!tcp)
        return;
    atomic_store(&tcp->word, 0);
    ckpt_socket_close(&tcp->fd);
    free(tcp);
}

/* ---- addresses ---- */

struct contact {
    char host[200], port[8];
    uint64_t token[2];
    struct ckpt_same_host same_host;
};

static int parse_address(const char *address, struct contact *ret, struct ckpt_err *err)
{
    if (sscanf(address,
               "%199s %7s %16" SCNx64 "%16" SCNx64 " %" SCNx64 " %" SCNu64 " %" SCNx64 " %" SCNx64,
               ret->host, ret->port, &ret->token[0], &ret->token[1], &ret->same_host.node,
               &ret->same_host.pid, &ret->same_host.at, &ret->same_host.word) != 8)
        return ckpt_fail(err, CKPT_USAGE, "'%.200s' is no address of ckpt_tcp_listen", address);
    return 0;
}

static const char NO_ANCESTOR[] =
    "the ranks of this node have no common parent process but init, so that the system (Yama) does "
    "not let them read each other's memory: they use sockets";

/* Find the process that the ranks of this node must permit to read their memory, if Yama asks for
 * that. */
static void find_ancestor(struct ckpt_xport_tcp *m, const uint64_t *pid, size_t n)
{
    if (n < 2 || !ckpt_same_host_restricted())
        return;
    m->ancestor = ckpt_same_host_ancestor(pid, n);
    m->x.remark = m->ancestor ? NULL : NO_ANCESTOR;
}

void ckpt_tcp_permit(struct ckpt_xport *x, bool on)
{
    struct ckpt_xport_tcp *m = (struct ckpt_xport_tcp *)x;

    if (on == m->permits || m->ancestor == 0)
        return;
    m->permits = on;
    if (on)
        ckpt_same_host_permit(m->ancestor);
    else
        ckpt_same_host_forbid();
}

int ckpt_tcp_know(struct ckpt_xport_tcp *m, const char *const *address, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *pid = malloc(m->x.size * sizeof *pid);
    const uint64_t node = ckpt_node_digest();
    size_t n = 0;

    if (!pid)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < m->x.size; r++) {
        struct contact c;
        if (parse_address(address[r], &c, err) < 0)
            return -1;
        free(m->address[r]);
        if (!(m->address[r] = strdup(address[r])))
            return ckpt_nomem(err);
        if (c.same_host.node == node)
            pid[n++] = c.same_host.pid;
    }
    find_ancestor(m, pid, n);
    ckpt_tcp_permit(&m->x, true);
    return 0;
}

/* Can this rank read the memory of all ranks of this node? */
static int look_same_host(struct ckpt_xport_tcp *m, struct ckpt_err *err)
{
    const uint64_t node = ckpt_node_digest();

    m->x.same_host = true;
    for (uint32_t r = 0; r < m->x.size; r++) {
        struct contact c;
        if (parse_address(m->address[r], &c, err) < 0)
            return -1;
        m->x.same_host &=
            r == m->x.rank || c.same_host.node != node || ckpt_same_host_reach(&c.same_host);
    }
    return 0;
}

int ckpt_tcp_finish(struct ckpt_xport_tcp *m, struct ckpt_comm *comm, int rc, uint32_t timeout_ms,
                    struct ckpt_err *err)
{
    if (ckpt_comm_agree(comm, rc, timeout_ms, err) < 0)
        return -1;
    rc = look_same_host(m, err);
    rc = ckpt_comm_agree(comm, rc, timeout_ms, err);
    ckpt_tcp_permit(&m->x, false);
    return rc;
}

/* ---- dialling ---- */

static struct ckpt_greeting greeting_to(const struct contact *c, uint32_t rank, uint32_t kind)
{
    return (struct ckpt_greeting){.magic = CKPT_GREETING,
                                  .version = CKPT_TCP_VERSION,
                                  .token = {c->token[0], c->token[1]},
                                  .from = rank,
                                  .kind = kind};
}

static int fail_refused(uint32_t rank, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_PEER,
                     "rank %" PRIu32 " and this rank do not have the same CKPTFS_SECRET", rank);
}

/* Connect to the parent, which accepts. */
static int dial_above(struct ckpt_xport_tcp *m, const char *address, uint64_t until,
                      struct ckpt_err *err)
{
    const uint32_t to = ckpt_tree_parent(m->x.rank);
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(m, to);
    struct ckpt_handshake h = {0};
    struct contact c;

    if (!p)
        return ckpt_nomem(err);
    if (parse_address(address, &c, err) < 0)
        return -1;
    const struct ckpt_greeting g = greeting_to(&c, m->x.rank, CKPT_TCP_CONTROL);
    for (;;) {
        int fd = ckpt_socket_dial(c.host, c.port, until);
        if (fd >= 0) {
            ckpt_handshake_dial(&h, fd, &g, to, until);
            if (ckpt_handshake_run(&h, &p->ctl))
                return 0;
        }
        if (h.refused)
            return fail_refused(to, err);
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " can't be reached at %s port %s",
                             to, c.host, c.port);
        (void)usleep(RETRY_MS * 1000);
    }
}

static int dial_begin(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, uint64_t now,
                      struct ckpt_err *err)
{
    struct contact c;

    if (p->refused)
        return fail_refused(p->rank, err);
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
    const int fd = ckpt_socket_begin(c.host, c.port);
    struct ckpt_greeting g = greeting_to(&c, m->x.rank, CKPT_TCP_DATA);
    g.word = m->renewed;
    if (fd >= 0) {
        ckpt_handshake_dial(&p->dialling, fd, &g, p->rank, now + HANDSHAKE_MS);
        p->same_host.of = c.same_host;
        p->same_host.of.word += m->renewed;
        p->state = CKPT_TCP_DIALLING;
    }
    return 0;
}

/* The other rank has answered. Same-host copies are used if both ranks can read each other's
 * memory. */
static enum ckpt_handshake_result dial_confirm(struct ckpt_tcp_peer *p)
{
    p->same_host.is = p->dialling.its.word && ckpt_same_host_reach(&p->same_host.of);
    return ckpt_handshake_confirm(&p->dialling, p->same_host.is);
}

static void dial_on(struct ckpt_tcp_peer *p, bool *moved)
{
    enum ckpt_handshake_result r = ckpt_handshake_step(&p->dialling, moved);

    if (r == CKPT_HANDSHAKE_ASKED)
        r = dial_confirm(p);
    if (r == CKPT_HANDSHAKE_WAITING)
        return;
    p->refused = p->dialling.refused;
    p->state = r == CKPT_HANDSHAKE_DONE ? CKPT_TCP_OPEN : CKPT_TCP_UNCONNECTED;
    p->data = p->dialling.fd;
}

static int dial(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, bool *moved,
                struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms();

    if (p->state == CKPT_TCP_DIALLING) {
        dial_on(p, moved);
        return 0;
    }
    if (p->state != CKPT_TCP_UNCONNECTED || m->x.rank < p->rank || p->gone ||
        !(p->send.head || p->recv.head) || now < p->retry_ms)
        return 0;
    return dial_begin(m, p, now, err);
}

/* ---- being dialled ---- */

static void accept_callers(struct ckpt_xport_tcp *m, bool *moved)
{
    while (m->callers.len < CALLERS) {
        int fd = accept4(m->tcp->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct ckpt_handshake h;
        if (fd < 0)
            return;
        ckpt_socket_tune(fd);
        ckpt_handshake_accept(&h, fd, ckpt_now_ms() + HANDSHAKE_MS);
        *moved = true;
        if (ckpt_vec_push(&m->callers, h) < 0)
            ckpt_socket_close(&fd);
    }
}

/* The peer that a greeting comes from, if that rank may dial now and for this purpose; else NULL.
 */
static struct ckpt_tcp_peer *known_caller(struct ckpt_xport_tcp *m, const struct ckpt_greeting *g)
{
    const bool control = g->kind == CKPT_TCP_CONTROL;

    if (memcmp(g->token, m->tcp->token, sizeof g->token) != 0 || g->from <= m->x.rank ||
        g->from >= m->x.size || g->kind > CKPT_TCP_CONTROL ||
        (control && ckpt_tree_parent(g->from) != m->x.rank) || (!control && g->word != m->renewed))
        return NULL;
    struct ckpt_tcp_peer *p = ckpt_tcp_peer(m, g->from);
    if (!p || (control ? p->ctl >= 0 || p->gone : p->state != CKPT_TCP_UNCONNECTED))
        return NULL;
    return p;
}

static enum ckpt_handshake_result answer_caller(struct ckpt_xport_tcp *m, struct ckpt_handshake *h)
{
    struct ckpt_tcp_peer *p = known_caller(m, &h->its);
    struct contact its;

    if (!p)
        return CKPT_HANDSHAKE_FAILED;
    if (h->its.kind == CKPT_TCP_CONTROL)
        return ckpt_handshake_answer(h, m->x.rank, 0);
    if (!m->address[p->rank] || parse_address(m->address[p->rank], &its, NULL) < 0)
        return CKPT_HANDSHAKE_FAILED;
    p->same_host.of = its.same_host;
    p->same_host.of.word += m->renewed;
    return ckpt_handshake_answer(h, m->x.rank, ckpt_same_host_reach(&p->same_host.of));
}

/* The handshake is done: give the descriptor to the peer. */
static bool adopt_caller(struct ckpt_xport_tcp *m, const struct ckpt_handshake *h)
{
    struct ckpt_tcp_peer *p = known_caller(m, &h->its);

    if (!p)
        return false;
    if (h->its.kind == CKPT_TCP_CONTROL) {
        p->ctl = h->fd;
        return true;
    }
    p->same_host.is = h->word != 0;
    p->data = h->fd;
    p->state = CKPT_TCP_OPEN;
    return true;
}

static enum ckpt_handshake_result progress_caller(struct ckpt_xport_tcp *m,
                                                  struct ckpt_handshake *h, bool *moved)
{
    enum ckpt_handshake_result r = ckpt_handshake_step(h, moved);

    if (r == CKPT_HANDSHAKE_ASKED)
        r = answer_caller(m, h);
    return r == CKPT_HANDSHAKE_DONE && !adopt_caller(m, h) ? CKPT_HANDSHAKE_FAILED : r;
}

int ckpt_tcp_progress_connections(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err)
{
    int rc = 0;

    if (m->cancelled || !m->tcp)
        return 0;
    accept_callers(m, moved);
    for (size_t i = m->callers.len; i-- > 0;) {
        struct ckpt_handshake *h = &m->callers.ptr[i];
        const enum ckpt_handshake_result r = progress_caller(m, h, moved);
        if (r == CKPT_HANDSHAKE_WAITING)
            continue;
        if (r == CKPT_HANDSHAKE_FAILED)
            ckpt_socket_close(&h->fd);
        *h = m->callers.ptr[--m->callers.len];
    }
    for (size_t i = 0; i < m->active.len && rc == 0; i++)
        rc = dial(m, m->active.ptr[i], moved, err);
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

    *ret = NULL;
    if (ckpt_tcp_new(tcp, rank, size, &m, err) < 0)
        return -1;
    m->meet_ms = timeout_ms;
    if (rank > 0 && dial_above(m, above, until + PARTING_MS, err) < 0) {
        m->x.ops->free(&m->x);
        return -1;
    }
    *ret = m;
    return await_below(m, until, err);
}

int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *const *address,
                     uint32_t timeout_ms, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_xport_tcp *m = NULL;
    struct ckpt_comm *comm = NULL;

    if (rank >= size || ckpt_socket_reserve(ckpt_tcp_files(rank, size), err) < 0) {
        ckpt_tcp_free(tcp);
        return rank >= size ? ckpt_fail(err, CKPT_USAGE, "rank %" PRIu32 " of %" PRIu32, rank, size)
                            : -1;
    }
    int rc = ckpt_tcp_join(tcp, rank, size, rank > 0 ? address[ckpt_tree_parent(rank)] : NULL,
                           timeout_ms, &m, err);
    if (!m || ckpt_comm_wrap(&m->x, &comm, err) < 0)
        return -1;
    if (rc == 0)
        rc = ckpt_tcp_know(m, address, err);
    if (ckpt_tcp_finish(m, comm, rc, timeout_ms, err) < 0) {
        ckpt_comm_free(comm);
        return -1;
    }
    *ret = comm;
    return 0;
}
