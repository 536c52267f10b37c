/* SPDX-License-Identifier: Apache-2.0 */
/* Sockets of TCP, both versions of IP: connecting, and choosing an address and a port to listen on.
 */
#include "comm/tcp/socket.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"

/* Connections that wait to be accepted; the kernel allows net.core.somaxconn at most (4096 by
 * default). Thousands of ranks dial rank 0 within one second: beyond the backlog their first
 * packets are dropped, and come again after one. */
enum { BACKLOG = 4096 };

bool ckpt_socket_would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
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

static void set_port(struct sockaddr *a, uint16_t port)
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
    set_port(a->ai_addr, (uint16_t)(port + *attempt / n % nport));
    *attempt = (*attempt + 1) % (n * nport);
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) < 0 && errno != EINPROGRESS)
        ckpt_closep(&fd);
    freeaddrinfo(list);
    return fd;
}

/* ---- what the environment says ---- */

int ckpt_listen_ports(struct ckpt_ports *ret, struct ckpt_err *err)
{
    const char *text = getenv("CKPTFS_PORT_RANGE");
    const char *dash = text ? strchr(text, '-') : NULL;
    unsigned long long lo = 0, hi = 0;

    *ret = (struct ckpt_ports){0, 0};
    if (!text || !*text)
        return 0;
    if (!dash || !ckpt_parse_u64(text, (size_t)(dash - text), &lo) ||
        !ckpt_parse_u64(dash + 1, strlen(dash + 1), &hi) || lo < 1 || lo > hi || hi > UINT16_MAX)
        return ckpt_fail(err, CKPT_USAGE,
                         "CKPTFS_PORT_RANGE=%s: expected two port numbers such as 20000-20099",
                         text);
    *ret = (struct ckpt_ports){(uint16_t)lo, (uint16_t)hi};
    return 0;
}

/* ---- addresses ---- */

static bool is_loopback(const struct sockaddr *a)
{
    const struct in6_addr *six = &((const struct sockaddr_in6 *)a)->sin6_addr;

    if (a->sa_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(six);
    return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

/* Does this name or address mean the loopback interface on every machine? */
static bool means_loopback(const char *host)
{
    struct in_addr four;
    struct in6_addr six;

    return strcmp(host, "localhost") == 0 ||
           (inet_pton(AF_INET, host, &four) == 1 && ntohl(four.s_addr) >> 24 == 127) ||
           (inet_pton(AF_INET6, host, &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six));
}

static bool numeric(const struct sockaddr *a, socklen_t len, char ret[CKPT_HOST_BYTES])
{
    return getnameinfo(a, len, ret, CKPT_HOST_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
}

static socklen_t length_of(const struct sockaddr *a)
{
    return a->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* Is this an address of the interface that other machines can connect to? */
static bool is_of(const struct ifaddrs *i, const char *interface, bool by_name)
{
    const struct sockaddr *a = i->ifa_addr;
    char text[CKPT_HOST_BYTES];

    if (!a || (a->sa_family != AF_INET && a->sa_family != AF_INET6) || !(i->ifa_flags & IFF_UP))
        return false;
    if (!by_name)
        return numeric(a, length_of(a), text) && strcmp(text, interface) == 0;
    return strcmp(i->ifa_name, interface) == 0 &&
           !(a->sa_family == AF_INET6 &&
             IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr));
}

int ckpt_listen_interface(char ret[CKPT_HOST_BYTES], struct ckpt_err *err)
{
    const char *interface = getenv("CKPTFS_INTERFACE");
    struct ifaddrs *list = NULL;

    ret[0] = '\0';
    if (!interface || !*interface)
        return 0;
    if (getifaddrs(&list) < 0)
        return ckpt_fail_errno(err, errno, "the network interfaces of this machine");
    for (int by_name = 1; by_name >= 0 && !ret[0]; by_name--)
        for (const struct ifaddrs *i = list; i && !ret[0]; i = i->ifa_next)
            if (is_of(i, interface, by_name))
                (void)numeric(i->ifa_addr, length_of(i->ifa_addr), ret);
    freeifaddrs(list);
    return ret[0] ? 0
                  : ckpt_fail(err, CKPT_MISSING,
                              "CKPTFS_INTERFACE=%s: this machine has no such interface that is up "
                              "and has an address",
                              interface);
}

/* ---- listening ---- */

static int listen_at(struct sockaddr_storage a, socklen_t len, uint16_t port, uint16_t *ret_port)
{
    const int zero = 0;
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return -1;
    if (a.ss_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    set_port((struct sockaddr *)&a, port);
    if (bind(fd, (struct sockaddr *)&a, len) < 0 || listen(fd, BACKLOG) < 0 ||
        getsockname(fd, (struct sockaddr *)&a, &len) < 0) {
        ckpt_closep(&fd);
        return -1;
    }
    *ret_port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                              : ((struct sockaddr_in *)&a)->sin_port);
    return fd;
}

/* Bind to a free port of the range. The first port to be tried depends on the process id, so that
 * the ranks of a node do not all try the same ports. */
static int listen_in(const struct sockaddr_storage *a, socklen_t len, struct ckpt_ports ports,
                     uint16_t *ret_port)
{
    const uint32_t n = (uint32_t)(ports.hi - ports.lo) + 1, first = (uint32_t)getpid() % n;

    for (uint32_t i = 0; i < n; i++) {
        int fd = listen_at(*a, len, (uint16_t)(ports.lo + (first + i) % n), ret_port);
        if (fd >= 0 || errno != EADDRINUSE)
            return fd;
    }
    errno = EADDRINUSE;
    return -1;
}

static int listen_on_host(const char *host, struct ckpt_ports ports, char ret_host[CKPT_HOST_BYTES],
                          uint16_t *ret_port)
{
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    const bool loopback = means_loopback(host);
    struct addrinfo *list = NULL;
    int fd = -1, error = EADDRNOTAVAIL;

    if (getaddrinfo(host, NULL, &hints, &list) != 0)
        list = NULL;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        struct sockaddr_storage copy = {0};
        if (is_loopback(a->ai_addr) && !loopback)
            continue;
        memcpy(&copy, a->ai_addr, a->ai_addrlen);
        fd = listen_in(&copy, a->ai_addrlen, ports, ret_port);
        if (fd >= 0)
            (void)numeric(a->ai_addr, a->ai_addrlen, ret_host);
        else if (errno == EADDRINUSE)
            error = errno;
    }
    if (list)
        freeaddrinfo(list);
    errno = error;
    return fd;
}

static int listen_on_all(struct ckpt_ports ports, uint16_t *ret_port)
{
    struct sockaddr_storage six = {.ss_family = AF_INET6}, four = {.ss_family = AF_INET};
    int fd = listen_in(&six, sizeof(struct sockaddr_in6), ports, ret_port);

    if (fd < 0 && errno != EADDRINUSE)
        fd = listen_in(&four, sizeof(struct sockaddr_in), ports, ret_port);
    return fd;
}

int ckpt_listen(const char *host, struct ckpt_ports ports, char ret_host[CKPT_HOST_BYTES],
                uint16_t *ret_port, struct ckpt_err *err)
{
    int fd;

    if (strlen(host) >= CKPT_HOST_BYTES)
        return ckpt_fail(err, CKPT_LIMIT, "the host name '%.200s' is too long", host);
    fd = listen_on_host(host, ports, ret_host, ret_port);
    if (fd < 0 && errno != EADDRINUSE) {
        (void)strcpy(ret_host, host);
        fd = listen_on_all(ports, ret_port);
    }
    if (fd < 0)
        (void)ckpt_fail_errno(err, errno, "listening on %s, TCP ports %u to %u", host, ports.lo,
                              ports.hi);
    return fd;
}
