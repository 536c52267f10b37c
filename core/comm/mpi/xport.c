/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of an MPI communicator, with destinations in host memory. Data and control messages have
 * different tags; MPI keeps the order of messages of each pair of ranks. */
#include <ckptfs/load_mpi.h>

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/vec.h"
#include "comm/comm.h"
#include "device/device.h"

enum { NAP_US = 50, SPINS = 200, GRACE_MS = 2000, CONNECT_MS = 300 * 1000 };

enum { KEPT = 16 }; /* communicators of divisions */

/* TAG_DATA is the first load's tag of data; each renewal uses the next one. */
enum { TAG_CTL = 1, TAG_DATA = 2, LAST_TAG = 32767 };

/* A control message that is being sent. */
struct outgoing {
    struct outgoing *next;
    MPI_Request request;
    unsigned char data[];
};

struct xport_mpi {
    struct ckpt_xport x;
    MPI_Comm comm; /* our duplicate */
    bool finalize; /* we initialised MPI */
    struct ckpt_xfer *active;
    struct outgoing *outgoing;
    uint32_t idle; /* calls of wait since something happened */
    int data_tag;
    size_t nkept;
    struct kept {
        uint64_t id;   /* of the division (struct ckpt_device_division) */
        MPI_Comm comm; /* of this rank's group in it; MPI_COMM_NULL: there is none */
    } kept[KEPT];
    MPI_Datatype unit;                     /* of all-gathers */
    MPI_Comm division[1 + CKPT_DIVISIONS]; /* of the current load; the first one is of all ranks */
};

static struct xport_mpi *self(struct ckpt_xport *x) { return (struct xport_mpi *)x; }

static int failed(int rc, const char *what, struct ckpt_err *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int len = 0;

    if (rc == MPI_SUCCESS)
        return 0;
    (void)MPI_Error_string(rc, text, &len);
    return ckpt_fail(err, CKPT_PEER, "MPI: %s: %s", what, text);
}

/* Counts of MPI are ints: a longer message is sent as several elements of a type of so many bytes.
 */
enum { BIG = 1 << 20 };

static int big_type(size_t len, MPI_Datatype *ret, int *ret_count, struct ckpt_err *err)
{
    MPI_Datatype block, whole;
    const int tail = (int)(len % BIG);

    *ret = MPI_BYTE;
    *ret_count = (int)len;
    if (len <= INT_MAX)
        return 0;
    int lengths[2] = {(int)(len / BIG), tail};
    MPI_Aint offsets[2] = {0, (MPI_Aint)(len - (size_t)tail)};
    int rc = MPI_Type_contiguous(BIG, MPI_BYTE, &block);
    MPI_Datatype types[2] = {block, MPI_BYTE};
    if (rc == MPI_SUCCESS)
        rc = MPI_Type_create_struct(2, lengths, offsets, types, &whole);
    if (rc == MPI_SUCCESS)
        rc = MPI_Type_commit(&whole);
    if (rc != MPI_SUCCESS)
        return failed(rc, "a type", err);
    (void)MPI_Type_free(&block);
    *ret = whole;
    *ret_count = 1;
    return 0;
}

static void watch(struct xport_mpi *m, struct ckpt_xfer *t, void *request)
{
    t->priv = request;
    t->next = m->active;
    m->active = t;
}

static int mpi_post(struct ckpt_xport *x, struct ckpt_xfer *t, struct ckpt_err *err)
{
    struct xport_mpi *m = self(x);
    MPI_Request *request = malloc(sizeof *request);
    MPI_Datatype type;
    int count, rc;

    if (!request)
        return ckpt_nomem(err);
    if (big_type(t->len, &type, &count, err) < 0) {
        free(request);
        return -1;
    }
    rc = t->send ? MPI_Isend(t->buf, count, type, (int)t->peer, m->data_tag, m->comm, request)
                 : MPI_Irecv(t->buf, count, type, (int)t->peer, m->data_tag, m->comm, request);
    if (type != MPI_BYTE)
        (void)MPI_Type_free(&type);
    if (rc != MPI_SUCCESS) {
        free(request);
        return failed(rc, t->send ? "a send" : "a receive", err);
    }
    watch(m, t, request);
    return 0;
}

/* An all-gather in flight. */
struct gathering {
    MPI_Request request; /* at first */
    int place[];         /* per member, in units: where its bytes are to lie; then their number */
};

/* MPI_Iallgather would copy this rank's bytes between the others', which costs as much as is gained
 * over sends. The vector form takes them from where they are. */
static int mpi_gather(struct ckpt_xport *x, uint8_t division, const void *own, struct ckpt_xfer *t,
                      struct ckpt_err *err)
{
    struct xport_mpi *m = self(x);
    const int count = (int)(t->len / CKPT_GATHER_UNIT);
    ptrdiff_t at = ((const char *)own - (const char *)t->buf) / CKPT_GATHER_UNIT;
    int n, rank;

    (void)MPI_Comm_size(m->division[division], &n);
    (void)MPI_Comm_rank(m->division[division], &rank);
    struct gathering *g = malloc(sizeof *g + 2 * (size_t)n * sizeof *g->place);
    if (!g)
        return ckpt_nomem(err);
    if (at < INT_MIN || at > INT_MAX) {
        at = (ptrdiff_t)rank * count;
        memcpy((char *)t->buf + (size_t)rank * t->len, own, t->len);
    }
    for (int i = 0; i < n; i++) {
        g->place[i] = i == rank ? (int)at : i * count;
        g->place[n + i] = count;
    }
    const int rc = MPI_Iallgatherv(MPI_IN_PLACE, 0, m->unit, t->buf, g->place + n, g->place,
                                   m->unit, m->division[division], &g->request);
    if (rc != MPI_SUCCESS) {
        free(g);
        return failed(rc, "an all-gather", err);
    }
    t->send = true; /* it can't be cancelled either */
    watch(m, t, g);
    return 0;
}

/* Find the communicator of a division, or make it, in which all ranks take part. */
static int split(struct xport_mpi *m, const struct ckpt_device_division *division, MPI_Comm *ret,
                 struct ckpt_err *err)
{
    const int colour = division->colour == CKPT_NONE ? MPI_UNDEFINED : (int)division->colour;

    for (size_t i = 0; i < m->nkept; i++)
        if (m->kept[i].id == division->id) {
            *ret = m->kept[i].comm;
            return 0;
        }
    const int rc = MPI_Comm_split(m->comm, colour, (int)division->place, ret);
    if (rc != MPI_SUCCESS)
        return failed(rc, "splitting the communicator", err);
    if (*ret != MPI_COMM_NULL)
        (void)MPI_Comm_set_errhandler(*ret, MPI_ERRORS_RETURN);
    m->kept[m->nkept++] = (struct kept){division->id, *ret};
    return 0;
}

static void free_kept(struct xport_mpi *m)
{
    while (m->nkept)
        if (m->kept[--m->nkept].comm != MPI_COMM_NULL)
            (void)MPI_Comm_free(&m->kept[m->nkept].comm);
}

/* All ranks know the same divisions, and so decide alike what is made. */
static int mpi_connect(struct ckpt_xport *x, struct ckpt_comm *comm,
                       const struct ckpt_device_division *division, struct ckpt_err *err)
{
    const struct ckpt_device_division all = {.id = 2, .place = x->rank}; /* others are odd */
    struct xport_mpi *m = self(x);

    if (m->nkept + 1 + CKPT_DIVISIONS > KEPT)
        free_kept(m);
    const size_t before = m->nkept;
    int rc = split(m, &all, &m->division[0], err);
    for (int i = 0; i < CKPT_DIVISIONS && rc == 0; i++)
        if (division[i].id)
            rc = split(m, &division[i], &m->division[1 + i], err);
    return m->nkept > before ? ckpt_comm_agree(comm, rc, CONNECT_MS, err) : rc;
}

static int reap_outgoing(struct xport_mpi *m, struct ckpt_err *err)
{
    for (struct outgoing **at = &m->outgoing; *at;) {
        struct outgoing *o = *at;
        int done = 0, rc = MPI_Test(&o->request, &done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS)
            return failed(rc, "a message", err);
        if (!done) {
            at = &o->next;
            continue;
        }
        *at = o->next;
        free(o);
    }
    return 0;
}

static int mpi_progress(struct ckpt_xport *x, bool *ret_moved, struct ckpt_err *err)
{
    struct xport_mpi *m = self(x);

    *ret_moved = false;
    for (struct ckpt_xfer **at = &m->active; *at;) {
        struct ckpt_xfer *t = *at;
        int done = 0, rc = MPI_Test(t->priv, &done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS)
            return failed(rc, "a transfer", err);
        if (!done) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        free(t->priv);
        atomic_store(&t->done, true);
        *ret_moved = true;
    }
    if (*ret_moved)
        m->idle = 0;
    return reap_outgoing(m, err);
}

/* MPI has no wait that another thread could end: return at once for a while, then sleep briefly. */
static void mpi_wait(struct ckpt_xport *x, uint32_t timeout_ms)
{
    struct xport_mpi *m = self(x);
    const struct timespec nap = {0, (m->idle < SPINS ? NAP_US : NAP_US * 20) * 1000};

    m->idle++;
    if (timeout_ms)
        (void)nanosleep(&nap, NULL);
}

static void mpi_kick(struct ckpt_xport *x) { (void)x; }

static int mpi_ctl_send(struct ckpt_xport *x, uint32_t peer, const void *msg, size_t len,
                        struct ckpt_err *err)
{
    struct xport_mpi *m = self(x);
    struct outgoing *o = malloc(sizeof *o + len);

    if (!o)
        return ckpt_nomem(err);
    if (len > INT_MAX) {
        free(o);
        return ckpt_fail(err, CKPT_LIMIT, "a message of %zu bytes is longer than %d", len, INT_MAX);
    }
    memcpy(o->data, msg, len);
    int rc = MPI_Isend(o->data, (int)len, MPI_BYTE, (int)peer, TAG_CTL, m->comm, &o->request);
    if (rc != MPI_SUCCESS) {
        free(o);
        return failed(rc, "a message", err);
    }
    o->next = m->outgoing;
    m->outgoing = o;
    return 0;
}

static int mpi_ctl_recv(struct ckpt_xport *x, struct ckpt_ctl_message **ret, struct ckpt_err *err)
{
    struct xport_mpi *m = self(x);
    MPI_Message message;
    MPI_Status status;
    int there = 0, len = 0;
    int rc = MPI_Improbe(MPI_ANY_SOURCE, TAG_CTL, m->comm, &there, &message, &status);

    if (rc != MPI_SUCCESS)
        return failed(rc, "a probe", err);
    if (!there)
        return 0;
    m->idle = 0;
    (void)MPI_Get_count(&status, MPI_BYTE, &len);
    struct ckpt_ctl_message *in = malloc(sizeof *in);
    unsigned char *data = malloc((size_t)len + 1);
    if (in && data)
        rc = MPI_Mrecv(data, len, MPI_BYTE, &message, &status);
    if (!in || !data || rc != MPI_SUCCESS) {
        free(in);
        free(data);
        return rc != MPI_SUCCESS ? failed(rc, "a message", err) : ckpt_nomem(err);
    }
    *in = (struct ckpt_ctl_message){
        .peer = (uint32_t)status.MPI_SOURCE, .len = (size_t)len, .data = data};
    *ret = in;
    return 1;
}

/* Receives can be cancelled. Sends and all-gathers can't: those that another rank does not take
 * part in get a little time to end, and the communicators are left behind with them. */
static bool mpi_cancel(struct ckpt_xport *x)
{
    struct xport_mpi *m = self(x);
    const uint64_t until = ckpt_now_ms() + GRACE_MS;
    const struct timespec nap = {0, 1000000};
    bool moved;

    for (struct ckpt_xfer *t = m->active; t; t = t->next)
        if (!t->send)
            (void)MPI_Cancel(t->priv);
    while (m->active && ckpt_now_ms() < until) {
        if (mpi_progress(x, &moved, NULL) < 0)
            break;
        if (!moved)
            (void)nanosleep(&nap, NULL);
    }
    bool clean = m->active == NULL;
    m->nkept = 0;
    m->active = NULL; /* MPI still uses what is left, so that the caller keeps the buffers */
    return clean;
}

/* Old sends that no rank has received do no harm: new receives have another tag. */
static void mpi_renew(struct ckpt_xport *x)
{
    struct xport_mpi *m = self(x);

    m->data_tag = m->data_tag < LAST_TAG ? m->data_tag + 1 : TAG_DATA;
}

static void mpi_free(struct ckpt_xport *x)
{
    struct xport_mpi *m = self(x);
    const uint64_t until = ckpt_now_ms() + GRACE_MS;

    while (m->outgoing && reap_outgoing(m, NULL) == 0 && ckpt_now_ms() < until)
        mpi_wait(x, 1);
    while (m->outgoing) {
        struct outgoing *o = m->outgoing;
        m->outgoing = o->next; /* not freed: MPI may still read it */
    }
    free_kept(m);
    (void)MPI_Type_free(&m->unit);
    (void)MPI_Comm_free(&m->comm);
    if (m->finalize)
        (void)MPI_Finalize();
    free(m);
}

static const struct ckpt_xport_ops mpi_ops = {
    .name = "mpi",
    .post = mpi_post,
    .connect = mpi_connect,
    .gather = mpi_gather,
    .progress = mpi_progress,
    .wait = mpi_wait,
    .kick = mpi_kick,
    .ctl_send = mpi_ctl_send,
    .ctl_recv = mpi_ctl_recv,
    .cancel = mpi_cancel,
    .renew = mpi_renew,
    .free = mpi_free,
};

static int make(MPI_Comm mpi, bool finalize, struct ckpt_xport **ret, struct ckpt_err *err)
{
    struct xport_mpi *m;
    int level = 0, rank, size, rc;

    (void)MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE)
        return ckpt_fail(
            err, CKPT_USAGE,
            "MPI was initialised with less than MPI_THREAD_MULTIPLE: call "
            "MPI_Init_thread with that, because loads use MPI on threads of their own");
    if (!(m = calloc(1, sizeof *m)))
        return ckpt_nomem(err);
    if ((rc = MPI_Comm_dup(mpi, &m->comm)) != MPI_SUCCESS) {
        free(m);
        return failed(rc, "duplicating the communicator", err);
    }
    (void)MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN);
    (void)MPI_Type_contiguous(CKPT_GATHER_UNIT, MPI_BYTE, &m->unit);
    (void)MPI_Type_commit(&m->unit);
    (void)MPI_Comm_rank(m->comm, &rank);
    (void)MPI_Comm_size(m->comm, &size);
    m->finalize = finalize;
    m->data_tag = TAG_DATA;
    m->x = (struct ckpt_xport){.ops = &mpi_ops, .rank = (uint32_t)rank, .size = (uint32_t)size};
    *ret = &m->x;
    return 0;
}

CKPT_PUBLIC ckpt_xport_open ckpt_xport_open_from_env;

int ckpt_xport_open_from_env(struct ckpt_xport **ret, struct ckpt_err *err)
{
    int is = 0, level;

    (void)MPI_Initialized(&is);
    if (!is && MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS)
        return ckpt_fail(err, CKPT_PEER, "MPI can't be initialised");
    return make(MPI_COMM_WORLD, !is, ret, err);
}

int ckpt_comm_mpi(MPI_Comm mpi, struct ckpt_comm **ret, struct ckpt_err *err)
{
    struct ckpt_xport *x;

    return make(mpi, false, &x, err) < 0 ? -1 : ckpt_comm_wrap_members(x, ret, err);
}
