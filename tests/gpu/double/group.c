/* SPDX-License-Identifier: Apache-2.0 */
/* Sends, receives and collectives: gathered in a group, launched as one piece of a stream's work,
 * which ends when every rank concerned has launched its own.
 *
 * A receiver says that it is ready, with what it expects; only then the sender sends. So nothing is
 * buffered that a real device would not buffer, and what does not match is seen. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch.h"

enum { WIRE_MAGIC = 0x9c57a11e };

/* One call. */
struct call {
    struct call *next;
    struct ncclComm *comm;
    cudaStream_t stream;
    const char *name;
    enum wire_call what;
    bool send;
    const void *src;
    void *dst;
    size_t len;
    int peer; /* or root */
    bool stuck;
};

static _Thread_local int depth;
static _Thread_local struct call *calls, **calls_tail;
static _Thread_local ncclResult_t group_error;

bool comm_in_group(void) { return depth > 0; }

static const char *call_name(uint32_t call)
{
    static const char *const name[] = {"?", "send/receive", "broadcast", "all-gather"};

    return call < sizeof name / sizeof *name ? name[call] : "?";
}

static void *allocate(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);

    if (!p)
        gpu_die("the host has no memory");
    return p;
}

/* ---- building ---- */

static unsigned char *hold(struct launch *l, const void *p, size_t len, const char *name)
{
    if (!len)
        return NULL;
    struct gpu_memory *m = gpu_memory_on(p, len, l->comm->device, name);
    l->use[l->nuse++] = m;
    return gpu_memory_real(m, p);
}

static void add_transfer(struct launch *l, const struct call *c, int peer, bool send,
                         unsigned char *real, uint64_t seq)
{
    const bool pair = c->what == CALL_SEND_RECV;

    l->transfer[l->ntransfer++] = (struct transfer){
        .peer = peer,
        .send = send,
        .stuck = c->stuck,
        .is = {.magic = WIRE_MAGIC,
               .kind = pair ? WIRE_PAIR : WIRE_COLLECTIVE,
               .call = c->what,
               .root = c->what == CALL_BROADCAST ? (uint32_t)c->peer : 0,
               .seq = seq,
               .group = pair ? 0 : l->group,
               .len = c->len},
        .real = real,
    };
    if (!pair)
        memcpy(l->transfer[l->ntransfer - 1].is.other, l->other, sizeof l->other);
}

static void add_local(struct launch *l, unsigned char *dst, const unsigned char *src, size_t len)
{
    if (dst != src && len)
        l->local[l->nlocal++] = (struct local){dst, src, len};
}

/* The sends to itself meet the receives from itself in their order. */
static void add_self(struct launch *l, const struct call *c, size_t *nsent, size_t *nreceived)
{
    struct local *o = &l->local[c->send ? (*nsent)++ : (*nreceived)++];

    if (c->send)
        o->src = hold(l, c->src, c->len, c->name);
    else
        o->dst = hold(l, c->dst, c->len, c->name);
    if (o->len && o->len != c->len + 1)
        gpu_die("%s: rank %d sends itself another size than it receives", c->name, l->comm->rank);
    o->len = c->len + 1; /* until both are there */
}

static void add_pair(struct launch *l, const struct call *c)
{
    struct pair *to = &l->comm->pair[c->peer];

    *(c->send ? &l->sent : &l->received) += c->len;
    if (c->send)
        add_transfer(l, c, c->peer, true, hold(l, c->src, c->len, c->name), to->nsent++);
    else
        add_transfer(l, c, c->peer, false, hold(l, c->dst, c->len, c->name), to->nreceived++);
}

/* Its number among those of the communicator. */
static uint64_t begin_collective(struct launch *l, const struct call *c)
{
    l->collective = true;
    l->seconds += links_collective(l->comm, c->what, c->len);
    return l->comm->ncollective++;
}

static void add_broadcast(struct launch *l, const struct call *c)
{
    const uint64_t seq = begin_collective(l, c);
    unsigned char *dst = hold(l, c->dst, c->len, c->name);

    if (c->peer != l->comm->rank) {
        add_transfer(l, c, c->peer, false, dst, seq);
        return;
    }
    unsigned char *src = hold(l, c->src, c->len, c->name);
    add_local(l, dst, src, c->len);
    for (int r = 0; r < l->comm->size; r++)
        if (r != l->comm->rank)
            add_transfer(l, c, r, true, src, seq);
}

static void add_allgather(struct launch *l, const struct call *c)
{
    const uint64_t seq = begin_collective(l, c);
    unsigned char *src = hold(l, c->src, c->len, c->name);
    unsigned char *dst = hold(l, c->dst, c->len * (size_t)l->comm->size, c->name);

    add_local(l, dst + c->len * (size_t)l->comm->rank, src, c->len);
    for (int r = 0; r < l->comm->size; r++)
        if (r != l->comm->rank) {
            add_transfer(l, c, r, true, src, seq);
            add_transfer(l, c, r, false, dst + c->len * (size_t)r, seq);
        }
}

struct range {
    const unsigned char *lo, *hi;
    bool written;
};

static int by_begin(const void *a, const void *b)
{
    const struct range *x = a, *y = b;

    return (x->lo > y->lo) - (x->lo < y->lo);
}

/* Within a group there is no order: nothing may be written that is touched twice. */
static void check_overlaps(const struct launch *l)
{
    struct range *r = allocate(l->ntransfer + 2 * l->nlocal, sizeof *r);
    const unsigned char *any = NULL, *written = NULL;
    size_t n = 0;

    for (size_t i = 0; i < l->ntransfer; i++)
        if (l->transfer[i].is.len)
            r[n++] =
                (struct range){l->transfer[i].real, l->transfer[i].real + l->transfer[i].is.len,
                               !l->transfer[i].send};
    for (size_t i = 0; i < l->nlocal; i++) {
        const struct local *o = &l->local[i];
        if (o->len == 0)
            continue;
        r[n++] = (struct range){o->dst, o->dst + o->len, true};
        r[n++] = (struct range){o->src, o->src + o->len, false};
    }
    qsort(r, n, sizeof *r, by_begin);
    for (size_t i = 0; i < n; i++) {
        if ((r[i].written && any > r[i].lo) || written > r[i].lo)
            gpu_die("a group of rank %d receives into memory that it also uses otherwise",
                    l->comm->rank);
        any = r[i].hi > any ? r[i].hi : any;
        if (r[i].written)
            written = r[i].hi > written ? r[i].hi : written;
    }
    free(r);
}

static void count_calls(const struct call *list, const struct ncclComm *comm, struct launch *l)
{
    size_t n = 0;

    for (const struct call *c = list; c; c = c->next)
        n += c->comm == comm;
    l->transfer = allocate(n * 2 * (size_t)comm->size, sizeof *l->transfer);
    l->local = allocate(n, sizeof *l->local);
    l->use = allocate(2 * n, sizeof *l->use);
}

static void run_launch(struct gpu_work *work);

static struct launch *build(const struct call *list, struct ncclComm *comm)
{
    struct launch *l = allocate(1, sizeof *l);
    size_t nsent = 0, nreceived = 0;

    l->work.run = run_launch;
    l->comm = comm_ref(comm);
    l->group = comm->ngroup;
    comm_others(comm, l->other);
    count_calls(list, comm, l);
    for (const struct call *c = list; c; c = c->next)
        if (c->comm == comm && c->what == CALL_SEND_RECV && c->peer == comm->rank)
            add_self(l, c, &nsent, &nreceived);
    if (nsent != nreceived)
        gpu_die("rank %d sends itself %zu buffers in a group and receives %zu", comm->rank, nsent,
                nreceived);
    l->nlocal = nsent;
    for (size_t i = 0; i < nsent; i++)
        l->local[i].len--;
    for (const struct call *c = list; c; c = c->next) {
        if (c->comm != comm)
            continue;
        l->stream = c->stream;
        if (c->what == CALL_BROADCAST)
            add_broadcast(l, c);
        else if (c->what == CALL_ALLGATHER)
            add_allgather(l, c);
        else if (c->peer != comm->rank)
            add_pair(l, c);
    }
    l->left = l->ntransfer;
    l->collectives = comm->ncollective;
    comm->ngroup += l->collective;
    check_overlaps(l);
    (void)atomic_fetch_add_explicit(&comm->queued, 1, memory_order_relaxed);
    return l;
}

/* ---- running ---- */

static void enqueue(struct link *to, const struct wire *is, enum wire_type type,
                    const unsigned char *data, struct transfer *of)
{
    struct frame *f = allocate(1, sizeof *f);

    f->head = *is;
    f->head.type = (uint16_t)type;
    f->data = data;
    f->of = of;
    *to->out_tail = f;
    to->out_tail = &f->next;
}

static void finish(struct launch *l, struct transfer *t)
{
    t->done = true;
    l->left--;
}

/* Both are at the same point of what else they have in common. */
static void check_order(const struct launch *l, const struct transfer *t, const struct wire *w)
{
    for (int i = 0; i < WIRE_OTHERS && t->is.other[i].comm; i++)
        for (int k = 0; k < WIRE_OTHERS && w->other[k].comm; k++)
            if (t->is.other[i].comm == w->other[k].comm &&
                t->is.other[i].launched != w->other[k].launched)
                gpu_die("another order of communicators: rank %d launched this %s after %lu "
                        "groups of another communicator, rank %d after %lu",
                        l->comm->rank, call_name(t->is.call),
                        (unsigned long)t->is.other[i].launched, t->peer,
                        (unsigned long)w->other[k].launched);
}

void launch_match(const struct launch *l, const struct transfer *t, const struct wire *w)
{
    if (t->is.kind == WIRE_COLLECTIVE)
        check_order(l, t, w);
    if (t->is.call != w->call || t->is.root != w->root || t->is.group != w->group ||
        t->is.len != w->len)
        gpu_die("rank %d has a %s of %lu bytes (root %u, group %lu) where rank %d has a %s of %lu "
                "bytes (root %u, group %lu)",
                l->comm->rank, call_name(t->is.call), (unsigned long)t->is.len, t->is.root,
                (unsigned long)t->is.group, t->peer, call_name(w->call), (unsigned long)w->len,
                w->root, (unsigned long)w->group);
}

/* All-gathers list a send and a receive for each other rank, in order: the search begins where that
 * of a launch of one all-gather is. */
struct transfer *launch_find(const struct launch *l, int peer, bool send, const struct wire *w)
{
    const size_t guess = 2 * (size_t)(peer - (peer > l->comm->rank)) + !send;

    for (size_t i = 0; i < l->ntransfer; i++) {
        struct transfer *t = &l->transfer[(guess + i) % l->ntransfer];
        if (t->peer == peer && t->send == send && t->is.kind == w->kind && t->is.seq == w->seq)
            return t;
    }
    return NULL;
}

void launch_differs(const struct launch *l, int peer, const struct wire *w, bool waits)
{
    gpu_die("rank %d %s a %s of %lu bytes %s rank %d, which does something else there", peer,
            waits ? "waits for" : "has", call_name(w->call), (unsigned long)w->len,
            waits ? "from" : "for", l->comm->rank);
}

static void meet_at(struct launch *l, double t) { l->latest = l->latest > t ? l->latest : t; }

/* The peer waits for this, or offers it. False: it is for a later group. */
static bool answer(struct launch *l, int peer, const struct wire *w)
{
    const bool waits = w->type == WIRE_READY;

    struct transfer *t = launch_find(l, peer, waits, w);

    if (!t && w->kind == WIRE_COLLECTIVE && w->seq < l->collectives)
        launch_differs(l, peer, w, waits);
    if (!t || (waits && t->stuck))
        return false;
    launch_match(l, t, w);
    meet_at(l, w->at);
    if (!waits)
        return true;
    enqueue(&l->comm->link[peer], &t->is, WIRE_DATA, t->real, t);
    return true;
}

static void answer_all(struct launch *l, int peer)
{
    struct link *from = &l->comm->link[peer];
    size_t kept = 0;

    for (size_t i = 0; i < from->nready; i++)
        if (!answer(l, peer, &from->ready[i]))
            from->ready[kept++] = from->ready[i];
    from->nready = kept;
}

static void lose_peer(struct ncclComm *c, int peer)
{
    int well = ncclSuccess;

    (void)close(c->link[peer].data);
    c->link[peer].data = -1;
    if (gpu_number("CKPTFS_GPU_REMOTE", 0))
        (void)atomic_compare_exchange_strong(&c->state, &well, ncclRemoteError);
}

static void take_head(struct launch *l, int peer)
{
    struct link *from = &l->comm->link[peer];
    const struct wire *w = &from->in;

    if (w->magic != WIRE_MAGIC)
        gpu_die("rank %d sends what is no message", peer);
    from->in_len = 0;
    if (w->type != WIRE_DATA) {
        if (answer(l, peer, w))
            return;
        from->ready = realloc(from->ready, (from->nready + 1) * sizeof *from->ready);
        if (!from->ready)
            gpu_die("the host has no memory");
        from->ready[from->nready++] = *w;
        return;
    }
    from->incoming = launch_find(l, peer, false, w);
    if (!from->incoming || from->incoming->done)
        gpu_die("rank %d sends what nobody asked for", peer);
    launch_match(l, from->incoming, w);
    meet_at(l, w->at);
}

/* Read on: a head, or data. False: nothing more for now. */
static bool read_some(struct launch *l, int peer)
{
    struct link *from = &l->comm->link[peer];
    struct transfer *t = from->incoming;
    const size_t want = (t ? t->is.len : sizeof from->in) - from->in_len;
    unsigned char *to = (t ? t->real : (unsigned char *)&from->in) + from->in_len;

    if (want) {
        const ssize_t n = recv(from->data, to, want, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return false;
        if (n <= 0) {
            lose_peer(l->comm, peer);
            return false;
        }
        from->in_len += (size_t)n;
        if ((size_t)n < want)
            return true;
    }
    if (t) {
        from->incoming = NULL;
        from->in_len = 0;
        finish(l, t);
    } else {
        take_head(l, peer);
    }
    return true;
}

/* Write on. False: nothing more for now. */
static bool write_some(struct launch *l, int peer)
{
    struct link *to = &l->comm->link[peer];
    struct frame *f = to->out;

    if (!f)
        return false;
    const size_t len = f->data ? f->head.len : 0, head = sizeof f->head;
    if (to->out_len < head + len) {
        const bool in_head = to->out_len < head;
        const unsigned char *at = in_head ? (const unsigned char *)&f->head + to->out_len
                                          : f->data + (to->out_len - head);
        const size_t want = in_head ? head - to->out_len : head + len - to->out_len;
        const ssize_t n = send(to->data, at, want, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return false;
        if (n < 0) {
            lose_peer(l->comm, peer);
            return false;
        }
        to->out_len += (size_t)n;
    }
    if (to->out_len < head + len)
        return true;
    if (f->of)
        finish(l, f->of);
    if (!(to->out = f->next))
        to->out_tail = &to->out;
    to->out_len = 0;
    free(f);
    return true;
}

/* Wait for the sockets; false: aborted. */
static bool turn(struct launch *l, struct pollfd *p)
{
    struct ncclComm *c = l->comm;

    for (int r = 0; r < c->size; r++) {
        p[r] = (struct pollfd){c->link[r].data, POLLIN, 0};
        if (c->link[r].out)
            p[r].events |= POLLOUT;
    }
    p[c->size] = (struct pollfd){c->family->wake, POLLIN, 0};
    while (poll(p, (nfds_t)c->size + 1, -1) < 0 && errno == EINTR)
        ;
    if (comm_aborted(c))
        return false;
    for (int r = 0; r < c->size; r++) {
        while (p[r].revents && c->link[r].data >= 0 && read_some(l, r))
            ;
        while (c->link[r].data >= 0 && write_some(l, r))
            ;
    }
    return true;
}

static void execute_over_sockets(struct launch *l)
{
    struct ncclComm *c = l->comm;
    struct pollfd *p = allocate((size_t)c->size + 1, sizeof *p);

    for (size_t i = 0; i < l->ntransfer; i++) {
        struct transfer *t = &l->transfer[i];
        if (!t->stuck && (!t->send || t->is.kind == WIRE_COLLECTIVE))
            enqueue(&c->link[t->peer], &t->is, t->send ? WIRE_OFFER : WIRE_READY, NULL, NULL);
    }
    for (int r = 0; r < c->size; r++)
        answer_all(l, r);
    while (l->left && turn(l, p))
        ;
    free(p);
}

static void execute(struct launch *l)
{
    l->at = l->latest = gpu_clock_begin(l->use, l->nuse);
    for (size_t i = 0; i < l->ntransfer; i++)
        l->transfer[i].is.at = l->at;
    for (size_t i = 0; i < l->nlocal; i++)
        if (l->local[i].len)
            memcpy(l->local[i].dst, l->local[i].src, l->local[i].len);
    if (l->comm->link)
        execute_over_sockets(l);
    else
        room_execute(l);
    const double pairs = links_pairs(l->comm, l->sent, l->received);
    gpu_clock_end(l->use, l->nuse, l->latest + l->seconds + pairs, GPU_CLOCK_EXCHANGE);
}

static void run_launch(struct gpu_work *work)
{
    struct launch *l = (struct launch *)work;

    if (!gpu_lost() && !comm_aborted(l->comm))
        execute(l);
    for (size_t i = 0; i < l->nuse; i++)
        gpu_memory_leave(l->use[i]);
    (void)atomic_fetch_sub_explicit(&l->comm->queued, 1, memory_order_release);
    comm_unref(l->comm);
    free(l->transfer);
    free(l->local);
    free(l->use);
    free(l);
}

/* ---- launching ---- */

static ncclResult_t push_launch(struct ncclComm *c, void *arg)
{
    struct launch *l = arg;

    (void)c;
    gpu_stream_push(l->stream, &l->work, true, "ncclGroupEnd");
    return ncclSuccess;
}

static ncclResult_t start(const struct call *list, struct ncclComm *comm)
{
    struct launch *l = build(list, comm);

    if (!comm->blocking)
        gpu_stream_close(l->stream, "ncclGroupEnd");
    comm->closed = !comm->blocking;
    return comm_do(comm, push_launch, l);
}

static ncclResult_t launch_all(const struct call *list)
{
    ncclResult_t result = ncclSuccess;

    for (const struct call *c = list; c; c = c->next) {
        const struct call *first = list;
        while (first->comm != c->comm)
            first = first->next;
        if (first == c && start(list, c->comm) == ncclInProgress)
            result = ncclInProgress;
    }
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    if (depth++ == 0)
        group_error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (!depth)
        gpu_die("ncclGroupEnd without ncclGroupStart");
    if (--depth)
        return ncclSuccess;
    if (gpu_fault(__func__) == GPU_ERROR)
        group_error = ncclInternalError;
    struct call *list = calls;
    calls = NULL;
    const ncclResult_t result = group_error != ncclSuccess ? group_error : launch_all(list);
    while (list) {
        struct call *c = list;
        list = c->next;
        free(c);
    }
    return result;
}

/* ---- the calls ---- */

static size_t type_size(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

static ncclResult_t fail(ncclResult_t e)
{
    if (depth)
        group_error = e;
    return e;
}

static ncclResult_t add(const struct call *is, size_t count, ncclDataType_t type)
{
    const enum gpu_fault fault = gpu_fault(is->name);
    const ncclResult_t e = comm_usable(is->comm, is->name);
    int well = ncclSuccess;

    if (e != ncclSuccess)
        return fail(e);
    if (fault == GPU_ERROR)
        return fail(ncclInternalError);
    if (!type_size(type) || is->peer < 0 || is->peer >= is->comm->size)
        return fail(ncclInvalidArgument);
    if (gpu_stream_device(is->stream, is->name) != is->comm->device)
        gpu_die("%s: a stream of another device than the communicator's", is->name);
    if (is->comm->stream && is->comm->stream != is->stream)
        gpu_die("%s: a communicator on two streams is not in the double", is->name);
    if (!count && is->what != CALL_SEND_RECV)
        return ncclSuccess;
    struct call *c = allocate(1, sizeof *c);
    *c = *is;
    c->len = count * type_size(type);
    c->stuck = fault != GPU_WELL;
    c->comm->stream = is->stream;
    if (fault == GPU_ASYNC)
        (void)atomic_compare_exchange_strong(&c->comm->state, &well, ncclSystemError);
    (void)ncclGroupStart();
    if (!calls)
        calls_tail = &calls;
    *calls_tail = c;
    calls_tail = &c->next;
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void *buf, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    const struct call c = {.comm = comm,
                           .stream = stream,
                           .name = __func__,
                           .what = CALL_SEND_RECV,
                           .send = true,
                           .src = buf,
                           .peer = peer};

    return add(&c, count, type);
}

ncclResult_t ncclRecv(void *buf, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    const struct call c = {.comm = comm,
                           .stream = stream,
                           .name = __func__,
                           .what = CALL_SEND_RECV,
                           .dst = buf,
                           .peer = peer};

    return add(&c, count, type);
}

ncclResult_t ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream)
{
    const struct call c = {.comm = comm,
                           .stream = stream,
                           .name = __func__,
                           .what = CALL_BROADCAST,
                           .src = src,
                           .dst = dst,
                           .peer = root};

    return add(&c, count, type);
}

ncclResult_t ncclAllGather(const void *src, void *dst, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    const struct call c = {.comm = comm,
                           .stream = stream,
                           .name = __func__,
                           .what = CALL_ALLGATHER,
                           .src = src,
                           .dst = dst};

    return add(&c, count, type);
}
