/* SPDX-License-Identifier: Apache-2.0 */
/* A regular file as a source. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/fdio.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/far/calls.h"
#include "io/far/files.h"
#include "io/iov.h"
#include "io/source.h"
#include "io/storage.h"

/* ---- a bounded number of open files: a ring of descriptors with a clock hand ---- */

enum { MOST_OPEN = 1024, RESERVED = 64, LEAST_OPEN = 16 };

/* One file of the pool; belongs to the source that embeds it, which must drop it before the pool
 * goes. Zero-initialised, but fd is -1. */
struct fdslot {
    int fd;        /* -1: not open */
    uint32_t pins; /* users right now; > 0 is never evicted */
    uint32_t at;   /* place in the pool's ring while open */
    bool recent;   /* used since the hand of the clock passed */
};

struct ckpt_fdpool {
    struct ckpt_fdpool *link; /* the next one of this process; protected by pools_lock */
    atomic_uint refs;
    size_t max_open;
    pthread_mutex_t lock; /* everything below, and the slots' fields */
    CKPT_VEC(struct fdslot *) ring;
    size_t hand;
};

/* Threads of ours may hold a pool's lock for a moment at any time (io/far/files.h), so all of them
 * are taken before a fork: in the child nobody would give them back. */
static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ckpt_fdpool *pools;

static void lock_pools(void)
{
    (void)pthread_mutex_lock(&pools_lock);
    for (struct ckpt_fdpool *p = pools; p; p = p->link)
        (void)pthread_mutex_lock(&p->lock);
}

static void unlock_pools(void)
{
    for (struct ckpt_fdpool *p = pools; p; p = p->link)
        (void)pthread_mutex_unlock(&p->lock);
    (void)pthread_mutex_unlock(&pools_lock);
}

static void watch_forks(void) { (void)pthread_atfork(lock_pools, unlock_pools, unlock_pools); }

static void remember_pool(struct ckpt_fdpool *p)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, watch_forks);
    (void)pthread_mutex_lock(&pools_lock);
    p->link = pools;
    pools = p;
    (void)pthread_mutex_unlock(&pools_lock);
}

static void forget_pool(const struct ckpt_fdpool *p)
{
    struct ckpt_fdpool **at = &pools;

    (void)pthread_mutex_lock(&pools_lock);
    while (*at != p)
        at = &(*at)->link;
    *at = p->link;
    (void)pthread_mutex_unlock(&pools_lock);
}

static size_t default_budget(void)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_NOFILE, &lim) < 0)
        return LEAST_OPEN;
    if (lim.rlim_cur >= MOST_OPEN + RESERVED)
        return MOST_OPEN;
    return lim.rlim_cur < LEAST_OPEN + RESERVED ? LEAST_OPEN : (size_t)lim.rlim_cur - RESERVED;
}

int ckpt_fdpool_new(size_t max_open, struct ckpt_fdpool **ret, struct ckpt_err *err)
{
    struct ckpt_fdpool *p = calloc(1, sizeof *p);

    if (!p)
        return ckpt_nomem(err);
    atomic_init(&p->refs, 1);
    p->max_open = max_open ? max_open : default_budget();
    (void)pthread_mutex_init(&p->lock, NULL);
    remember_pool(p);
    *ret = p;
    return 0;
}

void ckpt_fdpool_unref(struct ckpt_fdpool *pool)
{
    if (!pool || atomic_fetch_sub(&pool->refs, 1) != 1)
        return;
    forget_pool(pool);
    (void)pthread_mutex_destroy(&pool->lock);
    ckpt_vec_release(&pool->ring);
    free(pool);
}

/* Takes a slot out of the ring; its descriptor is the caller's to close. */
static int remove_slot(struct ckpt_fdpool *p, struct fdslot *slot)
{
    int fd = slot->fd;

    p->ring.ptr[slot->at] = p->ring.ptr[--p->ring.len];
    p->ring.ptr[slot->at]->at = slot->at;
    slot->fd = -1;
    return fd;
}

/* A descriptor to close so that there is room for one more, or -1: there is room, or all are in
 * use. */
static int evict(struct ckpt_fdpool *p)
{
    if (p->ring.len < p->max_open)
        return -1;
    for (size_t i = 0; i < 2 * p->ring.len; i++) {
        if (p->hand >= p->ring.len)
            p->hand = 0;
        struct fdslot *s = p->ring.ptr[p->hand];
        if (s->pins == 0 && !s->recent)
            return remove_slot(p, s);
        s->recent = false;
        p->hand++;
    }
    return -1;
}

/* Put a freshly opened fd into the slot. If another thread was faster, its descriptor stays and
 * ours is closed. */
static int install(struct ckpt_fdpool *p, struct fdslot *slot, int *fd, struct ckpt_err *err)
{
    int closing = -1, result = 0;

    (void)pthread_mutex_lock(&p->lock);
    if (slot->fd < 0) {
        closing = evict(p);
        if (ckpt_vec_push(&p->ring, slot) < 0) {
            result = ckpt_nomem(err);
        } else {
            slot->at = (uint32_t)(p->ring.len - 1);
            slot->fd = *fd;
            *fd = -1;
        }
    }
    if (result == 0) {
        slot->pins++;
        slot->recent = true;
    }
    (void)pthread_mutex_unlock(&p->lock);
    ckpt_closep(&closing);
    return result;
}

static bool pin_if_open(struct ckpt_fdpool *p, struct fdslot *slot)
{
    (void)pthread_mutex_lock(&p->lock);
    bool open = slot->fd >= 0;
    if (open) {
        slot->pins++;
        slot->recent = true;
    }
    (void)pthread_mutex_unlock(&p->lock);
    return open;
}

/* Nobody else needs the descriptor of get_fd. */
static void put_fd(struct ckpt_fdpool *pool, struct fdslot *slot)
{
    int closing = -1;

    (void)pthread_mutex_lock(&pool->lock);
    slot->pins--;
    if (slot->pins == 0 && pool->ring.len > pool->max_open)
        closing = remove_slot(pool, slot);
    (void)pthread_mutex_unlock(&pool->lock);
    ckpt_closep(&closing);
}

/* Give the pool an open descriptor for the slot: *fd becomes -1 if it was taken, else it stays the
 * caller's. */
static int adopt(struct ckpt_fdpool *pool, struct fdslot *slot, int *fd, struct ckpt_err *err)
{
    if (install(pool, slot, fd, err) < 0)
        return -1;
    put_fd(pool, slot);
    return 0;
}

/* Close the file if open. Nobody may hold it. */
static void drop(struct ckpt_fdpool *pool, struct fdslot *slot)
{
    int closing = -1;

    (void)pthread_mutex_lock(&pool->lock);
    if (slot->fd >= 0)
        closing = remove_slot(pool, slot);
    (void)pthread_mutex_unlock(&pool->lock);
    ckpt_closep(&closing);
}

size_t ckpt_fdpool_open_count(struct ckpt_fdpool *pool)
{
    (void)pthread_mutex_lock(&pool->lock);
    size_t n = pool->ring.len;
    (void)pthread_mutex_unlock(&pool->lock);
    return n;
}

/* ---- the source ---- */

struct source_file {
    struct ckpt_source source;
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    const char *name;       /* interned below dir */
    uint64_t base;          /* of the first byte in the file that is opened: an archive, or 0 */
    struct ckpt_file_id id; /* of the file that is opened */
    char *tag; /* of an object of a bucket, which has no descriptor: its ETag; "": of a file that
                  only other machines have, likewise; or NULL */
    struct fdslot slot;
    struct fdslot direct;   /* a descriptor of O_DIRECT */
    atomic_uint align;      /* that it asks for; 0: not known yet; 1: it can't be had */
    atomic_bool was_read;   /* by a request, not only its header */
    atomic_bool was_opened; /* false: all bytes were recalled (ckpt_dir_recall) */
    _Atomic(struct ckpt_storage *) storage; /* NULL: not known yet */
};

static struct source_file *self(const struct ckpt_source *s) { return (struct source_file *)s; }

static int changed(const struct source_file *f, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened",
                     ckpt_dir_path(f->dir), f->name);
}

/* Note which filesystem it is on. */
static void know_storage(struct source_file *f, int fd, const struct ckpt_dir_found *found)
{
    if (!atomic_load(&f->storage))
        atomic_store(&f->storage, ckpt_storage_of(fd, found->device));
}

/* Is the file, which is none of a bucket, on storage at a distance? */
static bool is_far_file(struct source_file *f)
{
    const struct ckpt_storage *s = atomic_load(&f->storage);

    return !f->tag && (s ? ckpt_storage_is_far(s, ckpt_dir_far_options(f->dir)->rule)
                         : ckpt_dir_is_far(f->dir));
}

/* May a request about it hang? (ckpt_dir_may_hang) */
static bool may_hang(struct source_file *f)
{
    return !f->tag &&
           ckpt_storage_may_hang(atomic_load(&f->storage), ckpt_dir_far_options(f->dir)->rule);
}

/* The descriptor in one of the file's two slots, open until put_fd. Opens the file if need be,
 * which must still be the one that was registered. */
static int get_fd(struct source_file *f, struct fdslot *slot, int *ret_fd, struct ckpt_err *err)
{
    if (!pin_if_open(f->pool, slot)) {
        ckpt_cleanup(ckpt_closep) int fd = -1;
        struct ckpt_dir_found now;
        if (ckpt_dir_open_file(f->dir, f->name, &fd, &now, err) < 0) {
            /* it was there when the checkpoint was opened */
            if (err && err->code == CKPT_MISSING)
                err->code = CKPT_STALE;
            return -1;
        }
        if (!ckpt_file_id_eq(&now.id, &f->id))
            return changed(f, err);
        know_storage(f, fd, &now);
        if (install(f->pool, slot, &fd, err) < 0)
            return -1;
    }
    atomic_store_explicit(&f->was_opened, true, memory_order_relaxed);
    *ret_fd = slot->fd; /* pinned, so no other thread changes it */
    return 0;
}

/* Is it a file that only other machines have? */
static bool is_elsewhere(const struct source_file *f) { return f->tag && !*f->tag; }

static int read_object(struct source_file *f, const struct ckpt_source_run *run,
                       enum ckpt_read_how how, struct ckpt_err *err)
{
    atomic_store_explicit(&f->was_opened, true, memory_order_relaxed);
    if (is_elsewhere(f))
        return ckpt_dir_read_elsewhere(f->dir, f->name, run, 1, err);
    return ckpt_dir_read_object(f->dir, f->name, f->tag, f->source.size, run->iov, run->n, run->off,
                                how, err);
}

/* ---- without the page cache ---- */

/* If more than this fraction of a range is in the page cache, O_DIRECT is not used. */
#define COLD 0.125

static bool wants_direct(struct source_file *f, uint64_t len, uint64_t off,
                         const struct ckpt_route *route)
{
    return !f->tag && route->direct != CKPT_DIRECT_NONE && len >= CKPT_DIRECT_LEAST &&
           atomic_load(&f->align) != 1 &&
           !(route->direct == CKPT_DIRECT_COLD &&
             ckpt_source_resident(&f->source, off, len) > COLD);
}

/* Get the descriptor for O_DIRECT, which is a separate one because the flag belongs to the open
 * file. 0: it is not available. */
static uint32_t get_direct(struct source_file *f, int *ret_fd)
{
    if (get_fd(f, &f->direct, ret_fd, NULL) < 0)
        return 0;
    /* each time: the descriptor may have been closed and opened again */
    const uint32_t align = ckpt_direct_begin(*ret_fd);
    atomic_store(&f->align, align ? align : 1);
    if (!align)
        put_fd(f->pool, &f->direct);
    return align;
}

/* Read past the page cache. False: the route does not say so, or that can't be done, and the memory
 * is undefined. */
static bool read_direct(struct source_file *f, const struct ckpt_route *route,
                        const struct ckpt_source_run *run)
{
    uint32_t align;
    int fd;

    if (!route || !route->bounce || !route->bounce->len ||
        !wants_direct(f, ckpt_iov_len(run->iov, run->n), run->off, route) ||
        !(align = get_direct(f, &fd)))
        return false;
    const bool good =
        ckpt_direct_read(fd, align, run->iov, run->n, f->base + run->off, route->bounce);
    put_fd(f->pool, &f->direct);
    if (!good)
        atomic_store(&f->align, 1);
    return good;
}

/* ---- through the page cache ---- */

/* The error of ckpt_fdio_preadv, at this byte of the source. */
static int fail_read(const struct source_file *f, int rc, uint64_t off, struct ckpt_err *err)
{
    if (rc == CKPT_FDIO_END)
        return ckpt_fail(err, CKPT_STALE,
                         "'%s/%s' ends at byte %" PRIu64 ", it had %" PRIu64 " when it was opened",
                         ckpt_dir_path(f->dir), f->name, off, f->source.size);
    return ckpt_fail_errno(err, rc, "reading '%s/%s' at byte %" PRIu64, ckpt_dir_path(f->dir),
                           f->name, off);
}

/* Read in this thread, without asking what the directory remembers. */
static int read_real(struct source_file *f, enum ckpt_read_how how,
                     const struct ckpt_source_run *run, struct ckpt_err *err)
{
    uint64_t off = f->base + run->off;
    int fd, rc;

    if (f->tag)
        return read_object(f, run, how, err);
    if (get_fd(f, &f->slot, &fd, err) < 0)
        return -1;
    rc = ckpt_fdio_preadv(fd, run->iov, run->n, &off, 0);
    off -= f->base;
    put_fd(f->pool, &f->slot);
    return rc ? fail_read(f, rc, off, err) : 0;
}

/* ---- storage that may hang: small reads and questions about a descriptor, as calls ---- */

enum { CALL_MOST = 1 << 20 }; /* bytes of one call */

struct file_call {
    struct ckpt_call call;
    struct source_file *f; /* referenced; its descriptor is pinned until the call is freed */
    int fd;
    int rc; /* of the read, as ckpt_fdio_preadv's; or of the question */
    struct ckpt_err err;
    struct ckpt_file_id id;
    bool unlinked;
    uint64_t took_ns, off;
    size_t len; /* 0: it asks for the identity */
    unsigned char buf[];
};

static void make_file_call(struct ckpt_call *call)
{
    struct file_call *c = (struct file_call *)call;
    struct iovec iov = {c->buf, c->len};
    const uint64_t begin = ckpt_now_ns();

    c->rc = c->len ? ckpt_fdio_preadv(c->fd, &iov, 1, &c->off, 0)
                   : ckpt_file_id_of(c->fd, &c->id, &c->unlinked, &c->err);
    c->took_ns = ckpt_now_ns() - begin;
}

static void free_file_call(struct ckpt_call *call)
{
    struct file_call *c = (struct file_call *)call;

    put_fd(c->f->pool, &c->f->slot);
    ckpt_source_unref(&c->f->source);
    free(c);
}

static const struct ckpt_call_ops file_call_ops = {.make = make_file_call, .free = free_file_call};

/* Read what the page cache has, which needs no thread. False: it has not all of it. */
static bool read_at_once(struct file_call *c)
{
    struct iovec iov = {c->buf, c->len};
    uint64_t off = c->off;

    if (ckpt_fdio_preadv(c->fd, &iov, 1, &off, RWF_NOWAIT) != 0)
        return false;
    c->off = off;
    return true;
}

/* Read len bytes of the file that is opened, at most CALL_MOST, from `off` on; 0: ask for its
 * identity. The caller frees what is returned. NULL and *err: there was no answer. */
static struct file_call *call_file(struct source_file *f, uint64_t off, size_t len,
                                   struct ckpt_err *err)
{
    struct file_call *c = malloc(sizeof *c + len);

    if (!c) {
        (void)ckpt_nomem(err);
        return NULL;
    }
    *c = (struct file_call){.call = {.ops = &file_call_ops, .storage = atomic_load(&f->storage)},
                            .off = off,
                            .len = len};
    if (get_fd(f, &f->slot, &c->fd, err) < 0) {
        free(c);
        return NULL;
    }
    (void)ckpt_source_ref(&f->source);
    c->f = f;
    if (len && read_at_once(c))
        return c;
    if (ckpt_call_make(&c->call, ckpt_dir_far_options(f->dir), err) == 0)
        return c;
    (void)ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(f->dir), f->name);
    return NULL;
}

/* Read as read_real does. *took_ns is the time that storage took. */
static int read_by_calls(struct source_file *f, const struct ckpt_source_run *run,
                         uint64_t *took_ns, struct ckpt_err *err)
{
    struct ckpt_iov_cursor to = {run->iov, 0};
    uint64_t off = f->base + run->off;
    const uint64_t end = off + ckpt_iov_len(run->iov, run->n);

    *took_ns = 0;
    while (off < end) {
        const size_t len = (size_t)ckpt_min_u64(end - off, CALL_MOST);
        struct file_call *c = call_file(f, off, len, err);
        if (!c)
            return -1;
        const int rc = c->rc;
        off = c->off;
        *took_ns += c->took_ns;
        if (rc == 0)
            ckpt_iov_put(&to, c->buf, len);
        free_file_call(&c->call);
        if (rc)
            return fail_read(f, rc, off - f->base, err);
    }
    return 0;
}

/* Read what is in no part: by calls, if it may hang, but large reads of storage that answers at
 * once without, as these would cost more time than they take. */
static int read_buffered(struct source_file *f, enum ckpt_read_how how,
                         const struct ckpt_source_run *run, uint64_t *took_ns, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();

    if (is_far_file(f) || (may_hang(f) && ckpt_iov_len(run->iov, run->n) < CKPT_FAR_LEAST))
        return read_by_calls(f, run, took_ns, err);
    const int rc = read_real(f, how, run, err);
    *took_ns = ckpt_now_ns() - begin;
    return rc;
}

/* ---- storage at a distance ---- */

/* A read of which the storage's round trip is most of the time. */
enum { SMALL = 64 * 1024 };

static void *ref_file(void *file) { return ckpt_source_ref(file); }

static void unref_file(void *file) { ckpt_source_unref(file); }

enum direct_result { DIRECT_DONE, DIRECT_REFUSED, DIRECT_FAILED };

/* Read a part with O_DIRECT, in one call: whole blocks, for which its memory has room. */
static enum direct_result fetch_direct(struct source_file *f, unsigned char *buf, size_t len,
                                       uint64_t off)
{
    enum direct_result result = DIRECT_FAILED;
    uint32_t align;
    ssize_t n;
    int fd;

    if (!(align = get_direct(f, &fd)))
        return DIRECT_REFUSED;
    if (off % align != 0 || CKPT_PARTS_UNIT % align != 0) {
        result = DIRECT_REFUSED;
    } else {
        do
            n = pread(fd, buf, (len + align - 1) / align * align, (off_t)off);
        while (n < 0 && errno == EINTR);
        if (n >= 0 && (size_t)n >= len)
            result = DIRECT_DONE;
        else if (n < 0 && (errno == EINVAL || errno == EOPNOTSUPP))
            result = DIRECT_REFUSED;
    }
    put_fd(f->pool, &f->direct);
    return result;
}

static int fetch_buffered(struct source_file *f, unsigned char *buf, size_t len, uint64_t off,
                          struct ckpt_err *err)
{
    struct iovec iov = {buf, len};
    const struct ckpt_source_run run = {off - f->base, &iov, 1};
    int fd;

    if (get_fd(f, &f->slot, &fd, err) < 0)
        return -1;
    /* so that the kernel makes all requests of the part at once */
    (void)posix_fadvise(fd, (off_t)off, (off_t)len, POSIX_FADV_WILLNEED);
    put_fd(f->pool, &f->slot);
    return read_real(f, CKPT_READ_EXACT, &run, err);
}

static int fetch_part(struct source_file *f, bool shared, unsigned char *buf, size_t len,
                      uint64_t off, struct ckpt_err *err)
{
    static const struct ckpt_route cold = {.direct = CKPT_DIRECT_COLD};
    struct ckpt_storage *s = atomic_load(&f->storage);

    if (!s || shared || !wants_direct(f, len, off - f->base, &cold))
        return fetch_buffered(f, buf, len, off, err);
    const struct ckpt_storage_read r = ckpt_storage_read_begins(s);
    const enum direct_result direct = r.direct ? fetch_direct(f, buf, len, off) : DIRECT_FAILED;
    if (direct == DIRECT_REFUSED)
        ckpt_storage_refused_direct(s);
    const int rc = direct == DIRECT_DONE ? 0 : fetch_buffered(f, buf, len, off, err);
    ckpt_storage_read_ends(s, &r, len);
    return rc;
}

/* struct ckpt_far_file.read: offsets are those of the file that is opened. */
static int fetch(void *file, bool shared, unsigned char *buf, size_t len, uint64_t off,
                 struct ckpt_err *err)
{
    struct source_file *f = file;
    const uint64_t begun_ms = ckpt_now_ms();
    struct ckpt_err own = {0};

    if (fetch_part(f, shared, buf, len, off, &own) < 0 && own.code == CKPT_TIMEOUT)
        return ckpt_err_move(err, &own);
    ckpt_storage_heard(atomic_load(&f->storage), begun_ms);
    return own.code ? ckpt_err_move(err, &own) : 0;
}

/* The name of the file's bytes: its identity. */
static XXH128_hash_t far_name(const struct source_file *f)
{
    XXH128_hash_t h = XXH3_128bits(&f->id, sizeof f->id);

    h.high64 |= 1; /* not zero */
    return h;
}

/* Read by parts; 1: to be left to the page cache, or as ckpt_far_read. A load says by its route
 * that others on this machine will read the same. */
static int read_far(struct source_file *f, const struct ckpt_source_way *way,
                    const struct ckpt_source_run *run, struct ckpt_err *err)
{
    const enum ckpt_read_how how = way->how;
    const bool shared =
        how == CKPT_READ_EXACT && way->route && way->route->direct == CKPT_DIRECT_NONE;
    const struct ckpt_far_options *opt = ckpt_dir_far_options(f->dir);
    const struct ckpt_far_file what = {
        ref_file, unref_file, fetch, f, opt->connections ? opt->connections : CKPT_FAR_AT_ONCE,
        shared};
    const struct ckpt_far_object o = {far_name(f), f->base + f->source.size, &what,
                                      ckpt_far_timeout_ms(opt)};
    struct ckpt_far *far = ckpt_far_files();
    const uint64_t off = f->base + run->off, len = ckpt_iov_len(run->iov, run->n);
    struct ckpt_err own = {0};

    if (ckpt_read_waits(how) && len < CKPT_FAR_LEAST && !ckpt_far_has_all(far, &o, off, off + len))
        return 1;
    const int rc = ckpt_far_read(far, &o, run->iov, run->n, off, how, &own);
    if (rc < 0 && !strstr(own.text, f->name))
        (void)ckpt_err_in(&own, "'%s/%s'", ckpt_dir_path(f->dir), f->name);
    return rc < 0 ? ckpt_err_move(err, &own) : rc;
}

/* ---- by whichever way ---- */

/* Read, and tell how long a small read took that decides whether its filesystem answers at once. */
static int read_timed(struct source_file *f, enum ckpt_read_how how,
                      const struct ckpt_source_run *run, struct ckpt_err *err)
{
    struct ckpt_storage *s = atomic_load(&f->storage);
    const uint64_t len = ckpt_iov_len(run->iov, run->n);
    const bool counts = ckpt_storage_is_undecided(s) && len <= SMALL &&
                        ckpt_source_resident(&f->source, run->off, len) == 0;
    uint64_t took_ns;
    const int rc = read_buffered(f, how, run, &took_ns, err);

    if (counts && rc == 0)
        ckpt_storage_answered(s, took_ns);
    return rc;
}

/* Read by parts or from the page cache, without asking what the directory remembers. */
static int read_now(struct source_file *f, const struct ckpt_source_way *way,
                    const struct ckpt_source_run *run, struct ckpt_err *err)
{
    const int rc = is_far_file(f) ? read_far(f, way, run, err) : 1;

    return rc != 1 ? rc : read_timed(f, way->how, run, err);
}

static int read_and_keep(struct source_file *f, const struct ckpt_source_way *way,
                         const struct ckpt_source_run *run, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct iovec *copy = malloc((size_t)run->n * sizeof *copy);

    if (!copy)
        return ckpt_nomem(err);
    memcpy(copy, run->iov, (size_t)run->n * sizeof *copy); /* reading modifies it */
    if (read_now(f, way, run, err) < 0)
        return -1;
    ckpt_dir_keep(f->dir, f->name, copy, run->n, f->base + run->off);
    return 0;
}

/* Read a run, and wait for it. */
static int read_run(struct source_file *f, const struct ckpt_source_way *way,
                    const struct ckpt_source_run *run, struct ckpt_err *err)
{
    const enum ckpt_dir_memory memory = ckpt_dir_memory(f->dir);

    if (!is_far_file(f) && read_direct(f, way->route, run))
        return 0;
    if (memory == CKPT_DIR_KEEPS)
        return read_and_keep(f, way, run, err);
    if (memory == CKPT_DIR_RECALLS &&
        ckpt_dir_recall(f->dir, f->name, run->iov, run->n, f->base + run->off))
        return 0;
    return read_now(f, way, run, err);
}

/* Read runs if the page cache has them; 1 if not. Large reads may be cut anywhere: what came is
 * kept, the rest is asked for again. While a directory keeps or recalls what is read, bytes of the
 * page cache, of which it hears nothing, do not count. */
static int read_cached(struct source_file *f, const struct ckpt_source_run *run, size_t n)
{
    int fd, rc = 0;

    if (ckpt_dir_memory(f->dir) != CKPT_DIR_FORGETS || get_fd(f, &f->slot, &fd, NULL) < 0)
        return 1;
    for (size_t i = 0; i < n && rc == 0; i++) {
        uint64_t off = f->base + run[i].off;
        rc = ckpt_fdio_preadv(fd, run[i].iov, run[i].n, &off, RWF_NOWAIT);
    }
    put_fd(f->pool, &f->slot);
    return rc != 0;
}

/* Read runs of which parts or the page cache have all bytes; 1 if not. */
static int read_held(struct source_file *f, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n)
{
    int rc = is_far_file(f) && ckpt_dir_memory(f->dir) == CKPT_DIR_FORGETS ? 0 : 1;

    for (size_t i = 0; i < n && rc == 0; i++)
        rc = read_far(f, way, &run[i], NULL);
    return rc == 0 ? 0 : read_cached(f, run, n);
}

/* Read runs of a file that only other machines have: all of them in few requests, unless they are
 * to be kept or recalled. Nothing is cached here, nor fetched ahead. */
static int read_elsewhere(struct source_file *f, const struct ckpt_source_way *way,
                          const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    int rc = 0;

    if (way->how == CKPT_READ_CACHED || way->how == CKPT_READ_PREFETCH)
        return way->how == CKPT_READ_CACHED;
    if (ckpt_dir_memory(f->dir) == CKPT_DIR_FORGETS) {
        atomic_store_explicit(&f->was_opened, true, memory_order_relaxed);
        return ckpt_dir_read_elsewhere(f->dir, f->name, run, n, err);
    }
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = read_run(f, way, &run[i], err);
    return rc;
}

static int file_read(struct ckpt_source *s, const struct ckpt_source_way *way,
                     const struct ckpt_source_run *run, size_t n, struct ckpt_err *err)
{
    struct source_file *f = self(s);
    const bool waits = ckpt_read_waits(way->how);
    int rc = 0;

    if (is_elsewhere(f))
        return read_elsewhere(f, way, run, n, err);

    if (!f->tag && way->how == CKPT_READ_CACHED)
        return read_held(f, way, run, n);
    /* nothing is fetched for near files, which the kernel reads ahead, nor for what others recall
     */
    if (!f->tag && !waits && (!is_far_file(f) || ckpt_dir_memory(f->dir) == CKPT_DIR_RECALLS))
        return 0;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = waits    ? read_run(f, way, &run[i], err)
             : f->tag ? read_object(f, &run[i], way->how, err)
                      : read_far(f, way, &run[i], err);
    return rc;
}

/* ---- changes ---- */

/* The identity of the descriptor. */
static int identify(struct source_file *f, struct ckpt_file_id *ret, bool *ret_unlinked,
                    struct ckpt_err *err)
{
    int fd, rc;

    if (may_hang(f)) {
        struct file_call *c = call_file(f, 0, 0, err);
        if (!c)
            return -1;
        rc = c->rc;
        *ret = c->id;
        *ret_unlinked = c->unlinked;
        if (rc < 0)
            (void)ckpt_err_move(err, &c->err);
        free_file_call(&c->call);
    } else {
        if (get_fd(f, &f->slot, &fd, err) < 0)
            return -1;
        rc = ckpt_file_id_of(fd, ret, ret_unlinked, err);
        put_fd(f->pool, &f->slot);
    }
    return rc < 0 ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(f->dir), f->name) : 0;
}

/* A file that was renamed over or unlinked has a new ctime but its old bytes: a descriptor that we
 * hold goes on serving them. */
static int file_check(struct ckpt_source *s, struct ckpt_err *err)
{
    struct source_file *f = self(s);
    struct ckpt_file_id now;
    bool unlinked;

    if (!atomic_load_explicit(&f->was_opened, memory_order_relaxed))
        return 0;
    atomic_store_explicit(&f->was_read, true, memory_order_relaxed);
    if (f->tag) /* every request says which ETag the object must have */
        return 0;
    if (identify(f, &now, &unlinked, err) < 0)
        return -1;
    ckpt_dir_known_as(f->dir, f->name, &now);
    if (unlinked)
        now.ctime_ns = f->id.ctime_ns;
    return ckpt_file_id_eq(&now, &f->id) ? 0 : changed(f, err);
}

static char *file_name(const struct ckpt_source *s)
{
    return ckpt_asprintf("%s/%s", ckpt_dir_path(self(s)->dir), self(s)->name);
}

static void file_free(struct ckpt_source *s)
{
    struct source_file *f = self(s);

    drop(f->pool, &f->slot);
    drop(f->pool, &f->direct);
    ckpt_fdpool_unref(f->pool);
    ckpt_dir_unref(f->dir);
    free(f->tag);
    free(f);
}

static bool file_same(const struct ckpt_source *a, const struct ckpt_source *b)
{
    return ckpt_file_id_eq(&self(a)->id, &self(b)->id);
}

static const struct ckpt_source_ops file_ops = {.read = file_read,
                                                .check = file_check,
                                                .name = file_name,
                                                .free = file_free,
                                                .same = file_same};

int ckpt_source_file_prepare(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                             struct ckpt_source **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct source_file *f = calloc(1, sizeof *f);

    if (!f || !(f->name = ckpt_dir_intern(dir, name)))
        return ckpt_nomem(err);
    f->source.ops = &file_ops;
    atomic_init(&f->source.refs, 1);
    f->slot.fd = f->direct.fd = -1;
    f->dir = ckpt_dir_ref(dir);
    atomic_fetch_add(&pool->refs, 1);
    f->pool = pool;
    *ret = &ckpt_steal(&f)->source;
    return 0;
}

int ckpt_source_file_open(struct ckpt_source *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    struct source_file *f = self(s);
    struct ckpt_dir_found found;

    if (ckpt_dir_find_file(f->dir, f->name, &fd, &found, err) < 0)
        return -1;
    f->source.size = found.extent.len;
    f->base = found.extent.off;
    f->id = found.id;
    if ((*found.tag || ckpt_dir_elsewhere(f->dir, f->name)) && !(f->tag = strdup(found.tag)))
        return ckpt_nomem(err);
    atomic_store_explicit(&f->was_opened, fd >= 0, memory_order_relaxed);
    if (fd >= 0)
        know_storage(f, fd, &found);
    /* its header is read next: keep the descriptor */
    return fd < 0 ? 0 : adopt(f->pool, &f->slot, &fd, err);
}

int ckpt_source_file_new(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_source **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (ckpt_source_file_prepare(dir, name, pool, &s, err) < 0 || ckpt_source_file_open(s, err) < 0)
        return -1;
    *ret = ckpt_steal(&s);
    return 0;
}

bool ckpt_source_file_id(const struct ckpt_source *s, struct ckpt_file_id *ret)
{
    if (s->ops != &file_ops)
        return false;
    *ret = self(s)->id;
    return true;
}

bool ckpt_source_is_file(const struct ckpt_source *s, const struct ckpt_dir_found *found)
{
    return s->ops == &file_ops && ckpt_file_id_eq(&self(s)->id, &found->id) &&
           self(s)->base == found->extent.off && s->size == found->extent.len;
}

int ckpt_source_file_verify(const struct ckpt_source *s, bool unread, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_closep) int fd = -1;
    const struct source_file *f = self(s);
    struct ckpt_err own = {0};
    struct ckpt_dir_found now;
    int rc;

    if (!s || s->ops != &file_ops || !(unread || (atomic_load(&f->was_read) && !f->tag)))
        return 0;
    rc = unread ? ckpt_dir_open_file(f->dir, f->name, &fd, &now, &own)
                : ckpt_dir_look(f->dir, f->name, &now, &own);
    if (rc < 0)
        return own.code == CKPT_MISSING && !unread ? 0 : ckpt_err_move(err, &own);
    return ckpt_file_id_eq(&now.id, &f->id) ? 0 : changed(f, err);
}

struct ckpt_source *ckpt_source_file_behind(struct ckpt_source *s)
{
    while (s && s->ops != &file_ops)
        s = ckpt_source_window_of(s);
    return s;
}

bool ckpt_source_is_far(struct ckpt_source *s)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);

    return file && (self(file)->tag || is_far_file(self(file)));
}

char *ckpt_source_storage(struct ckpt_source *s)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);
    const struct ckpt_storage *storage = file ? atomic_load(&self(file)->storage) : NULL;
    const enum ckpt_far_rule rule =
        file ? ckpt_dir_far_options(self(file)->dir)->rule : CKPT_FAR_AUTO;

    return storage && (rule != CKPT_FAR_AUTO || ckpt_storage_is_shared(storage))
               ? ckpt_storage_describe(storage, rule)
               : NULL;
}

bool ckpt_source_is_object(struct ckpt_source *s)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);

    return file && self(file)->tag;
}

bool ckpt_source_is_elsewhere(struct ckpt_source *s)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);

    return file && is_elsewhere(self(file));
}

const char *ckpt_source_reader(struct ckpt_source *s)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);

    return file && self(file)->tag ? ckpt_dir_elsewhere(self(file)->dir, self(file)->name) : NULL;
}

bool ckpt_source_holders(struct ckpt_source *s, bool *ret, uint32_t n)
{
    const struct ckpt_source *file = ckpt_source_file_behind(s);

    return file && ckpt_dir_holders(self(file)->dir, self(file)->name, ret, n);
}

struct ckpt_dir *ckpt_source_file_dir(const struct ckpt_source *s) { return self(s)->dir; }

const char *ckpt_source_file_name(const struct ckpt_source *s) { return self(s)->name; }

/* ---- where the bytes are ---- */

enum { SAMPLES = 16, SAMPLE_PAGES = 64 };

/* linux/mman.h and the number of cachestat(2), which older headers lack. */
struct cachestat_range {
    uint64_t off, len;
};
struct cachestat {
    uint64_t cache, dirty, writeback, evicted, recently_evicted;
};
enum { SYS_CACHESTAT = 451 };

/* The pages are only asked about, never touched. */
static size_t mincore_pages(int fd, uint64_t off, size_t npage, size_t page)
{
    ckpt_cleanup(ckpt_freep) unsigned char *in = malloc(npage);
    void *map = mmap(NULL, npage * page, PROT_READ, MAP_SHARED, fd, (off_t)off);
    size_t count = 0;

    if (map == MAP_FAILED)
        return npage;
    if (!in || mincore(map, npage * page, in) < 0)
        count = npage;
    for (size_t i = 0; count < npage && in && i < npage; i++)
        count += in[i] & 1;
    (void)munmap(map, npage * page);
    return count;
}

static size_t resident_pages(int fd, uint64_t off, size_t npage, size_t page)
{
    const struct cachestat_range range = {off, npage * page};
    struct cachestat got = {0};

    if (syscall(SYS_CACHESTAT, fd, &range, &got, 0) == 0)
        return (size_t)ckpt_min_u64(got.cache, npage);
    return mincore_pages(fd, off, npage, page);
}

double ckpt_source_resident(struct ckpt_source *s, uint64_t off, uint64_t len)
{
    struct source_file *f = self(s);
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    int fd;

    if (s->ops != &file_ops || len == 0)
        return 1;
    if (f->tag)
        return 0;
    off += f->base;
    const uint64_t lo = off / page * page;
    const size_t npage = (size_t)((off - lo + len + page - 1) / page);
    if (get_fd(f, &f->slot, &fd, NULL) < 0)
        return 1;
    double part = (double)resident_pages(fd, lo, npage, page) / (double)npage;
    put_fd(f->pool, &f->slot);
    return part;
}

bool ckpt_source_file_storage(struct ckpt_source *s, double *ret_resident, bool *ret_shared)
{
    struct source_file *f = self(s);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t asked = 0, resident = 0;
    int fd;

    if (s->ops != &file_ops || s->size == 0)
        return false;
    if (f->tag) {
        *ret_resident = 0;
        *ret_shared = !is_elsewhere(f);
        return true;
    }
    const uint64_t first = f->base / page, end = (f->base + s->size + page - 1) / page;
    const uint64_t npage = end - first;
    if (get_fd(f, &f->slot, &fd, NULL) < 0)
        return false;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t at = npage * i / SAMPLES;
        size_t n = (size_t)ckpt_min_u64(SAMPLE_PAGES, npage * (i + 1) / SAMPLES - at);
        asked += n;
        resident += n ? resident_pages(fd, (first + at) * page, n, page) : 0;
    }
    *ret_shared = ckpt_storage_is_shared(atomic_load(&f->storage));
    put_fd(f->pool, &f->slot);
    *ret_resident = asked ? (double)resident / (double)asked : 0;
    return true;
}

/* ---- small files of a directory, whole or their first bytes ---- */

enum {
    MOST_DESCRIBED = 4 << 20, /* of a file that describes others */
    MOST_SOON = 64,           /* files */
};

/* How many of a file's first bytes does every reader of its folder need? */
static uint64_t needed_of(const char *name, uint64_t size)
{
    if (ckpt_has_suffix(name, ".safetensors"))
        return ckpt_min_u64(size, CKPT_FAR_END);
    return (ckpt_has_suffix(name, ".json") || strcmp(name, ".metadata") == 0) &&
                   size <= MOST_DESCRIBED
               ? size
               : 0;
}

/* Begin to fetch what of a file is needed at first; false: it is none that is. */
static bool fetch_soon(const struct ckpt_dir *dir, const char *name)
{
    struct ckpt_dir_found found;

    if (ckpt_dir_look(dir, name, &found, NULL) < 0 || !*found.tag)
        return false;
    const struct iovec iov = {NULL, (size_t)needed_of(name, found.extent.len)};
    return iov.iov_len && ckpt_dir_read_object(dir, name, found.tag, found.extent.len, &iov, 1, 0,
                                               CKPT_READ_PREFETCH, NULL) == 0;
}

struct soon {
    const struct ckpt_dir *dir;
    size_t n;
};

static int see_soon(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct soon *s = ctx;

    (void)err;
    if (s->n < MOST_SOON && e->kind == CKPT_ENTRY_FILE)
        s->n += fetch_soon(s->dir, e->name);
    return 0;
}

void ckpt_dir_small_soon(const struct ckpt_dir *dir)
{
    struct soon s = {dir, 0};

    if (ckpt_dir_has_objects(dir) && ckpt_dir_memory(dir) != CKPT_DIR_RECALLS)
        (void)ckpt_dir_list(dir, see_soon, &s, NULL);
}

/* The file, to be read once. */
static int open_once(const struct ckpt_dir *dir, const char *name, struct ckpt_source **ret,
                     struct ckpt_err *err)
{
    struct ckpt_fdpool *pool = NULL;

    if (ckpt_fdpool_new(1, &pool, err) < 0)
        return -1;
    /* the source counts a reference, which changes nothing else */
    const int rc = ckpt_source_file_new((struct ckpt_dir *)dir, name, pool, ret, err);
    ckpt_fdpool_unref(pool);
    return rc;
}

static int read_first(const struct ckpt_dir *dir, struct ckpt_source *s, void *buf, size_t len,
                      struct ckpt_err *err)
{
    struct ckpt_err own = {0};

    if (ckpt_source_pread(s, buf, len, 0, &own) == 0)
        return 0;
    if (own.code != CKPT_STALE)
        ckpt_dir_keep_trouble(dir, &own);
    return ckpt_err_move(err, &own);
}

size_t ckpt_dir_read_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    size_t n;

    if (ckpt_dir_recall_head(dir, name, buf, cap, &n))
        return n;
    if (open_once(dir, name, &s, NULL) < 0)
        return 0;
    n = (size_t)ckpt_min_u64(cap, s->size);
    if (read_first(dir, s, buf, n, NULL) < 0)
        return 0;
    ckpt_dir_keep_head(dir, name, buf, n, n == s->size);
    return n;
}

int ckpt_dir_read_file(const struct ckpt_dir *dir, const char *name, size_t max_len,
                       char **ret_text, size_t *ret_len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;

    if (open_once(dir, name, &s, err) < 0)
        return -1;
    const uint64_t size = s->size;
    if (size > max_len)
        return ckpt_fail(err, CKPT_LIMIT, "'%s/%s' has %llu bytes, at most %zu are expected",
                         ckpt_dir_path(dir), name, (unsigned long long)size, max_len);
    ckpt_cleanup(ckpt_freep) char *text = malloc((size_t)size + 1);
    if (!text)
        return ckpt_nomem(err);
    if (read_first(dir, s, text, (size_t)size, err) < 0)
        return -1;
    text[size] = '\0';
    *ret_text = ckpt_steal(&text);
    *ret_len = (size_t)size;
    return 0;
}
