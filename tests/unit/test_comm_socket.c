/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling, waiting and descriptors. */
#include "base/mem.h"
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

#include "comm/tcp/socket.h"
#include "dial.h"

enum { NOT_HERE = 77 };

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
    ckpt_closep(&s);
    ckpt_closep(&f);
    return good;
}

/* Linux connects a socket to itself there. */
static int dial_own_port(void)
{
    if (!one_port())
        return NOT_HERE;
    for (int i = 0; i < 2; i++) {
        const char *host = i ? "127.0.0.1" : "::1";
        int fd = dial_now(host, 40000);
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
    char host[CKPT_HOST_BYTES];
    struct ckpt_err err = {0};
    int listener = ckpt_listen("127.0.0.1", (struct ckpt_ports){0, 0}, host, &port, &err);

    CHECK(listener >= 0);
    int fd = dial_now("127.0.0.1", port);
    CHECK(fd >= 0);
    ckpt_closep(&fd);
    ckpt_closep(&listener);
    CHECK(dial_now("127.0.0.1", port) < 0);
}

/* Rank 0 may listen at the second port of those where it is sought. */
TEST(socket, all_ports_are_tried_in_turn)
{
    char host[CKPT_HOST_BYTES];
    struct ckpt_err err = {0};
    uint32_t attempt = 0, tries = 0;
    uint16_t port;
    int listener = ckpt_listen("127.0.0.4", (struct ckpt_ports){0, 0}, host, &port, &err), fd;
    int found = 0;

    CHECK(listener >= 0);
    do {
        if ((fd = ckpt_socket_begin("127.0.0.4", port - 1u, 3, &attempt)) >= 0)
            found += ckpt_socket_connected(fd) > 0;
        ckpt_closep(&fd);
    } while (++tries < 10 && attempt > 0);
    CHECK_EQ(tries, 3);
    CHECK_EQ(found, 1);
    ckpt_closep(&listener);
}

TESTS(T(socket, never_calls_itself), T(socket, room_for_descriptors_is_made),
      T(socket, is_heard_where_somebody_listens), T(socket, all_ports_are_tried_in_turn))
