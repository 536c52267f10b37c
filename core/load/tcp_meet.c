/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that a launcher started: rank 0 listens near MASTER_PORT, hears all addresses, and tells
 * each rank the one above it in the tree; when the tree stands, it tells all to all along it. */
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "load/comm.h"
#include "load/tcp.h"

enum { MEET_PORTS = 64, ECHO_MS = 2000 };

struct meeting {
    uint32_t rank, size;
    const char *host;
    uint32_t port;
    uint64_t token, until;
    char above[CKPT_TCP_ADDRESS]; /* the address of the rank above */
    char **address;               /* rank 0: of all ranks */
};

/* Ranks of one job know each other by this: the launcher's name of the job, its size, and the port
 * that it was given; another job may have the next one. */
static uint64_t job_token(uint32_t size, uint32_t port)
{
    const char *id = getenv("TORCHELASTIC_RUN_ID");
    uint64_t h = 0xcbf29ce484222325u ^ size ^ (uint64_t)port << 32;

    for (id = id ? id : ""; *id; id++)
        h = (h ^ (unsigned char)*id) * 0x100000001b3u;
    return h;
}

/* torchrun's own store has MASTER_PORT. */
static uint32_t first_port(void)
{
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");

    return agent && strcmp(agent, "True") == 0;
}

static int meet_listen(const struct meeting *m, struct ckpt_err *err)
{
    uint16_t got;

    for (uint32_t k = first_port(); k < MEET_PORTS; k++) {
        int fd = m->port + k <= UINT16_MAX ? ckpt_socket_listen((uint16_t)(m->port + k), &got) : -1;
        if (fd >= 0)
            return fd;
    }
    return ckpt_fail(err, CKPT_IO, "no free TCP port from MASTER_PORT=%" PRIu32 " on", m->port);
}

/* Rank 0 while ranks come. conn[r]: rank r waits for its answer there. */
struct reception {
    const struct meeting *m;
    int listener;
    int *conn;
    uint32_t count;
};

static bool register_rank(struct reception *c, int fd)
{
    const struct meeting *m = c->m;
    const uint64_t until = ckpt_min_u64(m->until, ckpt_now_ms() + ECHO_MS);
    char address[CKPT_TCP_ADDRESS];
    struct ckpt_greeting g;

    if (ckpt_socket_recv_all(fd, &g, sizeof g, until) < 0 || g.magic != CKPT_GREETING ||
        g.version != CKPT_TCP_VERSION || g.token[0] != m->token || g.kind != CKPT_TCP_MEETING ||
        g.from == 0 || g.from >= m->size || !ckpt_tcp_answer(fd, g, m->rank, until) ||
        ckpt_socket_recv_all(fd, address, sizeof address, until) < 0)
        return false;
    address[sizeof address - 1] = '\0';
    char *copy = strdup(address);
    if (!copy)
        return false;
    c->count += !m->address[g.from];
    free(m->address[g.from]);
    m->address[g.from] = copy;
    ckpt_socket_close(&c->conn[g.from]);
    c->conn[g.from] = fd;
    return true;
}

/* A rank is answered when the one above it is known, and need not stay until all have come. */
static int answer_ranks(struct reception *c, struct ckpt_err *err)
{
    const struct meeting *m = c->m;

    for (uint32_t r = 1; r < m->size; r++) {
        const char *above = m->address[ckpt_tree_parent(r)];
        char text[CKPT_TCP_ADDRESS] = "";
        if (c->conn[r] < 0 || !above)
            continue;
        (void)strncpy(text, above, sizeof text - 1);
        if (ckpt_socket_send_all(c->conn[r], text, sizeof text, m->until) < 0)
            return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
        ckpt_socket_close(&c->conn[r]);
    }
    return 0;
}

static int receive_ranks(struct reception *c, struct ckpt_err *err)
{
    while (c->count < c->m->size && ckpt_now_ms() < c->m->until) {
        struct pollfd p = {c->listener, POLLIN, 0};
        (void)poll(&p, 1, 200);
        int fd = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            continue;
        ckpt_socket_tune(fd);
        if (!register_rank(c, fd))
            ckpt_socket_close(&fd);
        else if (answer_ranks(c, err) < 0)
            return -1;
    }
    for (uint32_t r = 1; r < c->m->size; r++)
        if (!c->m->address[r])
            return ckpt_fail(err, CKPT_TIMEOUT,
                             "rank %" PRIu32 " did not come to MASTER_PORT in time", r);
    return 0;
}

static int meet_root(const struct meeting *m, const char *own, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) int *conn = malloc(m->size * sizeof *conn);
    struct reception c = {.m = m, .conn = conn, .count = 1};

    if (!conn || !(m->address[0] = strdup(own)))
        return ckpt_nomem(err);
    if ((c.listener = meet_listen(m, err)) < 0)
        return -1;
    for (uint32_t r = 0; r < m->size; r++)
        conn[r] = -1;
    int rc = receive_ranks(&c, err);
    ckpt_socket_close(&c.listener);
    for (uint32_t r = 1; r < m->size; r++)
        ckpt_socket_close(&conn[r]);
    return rc;
}

/* Find rank 0 among the ports where it may listen. */
static int meet_dial(const struct meeting *m, struct ckpt_err *err)
{
    const struct ckpt_greeting g = {
        CKPT_GREETING, CKPT_TCP_VERSION, {m->token, 0}, m->rank, CKPT_TCP_MEETING};

    for (;;) {
        for (uint32_t k = first_port(); k < MEET_PORTS; k++) {
            char port[8];
            const uint64_t until = ckpt_min_u64(m->until, ckpt_now_ms() + ECHO_MS);
            (void)snprintf(port, sizeof port, "%u", (unsigned)(m->port + k) & 0xffff);
            int fd = ckpt_socket_dial(m->host, port, until);
            if (fd >= 0 && ckpt_tcp_greet(fd, &g, 0, until))
                return fd;
            ckpt_socket_close(&fd);
            if (ckpt_now_ms() >= m->until)
                return ckpt_fail(err, CKPT_TIMEOUT,
                                 "rank 0 can't be found at MASTER_ADDR=%s MASTER_PORT=%" PRIu32,
                                 m->host, m->port);
        }
        (void)usleep(50 * 1000);
    }
}

/* The address from which rank 0 is reached is the one that the others reach. */
static int own_host(int fd, char *host, size_t cap)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof a;

    return getsockname(fd, (struct sockaddr *)&a, &len) < 0 ||
                   getnameinfo((struct sockaddr *)&a, len, host, (socklen_t)cap, NULL, 0,
                               NI_NUMERICHOST) != 0
               ? -1
               : 0;
}

static int meet_other(struct meeting *m, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    char host[200];
    int fd = meet_dial(m, err);

    if (fd < 0)
        return -1;
    if (own_host(fd, host, sizeof host) < 0 || ckpt_tcp_listen_at(host, 0, ret, err) < 0) {
        ckpt_socket_close(&fd);
        return ckpt_fail(err, CKPT_IO, "this machine's own address is not known");
    }
    int rc = ckpt_socket_send_all(fd, (*ret)->address, CKPT_TCP_ADDRESS, m->until) < 0 ||
                     ckpt_socket_recv_all(fd, m->above, CKPT_TCP_ADDRESS, m->until) < 0
                 ? ckpt_fail(err, CKPT_PEER, "rank 0 is gone, or not all ranks came in time")
                 : 0;
    ckpt_socket_close(&fd);
    m->above[CKPT_TCP_ADDRESS - 1] = '\0';
    return rc;
}

/* ---- all addresses to all ---- */

static int judge_addresses(void *ctx, const unsigned char *const *data, const size_t *len,
                           struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct meeting *m = ctx;

    (void)data, (void)len;
    for (uint32_t r = 0; r < m->size; r++)
        ckpt_str_append(answer, m->address[r], strlen(m->address[r]) + 1);
    return answer->failed ? ckpt_nomem(err) : 0;
}

static int take_addresses(struct ckpt_xport_tcp *x, const char *text, size_t len,
                          struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **list = calloc((size_t)x->x.size + 1, sizeof *list);
    size_t at = 0;

    if (!list)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < x->x.size; r++) {
        const size_t n = strnlen(text + at, len - at);
        if (at + n >= len)
            return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent broken addresses");
        list[r] = text + at;
        at += n + 1;
    }
    return ckpt_tcp_know(x, list, err);
}

static int tell_addresses(struct meeting *m, struct ckpt_xport_tcp *x, struct ckpt_comm *comm,
                          uint32_t timeout_ms, struct ckpt_err *err)
{
    struct ckpt_round round = {.judge = judge_addresses, .ctx = m};
    unsigned char *answer = NULL;
    size_t len = 0;
    int rc = ckpt_round_run(&round, comm, 0, NULL, 0, timeout_ms, &answer, &len, err);

    if (rc == 0)
        rc = take_addresses(x, (const char *)answer, len, err);
    free(answer);
    return rc;
}

static int join(struct meeting *m, struct ckpt_tcp *tcp, uint32_t timeout_ms,
                struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_xport_tcp *x = NULL;
    struct ckpt_comm *comm = NULL;

    if (ckpt_tcp_join(tcp, m->rank, m->size, m->above, timeout_ms, &x, err) < 0 ||
        ckpt_comm_wrap(&x->x, &comm, err) < 0)
        return -1;
    if (tell_addresses(m, x, comm, timeout_ms, err) < 0) {
        ckpt_comm_free(comm);
        return -1;
    }
    *ret = comm;
    return 0;
}

static int meet(struct meeting *m, struct ckpt_tcp **tcp, struct ckpt_err *err)
{
    if (m->rank > 0)
        return meet_other(m, tcp, err);
    if (!(m->address = calloc((size_t)m->size + 1, sizeof *m->address)))
        return ckpt_nomem(err);
    return ckpt_tcp_listen_at(m->host, 0, tcp, err) < 0 ? -1 : meet_root(m, (*tcp)->address, err);
}

int ckpt_comm_tcp_env(struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct meeting m = {.host = getenv("MASTER_ADDR")};
    struct ckpt_tcp *tcp = NULL;
    uint32_t timeout_ms;

    if (!m.host)
        return ckpt_fail(err, CKPT_USAGE, "MASTER_ADDR is not set");
    if (ckpt_env_number("WORLD_SIZE", 1 << 20, &m.size, err) < 0 ||
        ckpt_env_number("RANK", m.size - !!m.size, &m.rank, err) < 0 ||
        ckpt_env_number("MASTER_PORT", UINT16_MAX, &m.port, err) < 0)
        return -1;
    if (ckpt_comm_meet_ms(&timeout_ms, err) < 0)
        return -1;
    if (ckpt_socket_reserve(ckpt_tcp_files(m.rank, m.size), err) < 0)
        return -1;
    m.until = ckpt_now_ms() + timeout_ms;
    m.token = job_token(m.size, m.port);
    int rc = meet(&m, &tcp, err);
    if (rc < 0)
        ckpt_tcp_free(tcp);
    else
        rc = join(&m, tcp, timeout_ms, ret, err);
    for (uint32_t r = 0; m.address && r < m.size; r++)
        free(m.address[r]);
    free(m.address);
    return rc;
}
