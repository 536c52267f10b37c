/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous of ranks that a launcher started. Rank 0 listens at MASTER_PORT or one of the next
 * ports. Each rank registers its address there, and gets that of its parent in the tree. When the
 * tree is connected, rank 0 broadcasts all addresses along it. */
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "comm/tcp/listen.h"
#include "comm/tcp/tcp.h"

enum {
    PORTS = 64,
    HANDSHAKE_MS = 2000,
    CALLERS = 4096,
    PARTING_MS = 500, /* for telling the ranks that have come that others have not */
};

struct rendezvous {
    uint32_t rank, size;
    const char *host;
    uint32_t port;
    uint64_t token[2], until;
    uint32_t timeout_ms;
    ckpt_comm_log *log;
    void *log_ctx;
    char above[CKPT_TCP_ADDRESS]; /* the address of the parent */
    char **address;               /* rank 0: of all ranks */
};

/* The token of a job's rendezvous: a hash of the launcher's name of the job, of its size and of
 * MASTER_PORT. It keeps jobs apart whose ports are neighbours, but can be guessed: only a secret
 * (secret.h) keeps strangers out. */
static void job_token(struct rendezvous *v)
{
    const char *id = getenv("TORCHELASTIC_RUN_ID");
    const uint64_t seed = v->size ^ (uint64_t)v->port << 32;

    id = id ? id : "";
    const XXH128_hash_t h = XXH3_128bits_withSeed(id, strlen(id), seed);
    v->token[0] = h.low64;
    v->token[1] = h.high64;
}

/* Does torchrun's own store listen at MASTER_PORT? */
static uint32_t first_port(void)
{
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");

    return agent && strcmp(agent, "True") == 0;
}

/* ---- rank 0 ---- */

/* A connection that rank 0 has accepted. */
struct pending {
    struct ckpt_handshake shake;
    bool asked; /* it says that it is a rank of this job, and was asked to prove that */
    bool known; /* the handshake is done, and the address is being received */
    char address[CKPT_TCP_ADDRESS];
    size_t at; /* bytes of it received so far */
};

/* The state of rank 0 during the rendezvous. */
struct registry {
    const struct rendezvous *v;
    int listener;
    struct pending **waiting; /* per rank: registered, but not answered yet; or NULL */
    bool *stranger; /* per rank: a caller said that it is this rank, and did not prove it */
    uint32_t count;
    CKPT_VEC(struct pending *) pending; /* not registered yet */
    CKPT_VEC(struct pollfd) poll;
};

static void pending_free(struct pending *g)
{
    if (!g)
        return;
    ckpt_socket_close(&g->shake.fd);
    free(g);
}

static int listen_for_ranks(const struct rendezvous *v, struct ckpt_err *err)
{
    char host[CKPT_HOST_BYTES];
    uint16_t got;

    for (uint32_t k = first_port(); k < PORTS && v->port + k <= UINT16_MAX; k++) {
        const struct ckpt_ports one = {(uint16_t)(v->port + k), (uint16_t)(v->port + k)};
        int fd = ckpt_listen(v->host, one, host, &got, NULL);
        if (fd >= 0)
            return fd;
    }
    return ckpt_fail(err, CKPT_IO, "no free TCP port from MASTER_PORT=%" PRIu32 " on", v->port);
}

static void accept_pending(struct registry *c)
{
    while (c->pending.len < CALLERS) {
        int fd = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        struct pending *g = fd < 0 ? NULL : calloc(1, sizeof *g);
        if (!g || ckpt_vec_push(&c->pending, g) < 0) {
            ckpt_socket_close(&fd);
            free(g);
            return;
        }
        ckpt_socket_tune(fd);
        ckpt_handshake_accept(&g->shake, fd, ckpt_now_ms() + HANDSHAKE_MS);
    }
}

/* A rank registers once: a second caller with its number is no rank of this job. */
static bool may_register(const struct registry *c, const struct ckpt_greeting *g)
{
    return memcmp(g->token, c->v->token, sizeof g->token) == 0 && g->kind == CKPT_TCP_RENDEZVOUS &&
           g->from > 0 && g->from < c->v->size && !c->v->address[g->from];
}

/* May the handshake go on? */
static bool progress_handshake(struct registry *c, struct pending *g)
{
    bool moved = false;
    enum ckpt_handshake_result r = ckpt_handshake_step(&g->shake, &moved);

    if (r == CKPT_HANDSHAKE_ASKED) {
        g->asked = may_register(c, &g->shake.its);
        r = g->asked ? ckpt_handshake_answer(&g->shake, 0, 0) : CKPT_HANDSHAKE_FAILED;
    }
    if (r == CKPT_HANDSHAKE_FAILED && g->asked)
        c->stranger[g->shake.its.from] = true;
    g->known = r == CKPT_HANDSHAKE_DONE;
    return r != CKPT_HANDSHAKE_FAILED;
}

/* 1: wait for more of the address; 0: the rank is registered; -1: close the connection. */
static int receive_address(struct registry *c, struct pending *g)
{
    const uint32_t rank = g->shake.its.from;
    ssize_t n = recv(g->shake.fd, g->address + g->at, sizeof g->address - g->at, 0);

    if (n < 0 && ckpt_socket_would_block())
        return ckpt_now_ms() > g->shake.until ? -1 : 1;
    if (n <= 0)
        return -1;
    g->at += (size_t)n;
    if (g->at < sizeof g->address)
        return 1;
    g->address[sizeof g->address - 1] = '\0';
    if (c->v->address[rank] || !(c->v->address[rank] = strdup(g->address)))
        return -1;
    c->count++;
    c->waiting[rank] = g;
    return 0;
}

static void progress_pending(struct registry *c)
{
    for (size_t i = c->pending.len; i-- > 0;) {
        struct pending *g = c->pending.ptr[i];
        const int received = g->known ? receive_address(c, g) : progress_handshake(c, g) ? 1 : -1;
        if (received > 0)
            continue;
        if (received < 0)
            pending_free(g);
        c->pending.ptr[i] = c->pending.ptr[--c->pending.len];
    }
}

/* Answer every rank whose parent is registered, without waiting for the other ranks. */
static int answer_ranks(struct registry *c, struct ckpt_err *err)
{
    for (uint32_t r = 1; r < c->v->size; r++) {
        const char *above = c->v->address[ckpt_tree_parent(r)];
        struct pending *g = c->waiting[r];
        char text[CKPT_TCP_ADDRESS] = "";
        if (!g || !above)
            continue;
        memcpy(text, above, strnlen(above, sizeof text - 1));
        if (ckpt_socket_send_all(g->shake.fd, text, sizeof text, c->v->until) < 0)
            return ckpt_fail(err, CKPT_PEER, "rank %" PRIu32 " is gone", r);
        pending_free(g);
        c->waiting[r] = NULL;
    }
    return 0;
}

static void wait_pending(struct registry *c)
{
    const struct pollfd listener = {c->listener, POLLIN, 0};

    c->poll.len = 0;
    if (ckpt_vec_push(&c->poll, listener) < 0)
        return;
    for (size_t i = 0; i < c->pending.len; i++) {
        const struct pollfd p = {c->pending.ptr[i]->shake.fd, POLLIN, 0};
        (void)ckpt_vec_push(&c->poll, p);
    }
    (void)poll(c->poll.ptr, c->poll.len, 200);
}

/* Append the ranks that have not come; and to `strangers`, which is empty, of which of them a
 * process there has another secret, after `before`: nothing if of none. */
static void list_missing(const struct registry *c, struct ckpt_str *missing, const char *before,
                         struct ckpt_str *strangers)
{
    uint32_t n = 0, nstranger = 0;

    for (uint32_t r = 1; r < c->v->size; r++) {
        if (c->v->address[r])
            continue;
        ckpt_list_rank(missing, n++, r);
        if (!c->stranger[r])
            continue;
        if (nstranger == 0)
            ckpt_str_printf(strangers, "%sa process that came as ", before);
        ckpt_list_rank(strangers, nstranger++, r);
    }
    if (nstranger)
        ckpt_str_puts(strangers, " has another CKPTFS_SECRET, or none");
}

static void say_missing(const struct registry *c, uint64_t since_ms)
{
    struct ckpt_str text = {0}, strangers = {0};

    ckpt_str_puts(&text, "waiting for ");
    list_missing(c, &text, "; ", &strangers);
    ckpt_str_printf(&text, " for %.0f s now, to come to MASTER_PORT=%" PRIu32 "%s",
                    (double)(ckpt_now_ms() - since_ms) / 1000, c->v->port,
                    ckpt_str_get(&strangers));
    if (!text.failed)
        c->v->log(c->v->log_ctx, text.ptr);
    ckpt_str_release(&text);
    ckpt_str_release(&strangers);
}

static int fail_missing(const struct registry *c, struct ckpt_err *err)
{
    struct ckpt_str missing = {0}, strangers = {0};

    list_missing(c, &missing, ": ", &strangers);
    (void)ckpt_fail(err, CKPT_TIMEOUT, "%s did not come to MASTER_PORT=%" PRIu32 " within %.1f s%s",
                    missing.ptr ? missing.ptr : "a rank", c->v->port, c->v->timeout_ms / 1000.0,
                    ckpt_str_get(&strangers));
    ckpt_str_release(&missing);
    ckpt_str_release(&strangers);
    return -1;
}

static int receive_ranks(struct registry *c, struct ckpt_err *err)
{
    struct ckpt_wait wait;

    ckpt_wait_begin(&wait);
    while (c->count < c->v->size && ckpt_now_ms() < c->v->until) {
        const uint32_t before = c->count;
        wait_pending(c);
        accept_pending(c);
        progress_pending(c);
        if (c->count > before && answer_ranks(c, err) < 0)
            return -1;
        if (c->v->log && c->count < c->v->size && ckpt_wait_is_long(&wait))
            say_missing(c, wait.since_ms);
    }
    return c->count < c->v->size ? fail_missing(c, err) : 0;
}

static void registry_release(struct registry *c)
{
    ckpt_socket_close(&c->listener);
    for (uint32_t r = 1; c->waiting && r < c->v->size; r++)
        pending_free(c->waiting[r]);
    for (size_t i = 0; i < c->pending.len; i++)
        pending_free(c->pending.ptr[i]);
    ckpt_vec_release(&c->pending);
    ckpt_vec_release(&c->poll);
    free(c->waiting);
    free(c->stranger);
}

static int meet_root(const struct rendezvous *v, const char *own, struct ckpt_err *err)
{
    struct registry c = {.v = v, .listener = -1, .count = 1};
    int rc = -1;

    c.waiting = calloc((size_t)v->size + 1, sizeof *c.waiting);
    c.stranger = calloc((size_t)v->size + 1, sizeof *c.stranger);
    if (!c.waiting || !c.stranger || !(v->address[0] = strdup(own)))
        (void)ckpt_nomem(err);
    else if ((c.listener = listen_for_ranks(v, err)) >= 0)
        rc = receive_ranks(&c, err);
    registry_release(&c);
    return rc;
}

/* ---- the other ranks ---- */

/* Try one port. True: rank 0 has answered. */
static bool dial_port(const struct rendezvous *v, uint32_t port, struct ckpt_handshake *h,
                      bool *refused)
{
    const struct ckpt_greeting g = {.magic = CKPT_GREETING,
                                    .version = CKPT_TCP_VERSION,
                                    .token = {v->token[0], v->token[1]},
                                    .from = v->rank,
                                    .kind = CKPT_TCP_RENDEZVOUS};
    const uint64_t until = ckpt_min_u64(v->until, ckpt_now_ms() + HANDSHAKE_MS);
    char text[8];
    int fd;

    (void)snprintf(text, sizeof text, "%u", (unsigned)port & 0xffff);
    if ((fd = ckpt_socket_dial(v->host, text, until)) < 0)
        return false;
    ckpt_handshake_dial(h, fd, &g, 0, until);
    const bool good = ckpt_handshake_run(h, &fd);
    *refused |= h->refused;
    return good;
}

/* Find rank 0 among the ports where it may listen. */
static int find_root(const struct rendezvous *v, struct ckpt_handshake *h, struct ckpt_err *err)
{
    bool refused = false;

    for (;;) {
        for (uint32_t k = first_port(); k < PORTS; k++) {
            if (dial_port(v, v->port + k, h, &refused))
                return 0;
            if (ckpt_now_ms() >= v->until)
                return ckpt_fail(
                    err, CKPT_TIMEOUT,
                    "rank 0 can't be found at MASTER_ADDR=%s MASTER_PORT=%" PRIu32 "%s", v->host,
                    v->port,
                    refused ? " (a process there has another CKPTFS_SECRET, or none)" : "");
        }
        (void)usleep(50 * 1000);
    }
}

/* This rank's address: the local end of the connection to rank 0, because other machines can reach
 * it. */
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

/* Register at rank 0, and receive the parent's address. */
static int swap_addresses(struct rendezvous *v, int fd, const struct ckpt_tcp *own,
                          struct ckpt_err *err)
{
    if (ckpt_socket_send_all(fd, own->address, sizeof own->address, v->until) < 0 ||
        ckpt_socket_recv_all(fd, v->above, sizeof v->above, v->until) < 0)
        return ckpt_fail(err, CKPT_PEER, "rank 0 is gone, or not all ranks came in time");
    v->above[sizeof v->above - 1] = '\0';
    return 0;
}

static int meet_other(struct rendezvous *v, struct ckpt_tcp **ret, struct ckpt_err *err)
{
    struct ckpt_handshake h;
    char host[CKPT_HOST_BYTES];
    int rc;

    if (find_root(v, &h, err) < 0)
        return -1;
    rc = own_host(h.fd, host, sizeof host) < 0
             ? ckpt_fail(err, CKPT_IO, "this machine's own address is not known")
             : ckpt_tcp_listen(host, ret, err);
    if (rc == 0)
        rc = swap_addresses(v, h.fd, *ret, err);
    ckpt_socket_close(&h.fd);
    return rc;
}

/* ---- broadcasting all addresses ---- */

static int reduce_addresses(void *ctx, const unsigned char *const *data, const size_t *len,
                            struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct rendezvous *v = ctx;

    (void)data, (void)len;
    for (uint32_t r = 0; r < v->size; r++)
        ckpt_str_append(answer, v->address[r], strlen(v->address[r]) + 1);
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

/* Connect the tree. met: the result of the rendezvous. If that has failed on rank 0, or a child
 * does not connect, the ranks that are connected are told. */
static int join(struct rendezvous *v, struct ckpt_tcp *tcp, int met, struct ckpt_comm **ret,
                struct ckpt_err *err)
{
    const uint32_t limit_ms = met < 0 ? PARTING_MS : v->timeout_ms;
    struct ckpt_round round = {
        .timeout_ms = v->timeout_ms, .reduce = reduce_addresses, .ctx = v, .hasty = true};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    struct ckpt_xport_tcp *x = NULL;
    size_t len = 0;
    int rc = ckpt_tcp_join(tcp, v->rank, v->size, v->above, limit_ms, &x, err);

    if (!x || ckpt_comm_wrap(&x->x, &round.comm, err) < 0)
        return -1;
    ckpt_comm_set_log(round.comm, v->log, v->log_ctx);
    rc = ckpt_round_run(&round, met < 0 ? met : rc, &answer, &len, err);
    if (rc == 0) {
        rc = take_addresses(x, (const char *)answer, len, err);
        rc = ckpt_tcp_finish(x, round.comm, rc, v->timeout_ms, err);
    }
    if (rc < 0)
        ckpt_comm_free(round.comm);
    else
        *ret = round.comm;
    return rc;
}

static int meet(struct rendezvous *v, struct ckpt_tcp **tcp, struct ckpt_err *err)
{
    if (v->rank > 0)
        return meet_other(v, tcp, err);
    if (!(v->address = calloc((size_t)v->size + 1, sizeof *v->address)))
        return ckpt_nomem(err);
    return ckpt_tcp_listen(v->host, tcp, err) < 0 ? -1 : meet_root(v, (*tcp)->address, err);
}

int ckpt_comm_tcp_env(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct rendezvous v = {.host = getenv("MASTER_ADDR"), .log = log, .log_ctx = ctx};
    struct ckpt_tcp *tcp = NULL;
    bool secret;

    if (!v.host)
        return ckpt_fail(err, CKPT_USAGE, "MASTER_ADDR is not set");
    if (ckpt_env_number("WORLD_SIZE", 1 << 20, &v.size, err) < 0 ||
        ckpt_env_number("RANK", v.size - !!v.size, &v.rank, err) < 0 ||
        ckpt_env_number("MASTER_PORT", UINT16_MAX, &v.port, err) < 0)
        return -1;
    if (ckpt_comm_rendezvous_ms(&v.timeout_ms, err) < 0 || ckpt_secret_is_set(&secret, err) < 0)
        return -1;
    if (ckpt_socket_reserve(ckpt_tcp_files(v.rank, v.size), err) < 0)
        return -1;
    v.until = ckpt_now_ms() + v.timeout_ms;
    job_token(&v);
    int rc = meet(&v, &tcp, err);
    if (rc < 0 && (v.rank > 0 || !tcp))
        ckpt_tcp_free(tcp);
    else
        rc = join(&v, tcp, rc, ret, err);
    for (uint32_t r = 0; v.address && r < v.size; r++)
        free(v.address[r]);
    free(v.address);
    return rc;
}
