/* SPDX-License-Identifier: Apache-2.0 */
/* Making connections: at the rendezvous, to the neighbours in the tree, and to other ranks when
 * data is to be exchanged with them. Of two ranks, the one with the greater number dials. Many
 * handshakes go on side by side, each with a deadline of its own, so that an unauthenticated peer
 * delays nobody.
 *
 * A link is UNCONNECTED, then DIALLING (of the dialling rank) while its handshake is among
 * m->handshakes, then OPEN; a handshake that fails makes it UNCONNECTED again. */
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/tcp/tcp.h"

enum {
    /* The deadline of a handshake. A rank answers as soon as it polls, and may be busy for a second
     * or two: with half of this it would be dialled again. With twice as much, a peer that says
     * nothing takes one of CKPT_TCP_HANDSHAKES places twice as long. */
    HANDSHAKE_MS = 5000,

    /* The deadline of a handshake with what may be rank 0. Its ports are tried one after the other,
     * and a process of somebody else that listens at one of them holds up the search for so long.
     */
    SEARCH_MS = 2000,

    /* The pause after all addresses and ports of a rank were tried. Ranks that start before rank 0
     * dial it so often: half of it doubles what a large job asks of rank 0's machine, and twice as
     * much makes the start 20 ms later. */
    RETRY_MS = 20,
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
    struct ckpt_shm_place own;

    ckpt_shm_describe(&tcp->shm, &own);
    int n =
        snprintf(tcp->address, sizeof tcp->address,
                 "%s %u %016" PRIx64 "%016" PRIx64 " %" PRIx64 " %" PRIu64 " %" PRIx64 " %" PRIx64,
                 host, port, tcp->token[0], tcp->token[1], own.node, own.pid, own.fd, own.word);
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
    ckpt_shm_init(&tcp->shm, word);
    if ((tcp->fd = ckpt_listen(given, ports, address, &port, err)) < 0)
        return -1;
    return write_address(tcp, address, port, err);
}

int ckpt_tcp_listen(const char *host, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    struct ckpt_tcp *tcp = calloc(1, sizeof *tcp);

    if (!tcp)
        return ckpt_nomem(err);
    tcp->fd = tcp->shm.fd = -1;
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
    ckpt_shm_close(&tcp->shm);
    ckpt_closep(&tcp->fd);
    free(tcp);
}

/* ---- addresses ---- */

int ckpt_tcp_parse(const char *address, struct ckpt_tcp_contact *ret, struct ckpt_err *err)
{
    *ret = (struct ckpt_tcp_contact){.nport = 1};
    if (sscanf(address,
               "%199s %5" SCNu32 " %16" SCNx64 "%16" SCNx64 " %" SCNx64 " %" SCNu64 " %" SCNx64
               " %" SCNx64,
               ret->host, &ret->port, &ret->token[0], &ret->token[1], &ret->shm.node, &ret->shm.pid,
               &ret->shm.fd, &ret->shm.word) != 8)
        return ckpt_fail(err, CKPT_USAGE, "'%.200s' is no address of ckpt_tcp_listen", address);
    return 0;
}

int ckpt_tcp_know(struct ckpt_xport_tcp *m, const char *text, size_t len, struct ckpt_err *err)
{
    const uint64_t node = ckpt_node_digest();

    m->x.same_host = true;
    for (uint32_t r = 0; r < m->x.size; r++) {
        const size_t own = strnlen(text, len) + 1;
        struct ckpt_tcp_contact c;
        if (own > len)
            return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent broken addresses");
        if (ckpt_tcp_parse(text, &c, err) < 0)
            return -1;
        if (!m->address[r] && !(m->address[r] = strdup(text)))
            return ckpt_nomem(err);
        m->x.same_host &= r == m->x.rank || c.shm.node != node || ckpt_shm_reach(&c.shm);
        text += own;
        len -= own;
    }
    return 0;
}

/* ---- peers ---- */

struct ckpt_tcp_peer *ckpt_tcp_peer(struct ckpt_xport_tcp *m, uint32_t rank)
{
    struct ckpt_tcp_peer *p = m->peer[rank];

    if (p)
        return p;
    if (!(p = calloc(1, sizeof *p)) || ckpt_vec_push(&m->active, p) < 0) {
        free(p);
        return NULL;
    }
    p->rank = rank;
    p->data.fd = p->ctl.fd = p->rendezvous.fd = p->same_host.view.fd = -1;
    ckpt_queue_init(&p->send);
    ckpt_queue_init(&p->recv);
    p->out_tail = &p->out;
    return m->peer[rank] = p;
}

void ckpt_tcp_end_rendezvous(struct ckpt_xport_tcp *m)
{
    struct ckpt_tcp_rendezvous *t = &m->rendezvous;

    ckpt_closep(&t->listener);
    for (uint32_t r = 0; t->waiting && r < m->x.size; r++)
        ckpt_closep(&t->waiting[r]);
    free(t->waiting);
    free(t->unproven);
    t->waiting = NULL;
    t->unproven = NULL;
}

/* ---- dialling ---- */

static struct ckpt_tcp_link *link_of(struct ckpt_tcp_peer *p, uint32_t kind)
{
    return kind == CKPT_TCP_DATA ? &p->data : kind == CKPT_TCP_CONTROL ? &p->ctl : &p->rendezvous;
}

/* Does this rank dial the other one for this purpose? */
static bool wanted(const struct ckpt_xport_tcp *m, const struct ckpt_tcp_peer *p, uint32_t kind)
{
    if (m->x.rank <= p->rank)
        return false;
    if (kind == CKPT_TCP_DATA)
        return p->ctl.state != CKPT_TCP_CLOSED && (p->send.head || p->recv.head);
    if (kind == CKPT_TCP_CONTROL)
        return p->rank == ckpt_tree_parent(m->x.rank) &&
               m->peer[0]->rendezvous.state == CKPT_TCP_CLOSED;
    return p->rank == 0;
}

int ckpt_tcp_fail_unreached(enum ckpt_code code, uint32_t rank, const struct ckpt_tcp_contact *c,
                            struct ckpt_err *err)
{
    return ckpt_fail(err, code, "rank %" PRIu32 " can't be reached at %s port %" PRIu32, rank,
                     c->host, c->port);
}

static int dial(struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p, uint32_t kind, uint64_t now,
                struct ckpt_err *err)
{
    struct ckpt_tcp_link *l = link_of(p, kind);
    struct ckpt_tcp_contact c = m->rendezvous.root;
    const uint32_t limit_ms = kind == CKPT_TCP_RENDEZVOUS ? SEARCH_MS : HANDSHAKE_MS;
    struct ckpt_handshake h;

    if (kind != CKPT_TCP_RENDEZVOUS && !m->address[p->rank])
        return ckpt_fail(err, CKPT_PEER, "the address of rank %" PRIu32 " is not known", p->rank);
    if (kind != CKPT_TCP_RENDEZVOUS && ckpt_tcp_parse(m->address[p->rank], &c, err) < 0)
        return -1;
    if (l->refused && c.nport == 1)
        return ckpt_fail(err, CKPT_PEER,
                         "rank %" PRIu32 " and this rank do not have the same CKPTFS_SECRET",
                         p->rank);
    if (l->since_ms == 0)
        l->since_ms = now;
    if (kind == CKPT_TCP_DATA && now > l->since_ms + m->connect_ms)
        return ckpt_tcp_fail_unreached(CKPT_PEER, p->rank, &c, err);
    const int fd = ckpt_socket_begin(c.host, c.port, c.nport, &l->attempt);
    if (l->attempt == 0)
        l->retry_ms = now + RETRY_MS;
    if (fd < 0)
        return 0;
    const struct ckpt_greeting g = {.magic = CKPT_GREETING,
                                    .version = CKPT_TCP_VERSION,
                                    .token = {c.token[0], c.token[1]},
                                    .from = m->x.rank,
                                    .kind = kind,
                                    .word = kind == CKPT_TCP_DATA ? m->renewed : 0};
    ckpt_handshake_dial(&h, fd, &g, p->rank, now + limit_ms);
    if (ckpt_vec_push(&m->handshakes, h) < 0) {
        ckpt_closep(&h.fd);
        return 0;
    }
    p->same_host.of = c.shm;
    l->state = CKPT_TCP_DIALLING;
    return 0;
}

/* Listen at the local end of the connection to rank 0, because other machines can reach that. */
static int listen_beside(struct ckpt_xport_tcp *m, int fd, struct ckpt_err *err)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof a;
    char host[CKPT_HOST_BYTES];

    if (getsockname(fd, (struct sockaddr *)&a, &len) < 0 ||
        getnameinfo((struct sockaddr *)&a, len, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0)
        return ckpt_fail(err, CKPT_IO, "this machine's own address is not known");
    return ckpt_tcp_listen(host, &m->tcp, err);
}

/* Map a peer's memory, unless it is mapped; this rank must have one, too. */
static bool reach(const struct ckpt_xport_tcp *m, struct ckpt_tcp_peer *p,
                  const struct ckpt_shm_place *its)
{
    struct ckpt_shm_view *v = &p->same_host.view;

    return m->tcp->shm.fd >= 0 && (v->fd >= 0 || ckpt_shm_open(v, its));
}

/* The other rank has answered. Notes are sent in place of bytes if both ranks can map each other's
 * shared memory. */
static enum ckpt_handshake_result confirm(struct ckpt_xport_tcp *m, struct ckpt_handshake *h,
                                          struct ckpt_err *err)
{
    struct ckpt_tcp_peer *p = m->peer[h->to];

    if (h->mine.kind == CKPT_TCP_CONTROL)
        return ckpt_handshake_confirm(h, 0, NULL);
    if (h->mine.kind == CKPT_TCP_RENDEZVOUS)
        return !m->tcp && listen_beside(m, h->fd, err) < 0
                   ? CKPT_HANDSHAKE_FAILED
                   : ckpt_handshake_confirm(h, 0, m->tcp->address);
    p->same_host.active = h->its.word && reach(m, p, &p->same_host.of);
    return ckpt_handshake_confirm(h, p->same_host.active, NULL);
}

/* A handshake of this rank has ended. One for data that is older than the last renewal leads
 * nowhere. */
static void end_dial(struct ckpt_xport_tcp *m, struct ckpt_handshake *h, bool good)
{
    struct ckpt_tcp_link *l = link_of(m->peer[h->to], h->mine.kind);

    if (h->mine.kind == CKPT_TCP_DATA && h->mine.word != m->renewed) {
        ckpt_closep(&h->fd);
        return;
    }
    l->refused |= h->refused;
    l->state = good ? CKPT_TCP_OPEN : CKPT_TCP_UNCONNECTED;
    l->fd = h->fd;
}

/* ---- being dialled ---- */

static void accept_connections(struct ckpt_xport_tcp *m, int listener, bool *moved)
{
    while (listener >= 0 && m->handshakes.len < CKPT_TCP_HANDSHAKES) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct ckpt_handshake h;
        if (fd < 0)
            return;
        ckpt_socket_tune(fd);
        ckpt_handshake_accept(&h, fd, ckpt_now_ms() + HANDSHAKE_MS);
        *moved = true;
        if (ckpt_vec_push(&m->handshakes, h) < 0)
            ckpt_closep(&fd);
    }
}

/* May the rank that a greeting comes from dial now and for this purpose? At the rendezvous a rank
 * registers once: a second peer with its number is no rank of this job. */
static bool may_dial(const struct ckpt_xport_tcp *m, const struct ckpt_greeting *g)
{
    const uint64_t *token =
        g->kind == CKPT_TCP_RENDEZVOUS ? m->rendezvous.root.token : m->tcp->token;

    if (memcmp(g->token, token, sizeof g->token) != 0 || g->from <= m->x.rank ||
        g->from >= m->x.size)
        return false;
    const struct ckpt_tcp_peer *p = m->peer[g->from];
    if (g->kind == CKPT_TCP_RENDEZVOUS)
        return m->rendezvous.waiting && !m->address[g->from];
    if (g->kind == CKPT_TCP_CONTROL)
        return ckpt_tree_parent(g->from) == m->x.rank &&
               (!p || p->ctl.state == CKPT_TCP_UNCONNECTED);
    return g->kind == CKPT_TCP_DATA && g->word == m->renewed &&
           (!p || p->data.state == CKPT_TCP_UNCONNECTED);
}

static enum ckpt_handshake_result answer(struct ckpt_xport_tcp *m, struct ckpt_handshake *h)
{
    struct ckpt_tcp_contact its;
    struct ckpt_tcp_peer *p;

    if (!may_dial(m, &h->its))
        return CKPT_HANDSHAKE_FAILED;
    if (h->its.kind != CKPT_TCP_DATA)
        return ckpt_handshake_answer(h, m->x.rank, 0);
    if (!m->address[h->its.from] || ckpt_tcp_parse(m->address[h->its.from], &its, NULL) < 0 ||
        !(p = ckpt_tcp_peer(m, h->its.from)))
        return CKPT_HANDSHAKE_FAILED;
    return ckpt_handshake_answer(h, m->x.rank, reach(m, p, &its.shm));
}

/* Send a rank that has registered the address of its parent, if that has registered, too. */
static void send_parent(struct ckpt_xport_tcp *m, uint32_t rank, struct ckpt_err *err)
{
    const char *parent = m->address[ckpt_tree_parent(rank)];
    int *fd = &m->rendezvous.waiting[rank];
    char text[CKPT_TCP_ADDRESS] = "";

    if (*fd < 0 || !parent)
        return;
    (void)snprintf(text, sizeof text, "%s", parent);
    /* the buffer of the connection is empty, and takes this at once */
    if (send(*fd, text, sizeof text, MSG_NOSIGNAL) != sizeof text)
        (void)ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", rank);
    ckpt_closep(fd);
}

static bool register_rank(struct ckpt_xport_tcp *m, const struct ckpt_handshake *h,
                          struct ckpt_err *err)
{
    const char *address = h->in.confirmation.address;
    const uint32_t rank = h->its.from;
    struct ckpt_tcp_contact c;

    if (ckpt_tcp_parse(address, &c, NULL) < 0 || !(m->address[rank] = strdup(address)))
        return false;
    m->rendezvous.waiting[rank] = h->fd;
    m->rendezvous.count++;
    send_parent(m, rank, err);
    for (uint32_t k = 0; k < ckpt_tree_children(rank, m->x.size); k++)
        send_parent(m, ckpt_tree_child(rank, k), err);
    return true;
}

/* The handshake is done: whose is the descriptor? False: nobody's. */
static bool adopt(struct ckpt_xport_tcp *m, const struct ckpt_handshake *h, struct ckpt_err *err)
{
    struct ckpt_tcp_peer *p;

    if (!may_dial(m, &h->its))
        return false;
    if (h->its.kind == CKPT_TCP_RENDEZVOUS)
        return register_rank(m, h, err);
    if (!(p = ckpt_tcp_peer(m, h->its.from)))
        return false;
    struct ckpt_tcp_link *l = link_of(p, h->its.kind);
    if (h->its.kind == CKPT_TCP_DATA)
        p->same_host.active = h->in.confirmation.word != 0;
    l->fd = h->fd;
    l->state = CKPT_TCP_OPEN;
    return true;
}

static void end_accept(struct ckpt_xport_tcp *m, struct ckpt_handshake *h, bool good,
                       struct ckpt_err *err)
{
    if (!good && h->answered && h->its.kind == CKPT_TCP_RENDEZVOUS && m->rendezvous.unproven)
        m->rendezvous.unproven[h->its.from] = true;
    if (!good || !adopt(m, h, err))
        ckpt_closep(&h->fd);
}

/* ---- progress ---- */

/* False: the handshake has ended. */
static bool progress_handshake(struct ckpt_xport_tcp *m, struct ckpt_handshake *h, bool *moved,
                               struct ckpt_err *err)
{
    const bool dials = ckpt_handshake_dials(h);
    enum ckpt_handshake_result r = ckpt_handshake_step(h, moved);

    if (r == CKPT_HANDSHAKE_ASKED)
        r = dials ? confirm(m, h, err) : answer(m, h);
    if (r == CKPT_HANDSHAKE_WAITING)
        return true;
    if (r == CKPT_HANDSHAKE_FAILED)
        ckpt_closep(&h->fd);
    *moved = true;
    if (dials)
        end_dial(m, h, r == CKPT_HANDSHAKE_DONE);
    else
        end_accept(m, h, r == CKPT_HANDSHAKE_DONE, err);
    return false;
}

/* Receive the parent's address from rank 0. */
static int receive_parent(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err)
{
    struct ckpt_tcp_link *l = &m->peer[0]->rendezvous;
    struct ckpt_tcp_rendezvous *v = &m->rendezvous;
    char **address = &m->address[ckpt_tree_parent(m->x.rank)];
    const ssize_t n = recv(l->fd, v->parent + v->parent_at, sizeof v->parent - v->parent_at, 0);

    if (n < 0 && ckpt_socket_would_block())
        return 0;
    if (n <= 0)
        return ckpt_fail(err, CKPT_PEER, "rank 0 is gone, or not all ranks came in time");
    *moved = true;
    v->parent_at += (size_t)n;
    if (v->parent_at < sizeof v->parent)
        return 0;
    v->parent[sizeof v->parent - 1] = '\0';
    ckpt_closep(&l->fd);
    l->state = CKPT_TCP_CLOSED;
    return *address || (*address = strdup(v->parent)) ? 0 : ckpt_nomem(err);
}

int ckpt_tcp_progress_connections(struct ckpt_xport_tcp *m, bool *moved, struct ckpt_err *err)
{
    const uint64_t now = ckpt_now_ms();
    struct ckpt_err why = {0};

    if (m->cancelled)
        return 0;
    accept_connections(m, m->tcp ? m->tcp->fd : -1, moved);
    accept_connections(m, m->rendezvous.listener, moved);
    for (size_t i = m->handshakes.len; i-- > 0;)
        if (!progress_handshake(m, &m->handshakes.ptr[i], moved, &why))
            m->handshakes.ptr[i] = m->handshakes.ptr[--m->handshakes.len];
    if (m->peer[0] && m->peer[0]->rendezvous.state == CKPT_TCP_OPEN)
        (void)receive_parent(m, moved, &why);
    for (size_t i = 0; i < m->active.len; i++)
        for (uint32_t kind = CKPT_TCP_DATA; kind <= CKPT_TCP_RENDEZVOUS; kind++) {
            struct ckpt_tcp_peer *p = m->active.ptr[i];
            const struct ckpt_tcp_link *l = link_of(p, kind);
            if (l->state == CKPT_TCP_UNCONNECTED && now >= l->retry_ms && wanted(m, p, kind) &&
                why.code == CKPT_OK)
                (void)dial(m, p, kind, now, &why);
        }
    return why.code == CKPT_OK ? 0 : ckpt_err_move(err, &why);
}
