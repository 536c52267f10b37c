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

void ckpt_socket_set_port(struct sockaddr *a, uint16_t port)
{
    if (a->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)a)->sin_port = htons(port);
}

int ckpt_socket_begin(const char *host, uint32_t port, uint32_t nport, uint32_t *attempt)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *list = NULL, *a;
    uint32_t n = 0;

    if (getaddrinfo(host, NULL, &hints, &list) != 0) {
        *attempt = 0;
        return -1;
    }
    for (a = list; a; a = a->ai_next)
        n++;
    a = list;
    for (uint32_t i = 0; i < *attempt % n; i++)
        a = a->ai_next;
    ckpt_socket_set_port(a->ai_addr, (uint16_t)(port + *attempt / n % nport));
    *attempt = (*attempt + 1) % (n * nport);
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) < 0 && errno != EINPROGRESS)
        ckpt_socket_close(&fd);
    freeaddrinfo(list);
    return fd;
}
