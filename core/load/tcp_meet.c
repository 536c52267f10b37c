/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that a launcher started: rank 0 listens near MASTER_PORT, hears all addresses, and tells
 * them to all. */
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

enum { MEET_PORTS = 64, MEET_KIND = 2, ECHO_MS = 2000 };

struct meeting {
    uint32_t rank, size;
    const char *host;
    uint32_t port;
    uint64_t token, until;
    char (*address)[CKPT_TCP_ADDRESS];
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

/* One rank's registration: its connection stays open for the answer. */
static void meet_accept(const struct meeting *m, int listener, int *conn, uint32_t *count)
{
    struct pollfd p = {listener, POLLIN, 0};
    struct ckpt_greeting g;

    (void)poll(&p, 1, 200);
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    ckpt_socket_tune(fd);
    const uint64_t until = ckpt_min_u64(m->until, ckpt_now_ms() + ECHO_MS);
    if (ckpt_socket_recv_all(fd, &g, sizeof g, until) < 0 || g.magic != CKPT_GREETING ||
        g.version != CKPT_TCP_VERSION || g.token != m->token || g.kind != MEET_KIND ||
        g.from == 0 || g.from >= m->size || !ckpt_tcp_answer(fd, g, m->rank, until) ||
        ckpt_socket_recv_all(fd, m->address[g.from], CKPT_TCP_ADDRESS, until) < 0) {
        ckpt_socket_close(&fd);
        return;
    }
    m->address[g.from][CKPT_TCP_ADDRESS - 1] = '\0';
    *count += conn[g.from] < 0;
    ckpt_socket_close(&conn[g.from]);
    conn[g.from] = fd;
}

static int meet_root(const struct meeting *m, const char *own, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) int *conn = malloc(m->size * sizeof *conn);
    uint32_t count = 1;
    int rc = 0, listener = meet_listen(m, err);

    if (listener < 0)
        return -1;
    for (uint32_t r = 0; conn && r < m->size; r++)
        conn[r] = -1;
    memcpy(m->address[0], own, CKPT_TCP_ADDRESS);
    while (conn && count < m->size && ckpt_now_ms() < m->until)
        meet_accept(m, listener, conn, &count);
    ckpt_socket_close(&listener);
    for (uint32_t r = 1; conn && r < m->size; r++) {
        if (conn[r] < 0 && rc == 0)
            rc = ckpt_fail(err, CKPT_TIMEOUT,
                           "rank %" PRIu32 " did not come to MASTER_PORT in time", r);
        if (rc == 0 && ckpt_socket_send_all(conn[r], m->address, (size_t)m->size * CKPT_TCP_ADDRESS,
                                            m->until) < 0)
            rc = ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
    }
    for (uint32_t r = 1; conn && r < m->size; r++)
        ckpt_socket_close(&conn[r]);
    return conn ? rc : ckpt_nomem(err);
}

/* Find rank 0 among the ports where it may listen. */
static int meet_dial(const struct meeting *m, struct ckpt_err *err)
{
    const struct ckpt_greeting g = {CKPT_GREETING, CKPT_TCP_VERSION, m->token, m->rank, MEET_KIND};

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

static int meet_other(const struct meeting *m, struct ckpt_tcp **ret, struct ckpt_err *err)
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
                     ckpt_socket_recv_all(fd, m->address, (size_t)m->size * CKPT_TCP_ADDRESS,
                                          m->until) < 0
                 ? ckpt_fail(err, CKPT_PEER, "rank 0 is gone, or not all ranks came in time")
                 : 0;
    ckpt_socket_close(&fd);
    for (uint32_t r = 0; r < m->size; r++)
        m->address[r][CKPT_TCP_ADDRESS - 1] = '\0';
    return rc;
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
    if (ckpt_socket_reserve(ckpt_tcp_files(m.size), err) < 0)
        return -1;
    m.until = ckpt_now_ms() + timeout_ms;
    m.token = job_token(m.size, m.port);
    ckpt_cleanup(ckpt_freep) char(*address)[CKPT_TCP_ADDRESS] = calloc(m.size + 1, sizeof *address);
    ckpt_cleanup(ckpt_freep) const char **list = calloc(m.size + 1, sizeof *list);
    if (!address || !list)
        return ckpt_nomem(err);
    m.address = address;
    int rc = m.rank == 0 ? ckpt_tcp_listen_at(m.host, 0, &tcp, err) : meet_other(&m, &tcp, err);
    if (rc == 0 && m.rank == 0)
        rc = meet_root(&m, tcp->address, err);
    if (rc < 0) {
        ckpt_tcp_free(tcp);
        return -1;
    }
    for (uint32_t r = 0; r < m.size; r++)
        list[r] = address[r];
    return ckpt_tcp_connect(tcp, m.rank, m.size, list, timeout_ms, ret, err);
}
