/* SPDX-License-Identifier: Apache-2.0 */
/* How ranks find each other: each listens on a name of the abstract namespace, which leaves nothing
 * behind, and calls those below it. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "comm.h"

enum { BACKLOG = 256, RETRY_US = 1000, DATA = 0, AGREE = 1 };

struct hello {
    int32_t rank, size, channel, identity;
};

bool comm_aborted(const struct ncclComm *c) { return atomic_load(&c->family->aborted); }

bool comm_poll(struct ncclComm *c, int fd, short events)
{
    struct pollfd p[2] = {{fd, events, 0}, {c->family->wake, POLLIN, 0}};

    while (poll(p, 2, -1) < 0 && errno == EINTR)
        ;
    return !comm_aborted(c);
}

/* All of it; false: aborted. A peer that is gone is waited for until then. */
static bool move(struct ncclComm *c, int fd, void *buf, size_t len, bool out)
{
    for (size_t at = 0; at < len;) {
        if (!comm_poll(c, fd, out ? POLLOUT : POLLIN))
            return false;
        ssize_t n = out ? send(fd, (char *)buf + at, len - at, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : recv(fd, (char *)buf + at, len - at, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return comm_poll(c, -1, 0) && false;
        at += n > 0 ? (size_t)n : 0;
    }
    return true;
}

static socklen_t address(const struct ncclComm *c, int rank, struct sockaddr_un *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->sun_family = AF_UNIX;
    const int n = snprintf(ret->sun_path + 1, sizeof ret->sun_path - 1, "ckptfs-gpu-double-%s-%d",
                           c->name, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int socket_new(void)
{
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        gpu_die("no socket: %s", strerror(errno));
    return fd;
}

static int listen_here(const struct ncclComm *c)
{
    struct sockaddr_un a;
    const socklen_t len = address(c, c->rank, &a);
    const int fd = socket_new();

    if (bind(fd, (struct sockaddr *)&a, len) < 0 || listen(fd, BACKLOG) < 0)
        gpu_die("ncclCommInitRank: rank %d of this communicator is there already (%s)", c->rank,
                strerror(errno));
    return fd;
}

static bool check_peer(struct ncclComm *c, const struct hello *h, ncclResult_t *ret)
{
    if (h->size != c->size)
        gpu_die("ncclCommInitRank: rank %d says %d ranks, rank %d says %d", c->rank, c->size,
                h->rank, h->size);
    if (h->identity == c->identity && !c->multi && h->channel == DATA) {
        (void)fprintf(stderr, "gpu double: ranks %d and %d are both on device %d\n", c->rank,
                      h->rank, c->identity);
        *ret = ncclInvalidUsage;
    }
    return true;
}

static bool call_peer(struct ncclComm *c, int peer, int channel, ncclResult_t *ret)
{
    struct hello h = {c->rank, c->size, channel, c->identity};
    struct sockaddr_un a;
    const socklen_t len = address(c, peer, &a);
    int fd;

    for (;;) {
        fd = socket_new();
        if (connect(fd, (struct sockaddr *)&a, len) == 0)
            break;
        (void)close(fd);
        if (comm_aborted(c))
            return false;
        (void)usleep(RETRY_US);
    }
    *(channel == DATA ? &c->link[peer].data : &c->link[peer].agree) = fd;
    return move(c, fd, &h, sizeof h, true) && move(c, fd, &h, sizeof h, false) &&
           check_peer(c, &h, ret);
}

static bool take_call(struct ncclComm *c, int listener, ncclResult_t *ret)
{
    struct hello h, own = {c->rank, c->size, 0, c->identity};

    if (!comm_poll(c, listener, POLLIN))
        return false;
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        gpu_die("accept: %s", strerror(errno));
    if (!move(c, fd, &h, sizeof h, false)) {
        (void)close(fd);
        return false;
    }
    if (h.rank <= c->rank || h.rank >= c->size)
        gpu_die("ncclCommInitRank: a rank %d of %d", h.rank, h.size);
    *(h.channel == DATA ? &c->link[h.rank].data : &c->link[h.rank].agree) = fd;
    own.channel = h.channel;
    return move(c, fd, &own, sizeof own, true) && check_peer(c, &h, ret);
}

bool comm_meet(struct ncclComm *c, ncclResult_t *ret)
{
    if (!c->link)
        return room_meet(c, ret);
    const int listener = listen_here(c);
    bool well = true;

    *ret = ncclSuccess;
    for (int r = 0; well && r < c->rank; r++)
        well = call_peer(c, r, DATA, ret) && call_peer(c, r, AGREE, ret);
    for (int i = 0; well && i < 2 * (c->size - 1 - c->rank); i++)
        well = take_call(c, listener, ret);
    (void)close(listener);
    return well && *ret == ncclSuccess;
}

void comm_part(struct ncclComm *c)
{
    room_part(c);
    for (int r = 0; c->link && r < c->size; r++) {
        struct link *l = &c->link[r];
        if (l->data >= 0)
            (void)close(l->data);
        if (l->agree >= 0)
            (void)close(l->agree);
        while (l->out) {
            struct frame *f = l->out;
            l->out = f->next;
            free(f);
        }
        free(l->ready);
    }
}

static bool exchange(struct ncclComm *c, const int64_t own[3], int64_t (*ret)[3])
{
    for (int r = 0; r < c->size; r++) {
        int64_t copy[3] = {own[0], own[1], own[2]};
        if (r != c->rank && !move(c, c->link[r].agree, copy, sizeof copy, true))
            return false;
    }
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank)
            memcpy(ret[r], own, sizeof ret[r]);
        else if (!move(c, c->link[r].agree, ret[r], sizeof ret[r], false))
            return false;
    }
    return true;
}

bool comm_exchange(struct ncclComm *c, const int64_t own[3], int64_t (*ret)[3])
{
    if (!(c->link ? exchange(c, own, ret) : room_exchange(c, own, ret)))
        return false;
    for (int r = 0; r < c->size; r++)
        if (ret[r][0] != own[0])
            gpu_die("rank %d ends the communicator where rank %d does not", c->rank, r);
    return true;
}
