/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets of TCP, both versions of IP. */
#include "comm/tcp/socket.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"

bool ckpt_socket_would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

void ckpt_socket_close(int *fd)
{
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
}

/* Wait until the socket is ready, a signal arrives or some time has passed. -1: the deadline is
 * over. */
static int wait_for(int fd, short events, uint64_t until)
{
    struct pollfd p = {fd, events, 0};

    if (ckpt_now_ms() >= until)
        return -1;
    (void)poll(&p, 1, 100);
    return 0;
}

int ckpt_socket_send_all(int fd, const void *data, size_t len, uint64_t until)
{
    for (size_t at = 0; at < len;) {
        ssize_t n = send(fd, (const char *)data + at, len - at, MSG_NOSIGNAL);
        if (n < 0 && !ckpt_socket_would_block())
            return -1;
        at += n > 0 ? (size_t)n : 0;
        if (n < 0 && wait_for(fd, POLLOUT, until) < 0)
            return -1;
    }
    return 0;
}

int ckpt_socket_recv_all(int fd, void *data, size_t len, uint64_t until)
{
    for (size_t at = 0; at < len;) {
        ssize_t n = recv(fd, (char *)data + at, len - at, 0);
        if (n == 0 || (n < 0 && !ckpt_socket_would_block()))
            return -1;
        at += n > 0 ? (size_t)n : 0;
        if (n < 0 && wait_for(fd, POLLIN, until) < 0)
            return -1;
    }
    return 0;
}

void ckpt_socket_tune(int fd)
{
    const int one = 1;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static uint64_t open_files(void)
{
    DIR *d = opendir("/proc/self/fd");
    uint64_t n = 0;

    while (d && readdir(d))
        n++;
    if (d)
        (void)closedir(d);
    return n;
}

int ckpt_socket_reserve(uint64_t n, struct ckpt_err *err)
{
    const uint64_t open = open_files(), need = open + n;
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur >= need)
        return 0;
    if (limit.rlim_max < need)
        return ckpt_fail(err, CKPT_LIMIT,
                         "%" PRIu64 " connections are needed and %" PRIu64
                         " files are open, but a process may have no more than %" PRIu64
                         " (ulimit -Hn)",
                         n, open, (uint64_t)limit.rlim_max);
    limit.rlim_cur = need;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    return 0;
}

/* Linux lets a socket connect to itself where nobody listens, when the port that it is given is the
 * one that it calls. */
static bool calls_itself(int fd)
{
    struct sockaddr_storage own = {0}, other = {0};
    socklen_t own_len = sizeof own, other_len = sizeof other;

    return getsockname(fd, (struct sockaddr *)&own, &own_len) == 0 &&
           getpeername(fd, (struct sockaddr *)&other, &other_len) == 0 && own_len == other_len &&
           memcmp(&own, &other, own_len) == 0;
}

static int begin_at(const struct addrinfo *a)
{
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) < 0 && errno != EINPROGRESS)
        ckpt_socket_close(&fd);
    return fd;
}

int ckpt_socket_connected(int fd)
{
    struct pollfd p = {fd, POLLOUT, 0};
    int error = 0;
    socklen_t len = sizeof error;

    if (poll(&p, 1, 0) <= 0)
        return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0 || error || calls_itself(fd))
        return -1;
    ckpt_socket_tune(fd);
    return 1;
}

/* Wait until the connection is made. */
static bool await_connected(int fd, uint64_t until)
{
    int state;

    while ((state = ckpt_socket_connected(fd)) == 0)
        if (wait_for(fd, POLLOUT, until) < 0)
            return false;
    return state > 0;
}

/* Begin to connect to the addresses one after the other; with `until`, wait for each. */
static int dial(const char *host, const char *port, const uint64_t *until)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL;
    int fd = -1;

    if (getaddrinfo(host, port, &hints, &list) != 0)
        return -1;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = begin_at(a);
        if (fd >= 0 && until && !await_connected(fd, *until))
            ckpt_socket_close(&fd);
    }
    freeaddrinfo(list);
    return fd;
}

int ckpt_socket_dial(const char *host, const char *port, uint64_t until)
{
    return dial(host, port, &until);
}

int ckpt_socket_begin(const char *host, const char *port) { return dial(host, port, NULL); }
