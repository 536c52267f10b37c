/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous. Ranks know where rank 0 listens: at MASTER_PORT or one of the next ports, or at
 * an address that the caller has given. Each rank registers its own address there, and gets that of
 * its parent in the tree as soon as that has come. When the tree is connected, rank 0 broadcasts
 * all addresses along it. */
#include "comm/tcp/rendezvous.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/env.h"
#include "comm/tcp/tcp.h"

enum {
    /* Rank 0 listens at one of so many ports from MASTER_PORT on, and the others look for it there.
     * That is as many jobs as may begin on one machine at neighbouring ports; a search through
     * twice as many takes the ranks twice as long. */
    PORTS = 64,

    /* The longest sleep between two looks at the clock, ms; connections wake it earlier. */
    TURN_MS = 50,

    /* So much longer than the rendezvous, in ms, a rank waits for the addresses: a neighbour may
     * still wait for others, and when it gives up, it says why. */
    PARTING_MS = 2000,
};

struct rendezvous {
    uint32_t rank, size;
    struct ckpt_tcp_contact root; /* where rank 0 listens */
    const char *place;            /* that, in messages */
    uint32_t timeout_ms;
    ckpt_comm_log *log;
    void *log_ctx;
};

/* ---- who is missing ---- */

/* Append `before`, the ranks that have not come, and `after`; then `colon` and for which of them a
 * process came that has another secret, if there is one. */
static void list_missing(const struct ckpt_xport_tcp *m, struct ckpt_str *text, const char *before,
                         const char *after, const char *colon)
{
    uint32_t n = 0, nunproven = 0;

    ckpt_str_puts(text, before);
    for (uint32_t r = 1; r < m->x.size; r++)
        if (!m->address[r])
            ckpt_list_rank(text, n++, r);
    ckpt_str_puts(text, after);
    for (uint32_t r = 1; r < m->x.size; r++) {
        if (m->address[r] || !m->rendezvous.unproven[r])
            continue;
        if (nunproven == 0)
            ckpt_str_printf(text, "%sa process that came as ", colon);
        ckpt_list_rank(text, nunproven++, r);
    }
    if (nunproven)
        ckpt_str_puts(text, " has another CKPTFS_SECRET, or none");
}

static void say_missing(const struct rendezvous *v, const struct ckpt_xport_tcp *m,
                        uint64_t since_ms)
{
    ckpt_cleanup(ckpt_freep) char *after = ckpt_asprintf(
        " for %.0f s now, to come to %s", (double)(ckpt_now_ms() - since_ms) / 1000, v->place);
    struct ckpt_str text = {0};

    list_missing(m, &text, "waiting for ", after ? after : "", "; ");
    if (!text.failed)
        v->log(v->log_ctx, text.ptr);
    ckpt_str_release(&text);
}

static int fail_missing(const struct rendezvous *v, const struct ckpt_xport_tcp *m,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *after =
        ckpt_asprintf(" did not come to %s within %.1f s", v->place, v->timeout_ms / 1000.0);
    struct ckpt_str text = {0};

    list_missing(m, &text, "", after ? after : "", ": ");
    (void)ckpt_fail(err, CKPT_TIMEOUT, "%s", text.failed ? "not all ranks came" : text.ptr);
    ckpt_str_release(&text);
    return -1;
}

/* ---- coming together ---- */

static bool is_connected(const struct ckpt_xport_tcp *m, uint32_t rank)
{
    return m->peer[rank] && m->peer[rank]->ctl.state >= CKPT_TCP_OPEN;
}

static uint32_t missing_child(const struct ckpt_xport_tcp *m)
{
    for (uint32_t k = 0; k < ckpt_tree_children(m->x.rank, m->x.size); k++)
        if (!is_connected(m, ckpt_tree_child(m->x.rank, k)))
            return ckpt_tree_child(m->x.rank, k);
    return UINT32_MAX;
}

/* Is this rank connected to rank 0, directly or through its parent? */
static bool is_parent_connected(const struct ckpt_xport_tcp *m)
{
    return m->x.rank == 0 || is_connected(m, ckpt_tree_parent(m->x.rank));
}

/* The time is over: say who is missing. */
static int fail_late(const struct rendezvous *v, const struct ckpt_xport_tcp *m,
                     struct ckpt_err *err)
{
    const uint32_t parent = v->rank ? ckpt_tree_parent(v->rank) : 0;
    const struct ckpt_tcp_link *root = v->rank ? &m->peer[0]->rendezvous : NULL;
    struct ckpt_tcp_contact c;

    if (v->rank == 0 && m->rendezvous.count < v->size)
        return fail_missing(v, m, err);
    if (is_parent_connected(m))
        return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " did not connect in time",
                         missing_child(m));
    if (root->state == CKPT_TCP_OPEN)
        return ckpt_fail(err, CKPT_TIMEOUT,
                         "rank %" PRIu32 ", the parent of this rank, did not come to %s within "
                         "%.1f s",
                         parent, v->place, v->timeout_ms / 1000.0);
    if (root->state != CKPT_TCP_CLOSED)
        return ckpt_fail(err, CKPT_TIMEOUT, "rank 0 can't be found at %s%s", v->place,
                         root->refused ? " (a process there has another CKPTFS_SECRET, or none)"
                                       : "");
    return ckpt_tcp_parse(m->address[parent], &c, err) < 0
               ? -1
               : ckpt_tcp_fail_unreached(CKPT_TIMEOUT, parent, &c, err);
}

static int begin_rendezvous(const struct rendezvous *v, struct ckpt_xport_tcp *m, int listener)
{
    struct ckpt_tcp_rendezvous *t = &m->rendezvous;

    m->connect_ms = v->timeout_ms;
    t->root = v->root;
    t->listener = listener;
    if (v->rank > 0)
        return ckpt_tcp_peer(m, 0) && ckpt_tcp_peer(m, ckpt_tree_parent(v->rank)) ? 0 : -1;
    t->count = 1;
    t->unproven = calloc((size_t)v->size + 1, sizeof *t->unproven);
    t->waiting = malloc(((size_t)v->size + 1) * sizeof *t->waiting);
    m->address[0] = strdup(m->tcp->address);
    for (uint32_t r = 0; t->waiting && r < v->size; r++)
        t->waiting[r] = -1;
    return t->unproven && t->waiting && m->address[0] ? 0 : -1;
}

/* Wait until this rank is connected to its neighbours and, on rank 0, all ranks have come. */
static int come_together(const struct rendezvous *v, struct ckpt_xport_tcp *m, struct ckpt_err *err)
{
    struct ckpt_wait wait;

    ckpt_wait_begin(&wait);
    for (;;) {
        bool moved;
        if (m->x.ops->progress(&m->x, &moved, err) < 0)
            return -1;
        const bool all = v->rank > 0 || m->rendezvous.count >= v->size;
        if (all && is_parent_connected(m) && missing_child(m) == UINT32_MAX)
            return 0;
        if (ckpt_now_ms() >= wait.since_ms + v->timeout_ms)
            return fail_late(v, m, err);
        if (!all && v->log && ckpt_wait_is_long(&wait))
            say_missing(v, m, wait.since_ms);
        if (!moved)
            m->x.ops->wait(&m->x, TURN_MS);
    }
}

/* ---- broadcasting all addresses ---- */

static int reduce_addresses(void *ctx, const unsigned char *const *data, const size_t *len,
                            struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_xport_tcp *m = ctx;

    (void)data, (void)len;
    for (uint32_t r = 0; r < m->x.size; r++)
        ckpt_str_append(answer, m->address[r], strlen(m->address[r]) + 1);
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* COLLECTIVE. Takes tcp (NULL: this rank listens when it has found rank 0) and the descriptor
 * `listener`, also when it fails. If a rank does not come, those that are connected are told. */
static int connect_all(const struct rendezvous *v, struct ckpt_tcp *tcp, int listener,
                       struct ckpt_comm **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    struct ckpt_round round = {
        .timeout_ms = v->timeout_ms + PARTING_MS, .reduce = reduce_addresses, .hasty = true};
    struct ckpt_xport_tcp *m = NULL;
    size_t len = 0;

    if (ckpt_tcp_new(tcp, v->rank, v->size, &m, err) < 0) {
        ckpt_closep(&listener);
        return -1;
    }
    int rc = begin_rendezvous(v, m, listener) < 0 ? ckpt_nomem(err) : come_together(v, m, err);
    if (rc < 0 && !is_parent_connected(m)) {
        m->x.ops->free(&m->x);
        return -1;
    }
    ckpt_tcp_end_rendezvous(m);
    if (ckpt_comm_wrap(&m->x, &round.comm, err) < 0)
        return -1;
    round.ctx = m;
    ckpt_comm_set_log(round.comm, v->log, v->log_ctx);
    rc = ckpt_round_run(&round, rc, &answer, &len, err);
    if (rc == 0) {
        rc = ckpt_tcp_know(m, (const char *)answer, len, err);
        rc = ckpt_comm_agree(round.comm, rc, v->timeout_ms, err);
    }
    if (rc < 0)
        ckpt_comm_free(round.comm);
    else
        *ret = round.comm;
    return rc;
}

/* ---- two ways to rank 0 ---- */

/* Make room for the descriptors that a rank needs apart from those of data connections; of rank 0
 * during the rendezvous. */
static int reserve(const struct rendezvous *v, struct ckpt_err *err)
{
    return ckpt_socket_reserve((v->rank == 0 ? v->size : ckpt_tree_children(v->rank, v->size)) + 24,
                               err);
}

int ckpt_tcp_connect(struct ckpt_tcp *tcp, uint32_t rank, uint32_t size, const char *root,
                     uint32_t timeout_ms, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct rendezvous v = {.rank = rank, .size = size, .timeout_ms = timeout_ms};
    ckpt_cleanup(ckpt_freep) char *place = NULL;
    int rc = rank < size ? ckpt_tcp_parse(rank ? root : tcp->address, &v.root, err)
                         : ckpt_fail(err, CKPT_USAGE, "rank %" PRIu32 " of %" PRIu32, rank, size);

    if (rc == 0)
        v.place = place = ckpt_asprintf("%s port %" PRIu32, v.root.host, v.root.port);
    if (rc == 0 && place && reserve(&v, err) == 0)
        return connect_all(&v, tcp, -1, ret, err);
    ckpt_tcp_free(tcp);
    return rc == 0 && !place ? ckpt_nomem(err) : -1;
}

/* The token of a job's rendezvous: a hash of the launcher's name of the job, of its size and of
 * MASTER_PORT. It keeps jobs apart whose ports are neighbours, but can be guessed: only a secret
 * (secret.h) keeps out whoever has guessed it. */
static void job_token(const struct rendezvous *v, uint32_t port, uint64_t ret[2])
{
    const char *id = getenv("TORCHELASTIC_RUN_ID");
    const uint64_t seed = v->size ^ (uint64_t)port << 32;

    id = id ? id : "";
    const XXH128_hash_t h = XXH3_128bits_withSeed(id, strlen(id), seed);
    ret[0] = h.low64;
    ret[1] = h.high64;
}

/* Where rank 0 listens: at MASTER_PORT, unless torchrun's own store does, or at one of the next
 * ports. */
static int find_place(struct rendezvous *v, uint32_t port, struct ckpt_err *err)
{
    const char *host = getenv("MASTER_ADDR"), *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const uint32_t first = agent && strcmp(agent, "True") == 0;

    if (strlen(host) >= sizeof v->root.host)
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    (void)strcpy(v->root.host, host);
    v->root.port = port + first;
    v->root.nport = (uint32_t)ckpt_min_u64(PORTS, UINT16_MAX + 1 - port) - first;
    job_token(v, port, v->root.token);
    return v->root.nport > 0
               ? 0
               : ckpt_fail(err, CKPT_USAGE, "no TCP port follows MASTER_PORT=%" PRIu32, port);
}

static int open_listener(const struct rendezvous *v, struct ckpt_err *err)
{
    char host[CKPT_HOST_BYTES];
    uint16_t got;

    for (uint32_t k = 0; k < v->root.nport; k++) {
        const uint16_t port = (uint16_t)(v->root.port + k);
        int fd = ckpt_listen(v->root.host, (struct ckpt_ports){port, port}, host, &got, NULL);
        if (fd >= 0)
            return fd;
    }
    return ckpt_fail(err, CKPT_IO, "no free TCP port at %s or later", v->place);
}

int ckpt_comm_tcp_env(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct rendezvous v = {.log = log, .log_ctx = ctx};
    ckpt_cleanup(ckpt_freep) char *place = NULL;
    struct ckpt_tcp *tcp = NULL;
    uint32_t port;
    int listener = -1;
    bool secret;

    if (!getenv("MASTER_ADDR"))
        return ckpt_fail(err, CKPT_USAGE, "MASTER_ADDR is not set");
    if (ckpt_env_number("WORLD_SIZE", 1 << 20, &v.size, err) < 0 ||
        ckpt_env_number("RANK", v.size - !!v.size, &v.rank, err) < 0 ||
        ckpt_env_number("MASTER_PORT", UINT16_MAX, &port, err) < 0 ||
        ckpt_comm_rendezvous_ms(&v.timeout_ms, err) < 0 || ckpt_secret_is_set(&secret, err) < 0 ||
        find_place(&v, port, err) < 0 || reserve(&v, err) < 0)
        return -1;
    place = v.rank ? ckpt_asprintf("MASTER_ADDR=%s MASTER_PORT=%" PRIu32, v.root.host, port)
                   : ckpt_asprintf("MASTER_PORT=%" PRIu32, port);
    if (!(v.place = place))
        return ckpt_nomem(err);
    if (v.rank == 0 &&
        (ckpt_tcp_listen(v.root.host, &tcp, err) < 0 || (listener = open_listener(&v, err)) < 0)) {
        ckpt_tcp_free(tcp);
        return -1;
    }
    return connect_all(&v, tcp, listener, ret, err);
}
