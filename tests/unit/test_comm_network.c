/* SPDX-License-Identifier: Apache-2.0 */
/* TCP among strangers: those who say nothing, those who say something wrong, those who say that
 * they are a rank, and those who change what ranks say to each other. */
#include "test.h"

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include <ckptfs/load.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "comm/tcp/handshake.h"
#include "comm/tcp/socket.h"
#include "dial.h"

enum { WAIT_MS = 20000, FAIL_MS = 1000, STRANGERS = 60, RANKS = 3 };

static const char SECRET[] = "a secret of a test, long enough";

/* ---- where a rank listens ---- */

static struct ckpt_tcp *listen_ok(const char *host)
{
    struct ckpt_tcp *tcp = NULL;
    struct ckpt_err err = {0};

    if (ckpt_tcp_listen(host, &tcp, &err) < 0)
        fail_msg("%s", err.text);
    return tcp;
}

static unsigned port_of(const struct ckpt_tcp *tcp)
{
    return (unsigned)atoi(strchr(ckpt_tcp_address(tcp), ' '));
}

static bool reached(const char *host, unsigned port)
{
    int fd = dial_now(host, port);
    const bool good = fd >= 0;
    ckpt_closep(&fd);
    return good;
}

TEST(listen, only_the_given_host_is_listened_on)
{
    struct ckpt_tcp *tcp = listen_ok("127.0.0.2");

    CHECK(reached("127.0.0.2", port_of(tcp)));
    CHECK(!reached("127.0.0.1", port_of(tcp)));
    ckpt_tcp_free(tcp);
}

TEST(listen, an_interface_can_be_named)
{
    struct ckpt_err err = {0};
    struct ckpt_tcp *tcp;

    (void)setenv("CKPTFS_INTERFACE", "lo", 1);
    tcp = listen_ok("192.0.2.1");
    CHECK(strncmp(ckpt_tcp_address(tcp), "127.0.0.1 ", 10) == 0);
    CHECK(!reached("127.0.0.2", port_of(tcp)));
    ckpt_tcp_free(tcp);
    (void)setenv("CKPTFS_INTERFACE", "none0", 1);
    CHECK_FAILS(ckpt_tcp_listen(NULL, &tcp, &err), CKPT_MISSING, "CKPTFS_INTERFACE=none0");
    (void)unsetenv("CKPTFS_INTERFACE");
}

TEST(listen, ports_come_from_the_range)
{
    static const char *const bad[] = {"20000", "20000-", "-5", "2-1", "0-5", "1-65536", "a-b"};
    struct ckpt_tcp *tcp[3], *one_more;
    struct ckpt_err err = {0};

    (void)setenv("CKPTFS_PORT_RANGE", "29300-29302", 1);
    for (int i = 0; i < 3; i++) {
        tcp[i] = listen_ok("127.0.0.3");
        CHECK(port_of(tcp[i]) >= 29300 && port_of(tcp[i]) <= 29302);
    }
    CHECK_FAILS(ckpt_tcp_listen("127.0.0.3", &one_more, &err), CKPT_IO, "29300 to 29302");
    for (int i = 0; i < 3; i++)
        ckpt_tcp_free(tcp[i]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        (void)setenv("CKPTFS_PORT_RANGE", bad[i], 1);
        CHECK_FAILS(ckpt_tcp_listen("127.0.0.3", &one_more, &err), CKPT_USAGE, bad[i]);
    }
    (void)unsetenv("CKPTFS_PORT_RANGE");
}

/* ---- strangers at the rendezvous ---- */

static uint16_t master_port(void)
{
    char host[CKPT_HOST_BYTES];
    struct ckpt_err err = {0};
    uint16_t port = 0;
    int fd = ckpt_listen("127.0.0.1", (struct ckpt_ports){0, 0}, host, &port, &err);

    ckpt_closep(&fd);
    return port;
}

/* A rank in a process of its own: its exit status is 0 if it finds the others. */
static pid_t start_rank(uint32_t rank, uint16_t port)
{
    pid_t pid = fork();
    struct ckpt_comm *comm = NULL;
    struct ckpt_err err = {0};
    char text[16];

    if (pid != 0)
        return pid;
    (void)snprintf(text, sizeof text, "%u", rank);
    (void)setenv("RANK", text, 1);
    (void)snprintf(text, sizeof text, "%d", RANKS);
    (void)setenv("WORLD_SIZE", text, 1);
    (void)snprintf(text, sizeof text, "%u", port);
    (void)setenv("MASTER_PORT", text, 1);
    (void)setenv("MASTER_ADDR", "127.0.0.1", 1);
    (void)setenv("CKPTFS_MEET_TIMEOUT", "40", 1);
    (void)setenv("CKPTFS_TRANSPORT", "tcp", 1);
    int rc = ckpt_comm_from_env(&comm, &err);
    if (rc == 0)
        rc = ckpt_comm_agree(comm, 0, WAIT_MS, &err);
    if (rc < 0)
        (void)fprintf(stderr, "rank %u: %s\n", rank, err.text);
    ckpt_comm_free(comm);
    _exit(rc < 0);
}

static bool ended_well(pid_t pid)
{
    int status = 1;

    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static int dial_soon(uint16_t port)
{
    const uint64_t until = ckpt_now_ms() + WAIT_MS;
    int fd;

    while ((fd = dial_now("127.0.0.1", port)) < 0 && ckpt_now_ms() < until)
        (void)usleep(10000);
    return fd;
}

TEST(rendezvous, strangers_delay_nobody)
{
    const uint16_t port = master_port();
    int stranger[STRANGERS];
    pid_t pid[RANKS];

    pid[0] = start_rank(0, port);
    for (int i = 0; i < STRANGERS; i++) {
        stranger[i] = dial_soon(port);
        CHECK(stranger[i] >= 0);
        if (i % 3 == 1)
            (void)!write(stranger[i], "GET / HTTP/1.0\r\n\r\n", 18);
        if (i % 3 == 2) /* a part of what a rank says */
            (void)!write(stranger[i], "ckpt", 4);
    }
    for (uint32_t r = 1; r < RANKS; r++)
        pid[r] = start_rank(r, port);
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK(ended_well(pid[r]));
    for (int i = 0; i < STRANGERS; i++)
        ckpt_closep(&stranger[i]);
}

/* What a rank of the job would say: the token can be guessed. */
static struct ckpt_greeting guessed(uint32_t rank, uint16_t port)
{
    const XXH128_hash_t h = XXH3_128bits_withSeed("", 0, RANKS ^ (uint64_t)port << 32);

    return (struct ckpt_greeting){.magic = CKPT_GREETING,
                                  .version = CKPT_TCP_VERSION,
                                  .token = {h.low64, h.high64},
                                  .from = rank,
                                  .kind = CKPT_TCP_RENDEZVOUS};
}

/* Does rank 0 answer one who says that it is this rank? */
static bool is_answered(uint32_t rank, uint16_t port)
{
    const struct ckpt_greeting g = guessed(rank, port);
    struct ckpt_handshake h;
    int fd = dial_soon(port);

    enum ckpt_handshake_result r;
    bool moved;

    ckpt_handshake_dial(&h, fd, &g, 0, ckpt_now_ms() + WAIT_MS);
    while ((r = ckpt_handshake_step(&h, &moved)) == CKPT_HANDSHAKE_WAITING)
        (void)usleep(1000);
    ckpt_closep(&h.fd);
    return r == CKPT_HANDSHAKE_ASKED;
}

TEST(rendezvous, a_rank_is_not_replaced)
{
    const uint16_t port = master_port();
    pid_t pid[RANKS];

    (void)unsetenv("TORCHELASTIC_RUN_ID");
    pid[0] = start_rank(0, port);
    CHECK(is_answered(1, port)); /* which does not register, as it does not confirm */
    pid[1] = start_rank(1, port);
    while (is_answered(1, port)) /* until the rank has registered */
        (void)usleep(20000);
    pid[2] = start_rank(2, port);
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK(ended_well(pid[r]));
}

static void on_alarm(int sig) { (void)sig; }

/* A timer of the process, as Python programs and profilers have them, interrupts poll. */
TEST(rendezvous, signals_do_not_end_a_wait)
{
    struct sigaction alarm = {.sa_handler = on_alarm}, before;
    const struct itimerval often = {{0, 10000}, {0, 10000}}, never = {0};
    struct ckpt_tcp *tcp = listen_ok("127.0.0.1");
    struct ckpt_err err = {0};
    struct ckpt_comm *comm = NULL;
    int status;

    pid_t pid = fork();
    if (pid == 0) {
        struct ckpt_tcp *own = listen_ok("127.0.0.1");
        (void)usleep(300 * 1000);
        status = ckpt_tcp_connect(own, 1, 2, ckpt_tcp_address(tcp), WAIT_MS, &comm, &err);
        ckpt_comm_free(comm);
        _exit(status < 0);
    }
    CHECK(sigaction(SIGALRM, &alarm, &before) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    const int rc = ckpt_tcp_connect(tcp, 0, 2, NULL, WAIT_MS, &comm, &err);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && sigaction(SIGALRM, &before, NULL) == 0);
    if (rc < 0)
        fail_msg("%s", err.text);
    ckpt_comm_free(comm);
    CHECK(ended_well(pid));
}

/* ---- the secret ---- */

static bool have_secrets(void)
{
    struct ckpt_err err = {0};
    bool wanted;

    (void)setenv("CKPTFS_SECRET", SECRET, 1);
    const bool have = ckpt_secret_is_set(&wanted, &err) == 0;
    (void)unsetenv("CKPTFS_SECRET");
    return have;
}

TEST(secret, is_an_error_where_it_cannot_be_used)
{
    struct ckpt_err err = {0};
    struct ckpt_tcp *tcp;

    if (have_secrets()) {
        (void)setenv("CKPTFS_SECRET", "too short", 1);
        CHECK_FAILS(ckpt_tcp_listen("127.0.0.1", &tcp, &err), CKPT_USAGE, "at least 16");
    } else {
        (void)setenv("CKPTFS_SECRET", SECRET, 1);
        CHECK_FAILS(ckpt_tcp_listen("127.0.0.1", &tcp, &err), CKPT_UNSUPPORTED, "libsodium");
    }
    (void)unsetenv("CKPTFS_SECRET");
}

TEST(secret, those_without_it_are_not_answered)
{
    const uint16_t port = master_port();
    pid_t pid[RANKS];

    if (!have_secrets())
        return;
    (void)setenv("CKPTFS_SECRET", SECRET, 1);
    for (uint32_t r = 0; r < 2; r++)
        pid[r] = start_rank(r, port);
    (void)unsetenv("CKPTFS_SECRET");
    CHECK(!is_answered(2, port));
    (void)setenv("CKPTFS_SECRET", "another secret of the same job", 1);
    CHECK(!is_answered(2, port));
    (void)setenv("CKPTFS_SECRET", SECRET, 1);
    pid[2] = start_rank(2, port);
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK(ended_well(pid[r]));
    (void)unsetenv("CKPTFS_SECRET");
}

/* ---- somebody in between ---- */

/* Forwards connections to a port, and flips a bit of one. */
struct between {
    int listener;
    uint16_t port, to;
    int connection;      /* whose bytes are changed: the number of it; -1: none */
    size_t byte;         /* after which of its bytes from the dialling side */
    atomic_bool changed; /* it was */
    atomic_bool stop;
    pthread_t thread;
};

struct pipe {
    int fd[2];
    size_t from_dialling;
};

/* Forward what there is; false: an end. */
static bool forward(struct between *b, struct pipe *p, int side, bool tamper)
{
    unsigned char buf[4096];
    const ssize_t n = recv(p->fd[side], buf, sizeof buf, MSG_DONTWAIT);

    if (n < 0)
        return true;
    if (n == 0)
        return false;
    if (side == 0) {
        const size_t first = p->from_dialling;
        p->from_dialling += (size_t)n;
        if (tamper && first <= b->byte && b->byte < p->from_dialling) {
            buf[b->byte - first] ^= 1;
            atomic_store(&b->changed, true);
        }
    }
    for (ssize_t at = 0, sent; at<n; at += sent> 0 ? sent : 0)
        if ((sent = send(p->fd[!side], buf + at, (size_t)(n - at), MSG_NOSIGNAL)) < 0 &&
            !ckpt_socket_would_block())
            return false;
    return true;
}

static void *between_run(void *arg)
{
    struct between *b = arg;
    struct pipe pipe[8];
    int n = 0;

    while (!atomic_load(&b->stop)) {
        struct pollfd p[17] = {{b->listener, POLLIN, 0}};
        for (int i = 0; i < 2 * n; i++)
            p[1 + i] = (struct pollfd){pipe[i / 2].fd[i % 2], POLLIN, 0};
        (void)poll(p, (nfds_t)(1 + 2 * n), 10);
        int fd = n < 8 ? accept4(b->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
        if (fd >= 0)
            pipe[n++] = (struct pipe){{fd, dial_now("127.0.0.1", b->to)}, 0};
        for (int i = 0; i < 2 * n; i++) {
            struct pipe *q = &pipe[i / 2];
            if (q->fd[0] >= 0 && !forward(b, q, i % 2, i / 2 == b->connection)) {
                ckpt_closep(&q->fd[0]);
                ckpt_closep(&q->fd[1]);
            }
        }
    }
    for (int i = 0; i < 2 * n; i++)
        ckpt_closep(&pipe[i / 2].fd[i % 2]);
    return NULL;
}

struct rank {
    uint32_t meet_ms;
    struct ckpt_tcp *tcp;
    const char *root;
    uint32_t rank;
    struct ckpt_view *view;
    int rc;
    struct ckpt_err err;
};

static int load_all(struct rank *r, struct ckpt_comm *comm)
{
    struct ckpt_load_options opt = {
        .size = sizeof opt, .readers = CKPT_READERS_ONCE, .exchange_timeout_ms = WAIT_MS};
    struct ckpt_load *load = NULL;
    struct ckpt_want_info w = {.size = sizeof w};
    unsigned char *mem[256] = {0};
    size_t n = 0;
    int rc = ckpt_load_new(r->view, comm, &opt, &load, &r->err);

    if (rc == 0)
        rc = ckpt_load_want_layout(load, "dp=2", &r->err);
    if (rc == 0)
        rc = ckpt_load_plan(load, &r->err);
    for (n = 0; rc == 0 && n < ckpt_load_wants(load); n++) {
        (void)ckpt_load_want_info(load, n, &w, NULL);
        mem[n] = malloc(w.nbytes + 1);
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = mem[n]};
        rc = ckpt_load_set_dest(load, n, &dest, &r->err);
    }
    if (rc == 0)
        rc = ckpt_load_start(load, &r->err);
    if (rc == 0)
        rc = ckpt_load_wait(load, UINT32_MAX, &r->err);
    ckpt_load_free(load);
    for (size_t i = 0; i < n; i++)
        free(mem[i]);
    return rc;
}

static void *rank_run(void *arg)
{
    struct rank *r = arg;
    struct ckpt_comm *comm = NULL;

    r->rc = ckpt_tcp_connect(r->tcp, r->rank, 2, r->root, r->meet_ms, &comm, &r->err);
    if (r->rc == 0)
        r->rc = load_all(r, comm);
    ckpt_comm_free(comm);
    return NULL;
}

/* Two ranks load, rank 1 over the process in between; nobody reads another's memory. */
static void run_between(struct between *b, struct rank rank[2])
{
    char host[CKPT_HOST_BYTES], root[CKPT_TCP_ADDRESS], path[4096];
    const char *source = getenv("CKPTFS_SOURCE");
    struct ckpt_run *run;
    struct ckpt_err err = {0};
    pthread_t thread[2];

    (void)snprintf(path, sizeof path, "%s/tests/golden/nanotron/llama_tp2_pp2_tied",
                   source ? source : ".");
    if (ckpt_run_open(path, NULL, &run, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t r = 0; r < 2; r++) {
        (void)setenv("CKPTFS_NODE", r ? "one" : "zero", 1);
        rank[r] = (struct rank){.rank = r, .root = root, .tcp = listen_ok("127.0.0.1")};
        rank[r].meet_ms = b->connection < 0 ? WAIT_MS : FAIL_MS; /* ranks that never meet */
        if (ckpt_run_view(run, NULL, &rank[r].view, &err) < 0)
            fail_msg("%s", err.text);
    }
    (void)setenv("CKPTFS_NODE", "neither", 1);
    b->to = (uint16_t)port_of(rank[0].tcp);
    b->listener = ckpt_listen("127.0.0.1", (struct ckpt_ports){0, 0}, host, &b->port, &err);
    const char *rest = strchr(strchr(ckpt_tcp_address(rank[0].tcp), ' ') + 1, ' ');
    (void)snprintf(root, sizeof root, "127.0.0.1 %u%s", b->port, rest);
    assert_int_equal(pthread_create(&b->thread, NULL, between_run, b), 0);
    for (int r = 0; r < 2; r++)
        assert_int_equal(pthread_create(&thread[r], NULL, rank_run, &rank[r]), 0);
    for (int r = 0; r < 2; r++)
        (void)pthread_join(thread[r], NULL);
    atomic_store(&b->stop, true);
    (void)pthread_join(b->thread, NULL);
    ckpt_closep(&b->listener);
    for (int r = 0; r < 2; r++)
        ckpt_view_release(rank[r].view);
    ckpt_run_close(run);
    (void)unsetenv("CKPTFS_NODE");
}

TEST(between, what_is_only_forwarded_is_good)
{
    for (int secret = 0; secret <= have_secrets(); secret++) {
        struct between b = {.connection = -1};
        struct rank rank[2];
        if (secret)
            (void)setenv("CKPTFS_SECRET", SECRET, 1);
        run_between(&b, rank);
        for (int r = 0; r < 2; r++)
            if (rank[r].rc < 0)
                fail_msg("rank %d: %s", r, rank[r].err.text);
        (void)unsetenv("CKPTFS_SECRET");
    }
    CHECK(true);
}

/* The nonce of the greeting; the address and the proof of the confirmation. */
TEST(between, a_handshake_that_is_changed_on_its_way_fails)
{
    static const size_t change[] = {40, 70, 330};

    if (!have_secrets())
        return;
    (void)setenv("CKPTFS_SECRET", SECRET, 1);
    for (size_t i = 0; i < sizeof change / sizeof *change; i++) {
        struct between b = {.connection = 0, .byte = change[i]};
        struct rank rank[2];
        run_between(&b, rank);
        if (!atomic_load(&b.changed))
            fail_msg("there is no byte %zu", change[i]);
        if (rank[0].rc == 0 || rank[1].rc == 0)
            fail_msg("byte %zu: %d %s, %d %s", change[i], rank[0].rc, rank[0].err.text, rank[1].rc,
                     rank[1].err.text);
    }
    (void)unsetenv("CKPTFS_SECRET");
    CHECK(true);
}

TESTS(T(listen, only_the_given_host_is_listened_on), T(listen, an_interface_can_be_named),
      T(listen, ports_come_from_the_range), T(rendezvous, strangers_delay_nobody),
      T(rendezvous, a_rank_is_not_replaced), T(rendezvous, signals_do_not_end_a_wait),
      T(secret, is_an_error_where_it_cannot_be_used), T(secret, those_without_it_are_not_answered),
      T(between, what_is_only_forwarded_is_good),
      T(between, a_handshake_that_is_changed_on_its_way_fails))
