/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling, waiting and descriptors. */
#include "test.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/tcp/listen.h"
#include "comm/tcp/socket.h"

enum { NOT_HERE = 77, WAIT_MS = 5000 };

/* A network with a loopback of its own, whose only port to give to a caller is 40000. */
static bool one_port(void)
{
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    const char range[] = "40000 40000";

    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) < 0)
        return false;
    int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int f = open("/proc/sys/net/ipv4/ip_local_port_range", O_WRONLY | O_CLOEXEC);
    bool good = s >= 0 && f >= 0 && ioctl(s, SIOCSIFFLAGS, &lo) == 0 &&
                write(f, range, sizeof range - 1) == (ssize_t)(sizeof range - 1);
    ckpt_socket_close(&s);
    ckpt_socket_close(&f);
    return good;
}

/* Linux connects a socket to itself there. */
static int dial_own_port(void)
{
    if (!one_port())
        return NOT_HERE;
    for (int i = 0; i < 2; i++) {
        const char *host = i ? "127.0.0.1" : "::1";
        int fd = ckpt_socket_dial(host, "40000", ckpt_now_ms() + WAIT_MS);
        if (fd >= 0)
            return 1;
    }
    return 0;
}

TEST(socket, never_calls_itself)
{
    int status;
    pid_t pid = fork();

    if (pid == 0)
        _exit(dial_own_port());
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    if (WEXITSTATUS(status) == NOT_HERE)
        print_message("no network namespaces here\n");
    else
        CHECK_EQ(WEXITSTATUS(status), 0);
}

TEST(socket, room_for_descriptors_is_made)
{
    struct rlimit limit, own;
    struct ckpt_err err = {0};
    int status;

    CHECK(getrlimit(RLIMIT_NOFILE, &own) == 0);
    limit = (struct rlimit){16, own.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK_OK(ckpt_socket_reserve(40, &err));
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur > 40 && limit.rlim_cur < 80);
    CHECK(setrlimit(RLIMIT_NOFILE, &own) == 0);

    pid_t pid = fork();
    if (pid == 0) {
        limit = (struct rlimit){16, 16};
        _exit(setrlimit(RLIMIT_NOFILE, &limit) == 0 && ckpt_socket_reserve(40, &err) < 0 &&
                      err.code == CKPT_LIMIT && strstr(err.text, "no more than 16 ")
                  ? 0
                  : 1);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

TEST(socket, is_heard_where_somebody_listens)
{
    uint16_t port;
    char text[8];
    char host[CKPT_HOST_BYTES];
    struct ckpt_err err = {0};
    int listener = ckpt_listen("127.0.0.1", (struct ckpt_ports){0, 0}, host, &port, &err);

    CHECK(listener >= 0);
    (void)snprintf(text, sizeof text, "%u", port);
    int fd = ckpt_socket_dial("127.0.0.1", text, ckpt_now_ms() + WAIT_MS);
    CHECK(fd >= 0);
    ckpt_socket_close(&fd);
    ckpt_socket_close(&listener);
    CHECK(ckpt_socket_dial("127.0.0.1", text, ckpt_now_ms() + WAIT_MS) < 0);
}

static void on_alarm(int sig) { (void)sig; }

/* A timer of the process, as Python programs and profilers have them, interrupts poll. */
TEST(socket, signals_do_not_end_a_wait)
{
    struct sigaction alarm = {.sa_handler = on_alarm}, before;
    const struct itimerval often = {{0, 10000}, {0, 10000}}, never = {0};
    char text[6] = "";
    int status, fd[2];

    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd) == 0);
    ckpt_socket_tune(fd[0]);
    pid_t pid = fork();
    if (pid == 0) {
        (void)usleep(200 * 1000);
        _exit(write(fd[1], "hello", 5) != 5);
    }
    CHECK(sigaction(SIGALRM, &alarm, &before) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
    int rc = ckpt_socket_recv_all(fd[0], text, 5, ckpt_now_ms() + WAIT_MS);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && sigaction(SIGALRM, &before, NULL) == 0);
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    CHECK_EQ(rc, 0);
    CHECK(strcmp(text, "hello") == 0);
    ckpt_socket_close(&fd[0]);
    ckpt_socket_close(&fd[1]);
}

TESTS(T(socket, never_calls_itself), T(socket, signals_do_not_end_a_wait),
      T(socket, room_for_descriptors_is_made), T(socket, is_heard_where_somebody_listens))
