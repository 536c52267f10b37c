/* SPDX-License-Identifier: Apache-2.0 */
/* Reads are cut into chunks; each is one request, begun again where it came short. */
#include "io/uring.h"

#ifdef CKPT_LIBURING

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <time.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/bounce.h"
#include "io/iov.h"

enum {
    CHUNK = 512 * 1024, /* read at once */
    LEAST_CHUNKS = 2,   /* smaller ones rather than less */
    NAPS = 100,         /* how often the kernel may refuse to begin anything, 1 ms each */
};

struct chunk {
    struct chunk *next; /* free ones */
    struct ckpt_uring_read *read;
    unsigned char *buf;
    uint64_t off;        /* in the file, of buf[0] */
    uint32_t len, got;   /* bytes asked for; that are there */
    uint32_t from, upto; /* what is wanted of them */
    struct ckpt_iov_cursor to;
};

struct ckpt_uring {
    struct io_uring ring;
    struct chunk *chunk, *free;
    uint32_t nchunk, busy;
    size_t chunk_len;
    int broken;          /* errno of the last call that failed */
    bool gone;           /* and nothing is tried any more */
    struct ckpt_err err; /* the first; code OK: none */
};

static int refused(int error, struct ckpt_err *err)
{
    struct ckpt_err why = {0};

    (void)ckpt_fail_errno(&why, error, "the kernel refuses io_uring_setup");
    return ckpt_fail(err, error == ENOMEM ? CKPT_NOMEM : CKPT_UNSUPPORTED, "%s", why.text);
}

int ckpt_uring_probe(struct ckpt_err *err)
{
    struct io_uring ring;
    int rc = io_uring_queue_init(LEAST_CHUNKS, &ring, 0);

    if (rc < 0)
        return refused(-rc, err);
    struct io_uring_probe *probe = io_uring_get_probe_ring(&ring);
    const bool reads = probe && io_uring_opcode_supported(probe, IORING_OP_READ);
    io_uring_free_probe(probe);
    io_uring_queue_exit(&ring);
    return reads ? 0 : ckpt_fail(err, CKPT_UNSUPPORTED, "this kernel's io_uring can't read files");
}

int ckpt_uring_new(unsigned char *mem, size_t len, struct ckpt_uring **ret, struct ckpt_err *err)
{
    const size_t most = len / LEAST_CHUNKS - len / LEAST_CHUNKS % CKPT_BOUNCE_ALIGN;
    const size_t chunk_len = ckpt_max_u64(ckpt_min_u64(CHUNK, most), CKPT_BOUNCE_ALIGN);
    const uint32_t n = (uint32_t)(len / chunk_len);
    ckpt_cleanup(ckpt_freep) struct chunk *chunk = calloc(n, sizeof *chunk);
    struct ckpt_uring *u = calloc(1, sizeof *u);
    int rc;

    if (!chunk || !u) {
        free(u);
        return ckpt_nomem(err);
    }
    if ((rc = io_uring_queue_init(n, &u->ring, 0)) < 0) {
        free(u);
        return refused(-rc, err);
    }
    for (uint32_t i = 0; i < n; i++) {
        chunk[i].buf = mem + i * chunk_len;
        chunk[i].next = u->free;
        u->free = &chunk[i];
    }
    u->chunk = ckpt_steal(&chunk);
    u->nchunk = n;
    u->chunk_len = chunk_len;
    *ret = u;
    return 0;
}

void ckpt_uring_free(struct ckpt_uring *u)
{
    if (!u)
        return;
    io_uring_queue_exit(&u->ring);
    free(u->chunk);
    free(u);
}

/* ---- one chunk ---- */

/* There are as many entries as chunks. */
static void begin(struct ckpt_uring *u, struct chunk *c)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);

    io_uring_prep_read(sqe, c->read->fd, c->buf + c->got, c->len - c->got, c->off + c->got);
    io_uring_sqe_set_data(sqe, c);
}

static void part_done(struct ckpt_uring *u, struct ckpt_uring_read *r)
{
    struct ckpt_err err = {0};

    if (--r->parts == 0 && r->done(r, &err) < 0 && u->err.code == CKPT_OK)
        u->err = err;
}

static void chunk_done(struct ckpt_uring *u, struct chunk *c)
{
    struct ckpt_uring_read *r = c->read;

    c->read = NULL;
    c->next = u->free;
    u->free = c;
    u->busy--;
    part_done(u, r);
}

/* Error 0: the file ended. */
static void chunk_failed(struct ckpt_uring *u, struct chunk *c, int error)
{
    struct ckpt_uring_read *r = c->read;
    const uint64_t at = c->off + ckpt_max_u64(c->got, c->from);

    if ((!r->error && !r->ended) || at < r->at) {
        r->error = error;
        r->ended = error == 0;
        r->at = at;
    }
    chunk_done(u, c);
}

/* The kernel's word: bytes, or -errno. */
static void chunk_answered(struct ckpt_uring *u, struct chunk *c, int res)
{
    if (res == -EINTR) {
        begin(u, c);
        return;
    }
    if (res < 0) {
        chunk_failed(u, c, -res);
        return;
    }
    c->got += (uint32_t)res;
    if (c->got >= c->upto) {
        ckpt_iov_put(&c->to, c->buf + c->from, c->upto - c->from);
        chunk_done(u, c);
    } else if (res == 0 || c->got % c->read->align != 0) {
        chunk_failed(u, c, 0);
    } else {
        begin(u, c);
    }
}

/* ---- the ring ---- */

static bool reap(struct ckpt_uring *u)
{
    struct io_uring_cqe *cqe;
    bool any = false;

    while (io_uring_peek_cqe(&u->ring, &cqe) == 0) {
        struct chunk *c = io_uring_cqe_get_data(cqe);
        const int res = cqe->res;
        io_uring_cqe_seen(&u->ring, cqe);
        chunk_answered(u, c, res);
        any = true;
    }
    return any;
}

/* The kernel begins nothing, and has nothing: what waits to be begun is given up. It stays in the
 * queue, which is not used again. */
static void give_up(struct ckpt_uring *u)
{
    u->gone = true;
    for (uint32_t i = 0; i < u->nchunk; i++)
        if (u->chunk[i].read)
            chunk_failed(u, &u->chunk[i], u->broken);
}

/* Hand over what is to begin, and wait for an answer. */
static void turn(struct ckpt_uring *u)
{
    static const struct timespec nap = {0, 1000 * 1000};

    for (int naps = 0; naps < NAPS;) {
        const int rc = io_uring_submit_and_wait(&u->ring, 1);
        const uint32_t waiting = io_uring_sq_ready(&u->ring);
        if (reap(u))
            return;
        if (rc >= 0 || rc == -EINTR) /* by a signal */
            continue;
        u->broken = -rc;
        naps = waiting == u->busy ? naps + 1 : 0;
        (void)nanosleep(&nap, NULL);
    }
    give_up(u);
}

static struct chunk *take_chunk(struct ckpt_uring *u)
{
    while (!u->free)
        turn(u);
    struct chunk *c = u->free;
    u->free = c->next;
    u->busy++;
    return c;
}

void ckpt_uring_add(struct ckpt_uring *u, struct ckpt_uring_read *r)
{
    const uint64_t end = r->off + r->len;
    struct ckpt_iov_cursor to = {r->iov, 0};

    r->parts = 1;
    r->error = 0;
    r->ended = false;
    for (uint64_t off = r->off, hi; off < end && !r->error && !r->ended; off = hi) {
        struct chunk *c = take_chunk(u);
        const uint64_t lo = off - off % r->align;
        hi = ckpt_min_u64(end, lo + u->chunk_len);
        *c = (struct chunk){.read = r, .buf = c->buf, .off = lo, .to = to};
        c->len = (uint32_t)((hi - lo + r->align - 1) / r->align * r->align);
        c->from = (uint32_t)(off - lo);
        c->upto = (uint32_t)(hi - lo);
        ckpt_iov_put(&to, NULL, (size_t)(hi - off));
        r->parts++;
        if (u->gone)
            chunk_failed(u, c, u->broken);
        else
            begin(u, c);
    }
    part_done(u, r);
}

int ckpt_uring_wait(struct ckpt_uring *u, struct ckpt_err *err)
{
    while (u->busy)
        turn(u);
    const struct ckpt_err first = u->err;
    u->err = (struct ckpt_err){0};
    return first.code == CKPT_OK ? 0 : ckpt_fail(err, first.code, "%s", first.text);
}

#else /* nobody gets a ring, so nobody uses one */

int ckpt_uring_probe(struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED, "this build has no liburing");
}

int ckpt_uring_new(unsigned char *mem, size_t len, struct ckpt_uring **ret, struct ckpt_err *err)
{
    (void)mem, (void)len, (void)ret;
    return ckpt_uring_probe(err);
}

void ckpt_uring_free(struct ckpt_uring *u) { (void)u; }

void ckpt_uring_add(struct ckpt_uring *u, struct ckpt_uring_read *r) { (void)u, (void)r; }

int ckpt_uring_wait(struct ckpt_uring *u, struct ckpt_err *err)
{
    (void)u, (void)err;
    return 0;
}

#endif
