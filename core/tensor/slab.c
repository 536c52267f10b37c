/* SPDX-License-Identifier: Apache-2.0 */
/* The slab cache keeps its slabs in a list, the most recently used first. One thread fills a slab,
 * and other threads that want it wait, or fill the next one meanwhile.
 *
 * A slab whose every byte has been read is spent: a sequential reader does not come back to it. It
 * goes to the end of the list, where it is evicted first. */
#include "tensor/slab.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

enum {
    HUGE_PAGE = 2 << 20,   /* bytes */
    LARGE = 4 * HUGE_PAGE, /* from this size on a slab lies in huge pages, and its memory is kept */
    BUCKETS = 1024,        /* of the hash table; a power of two, which bucket_of() knows */
};

struct slab {
    struct slab *prev, *next; /* in the cache's list */
    struct slab *chain;       /* the next one in its bucket */
    struct ckpt_slab is;      /* what it holds; its ctx is valid while the state is FILLING */
    unsigned users;           /* readers and the filler; while there are any it is not evicted */
    enum { FILLING, READY, FAILED } state;
    struct ckpt_err err; /* why it FAILED */
    unsigned char *data;
    size_t room;          /* bytes that were allocated for a large slab, else 0 */
    size_t read_bytes;    /* the sum of all reads of it */
    bool was_read_to_end; /* a read had its last byte */
};

/* The memory of a large slab that was discarded, at whose beginning this lies. */
struct spare {
    struct spare *next;
    size_t room;
};

struct ckpt_slabs {
    atomic_uint refs;
    pthread_mutex_t lock; /* protects everything except the bytes of READY slabs that are in use */
    pthread_cond_t filled;
    struct slab list; /* the sentinel of a ring */
    struct slab *bucket[BUCKETS];
    size_t budget, bytes; /* bytes: the sum of the slabs' lengths */
    struct spare *spare;  /* the one that was discarded last is the first */
    size_t spare_bytes;
};

int ckpt_slabs_new(size_t budget, struct ckpt_slabs **ret, struct ckpt_err *err)
{
    struct ckpt_slabs *s = calloc(1, sizeof *s);

    if (!s)
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    (void)pthread_mutex_init(&s->lock, NULL);
    (void)pthread_cond_init(&s->filled, NULL);
    s->list.prev = s->list.next = &s->list;
    s->budget = budget;
    *ret = s;
    return 0;
}

/* Allocates a slab's memory: a large one in huge pages, since to fault in small pages takes as long
 * as to fill them. */
static void *allocate(struct slab *s)
{
    if (s->is.len < LARGE)
        return malloc(s->is.len);
    s->room = (s->is.len + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *p = aligned_alloc(HUGE_PAGE, s->room);
    if (p)
        (void)madvise(p, s->room, MADV_HUGEPAGE);
    return p;
}

static void unlink_slab(struct slab *s)
{
    s->prev->next = s->next;
    s->next->prev = s->prev;
}

static void link_after(struct slab *prev, struct slab *s)
{
    s->next = prev->next;
    s->prev = prev;
    s->next->prev = s;
    prev->next = s;
}

/* Has the slab been read as a whole: as many bytes as it has, its last one among them? */
static bool is_spent(const struct slab *s)
{
    return s->was_read_to_end && s->read_bytes >= s->is.len;
}

static struct slab **bucket_of(struct ckpt_slabs *c, const struct ckpt_slab *is)
{
    const uint64_t key = (uintptr_t)is->owner / sizeof(void *) + is->number;

    return &c->bucket[key * 0x9e3779b97f4a7c15 >> 54]; /* Fibonacci hashing, to 10 bits */
}

static struct slab *find(struct ckpt_slabs *c, const struct ckpt_slab *is)
{
    struct slab *s = *bucket_of(c, is);

    while (s && (s->is.scope != is->scope || s->is.owner != is->owner ||
                 s->is.number != is->number || s->state == FAILED))
        s = s->chain;
    return s;
}

/* Take the first spare memory at *at. */
static struct spare *unlink_spare(struct ckpt_slabs *c, struct spare **at)
{
    struct spare *spare = *at;

    *at = spare->next;
    c->spare_bytes -= spare->room;
    return spare;
}

/* Keep memory for a later slab, and free what has been kept for long if that is too much. */
static void keep_spare(struct ckpt_slabs *c, void *data, size_t room)
{
    struct spare *spare = data;
    struct spare **last = &spare->next;

    *spare = (struct spare){c->spare, room};
    c->spare = spare;
    c->spare_bytes += room;
    while (*last && c->bytes + c->spare_bytes > c->budget / 2) {
        for (; (*last)->next; last = &(*last)->next)
            continue;
        free(unlink_spare(c, last));
        last = &spare->next;
    }
}

/* Give a large new slab memory that was kept, if some of it is as large, and not twice as large. */
static void take_spare(struct ckpt_slabs *c, struct slab *s)
{
    struct spare **at = &c->spare;

    while (*at && (s->is.len > (*at)->room || s->is.len < (*at)->room / 2))
        at = &(*at)->next;
    if (*at && s->is.len >= LARGE) {
        s->room = (*at)->room;
        s->data = (unsigned char *)unlink_spare(c, at);
    }
}

static void discard(struct ckpt_slabs *c, struct slab *s)
{
    struct slab **at = bucket_of(c, &s->is);

    assert(s->users == 0 && c->bytes >= s->is.len);
    while (*at != s)
        at = &(*at)->chain;
    *at = s->chain;
    unlink_slab(s);
    c->bytes -= s->is.len;
    if (s->room && s->data)
        keep_spare(c, ckpt_steal(&s->data), s->room);
    free(s->data);
    free(s);
}

struct ckpt_slabs *ckpt_slabs_ref(struct ckpt_slabs *slabs)
{
    atomic_fetch_add(&slabs->refs, 1);
    return slabs;
}

void ckpt_slabs_unref(struct ckpt_slabs *slabs)
{
    if (!slabs || atomic_fetch_sub(&slabs->refs, 1) != 1)
        return;
    while (slabs->list.next != &slabs->list)
        discard(slabs, slabs->list.next);
    while (slabs->spare)
        free(unlink_spare(slabs, &slabs->spare));
    (void)pthread_cond_destroy(&slabs->filled);
    (void)pthread_mutex_destroy(&slabs->lock);
    free(slabs);
}

/* Discards what exceeds the budget, from the end of the list on. Spent slabs may keep a quarter of
 * it: another reader of the same file may come a little later. */
static void evict(struct ckpt_slabs *c)
{
    for (struct slab *s = c->list.prev, *prev;
         s != &c->list && c->bytes > (is_spent(s) ? c->budget / 4 : c->budget); s = prev) {
        prev = s->prev;
        /* who fills a slab uses it, and a failed one goes with its last user */
        assert(s->users || s->state == READY);
        if (s->users == 0)
            discard(c, s);
    }
}

/* Adds a new slab, which the caller fills (fill_new); NULL: there is no memory. Its bytes may be
 * allocated later, when the lock is not held. */
static struct slab *begin(struct ckpt_slabs *c, const struct ckpt_slab *is)
{
    struct slab *s = calloc(1, sizeof *s);

    if (s) {
        s->is = *is;
        s->state = FILLING;
        c->bytes += is->len;
        link_after(&c->list, s);
        s->chain = *bucket_of(c, is);
        *bucket_of(c, is) = s;
        s->users = 1;
        evict(c);
        take_spare(c, s);
    }
    return s;
}

/* Fills a new slab, without the lock, and wakes those who wait for it. */
static void fill_new(struct ckpt_slabs *c, struct slab *s)
{
    (void)pthread_mutex_unlock(&c->lock);
    if (!s->data)
        s->data = allocate(s);
    int result = s->data ? s->is.fill(s->is.ctx, s->data, s->is.len, s->is.number, &s->err)
                         : ckpt_nomem(&s->err);
    (void)pthread_mutex_lock(&c->lock);
    s->state = result < 0 ? FAILED : READY;
    (void)pthread_cond_broadcast(&c->filled);
}

/* Ends a use of the slab, of which the caller has read so many bytes. The slab may be gone then. */
static void leave(struct ckpt_slabs *c, struct slab *s, size_t read)
{
    assert(s->users > 0);
    s->read_bytes += read;
    if (--s->users == 0 && s->state == FAILED) {
        discard(c, s);
    } else if (is_spent(s)) {
        unlink_slab(s);
        link_after(c->list.prev, s);
    }
    evict(c);
}

/* Fills, instead of waiting for s, the first slab after it that is not here. False: there is no
 * such slab, or no room for one. */
static bool fill_ahead(struct ckpt_slabs *c, const struct slab *s)
{
    struct ckpt_slab next = s->is;
    size_t used = 0;

    do {
        if (!next.next || !next.next(next.ctx, &next))
            return false;
    } while (find(c, &next));
    for (const struct slab *k = c->list.next; k != &c->list; k = k->next)
        used += k->users || k->read_bytes == 0 ? k->is.len : 0;
    struct slab *new = used + next.len <= c->budget ? begin(c, &next) : NULL;
    if (!new)
        return false;
    fill_new(c, new);
    leave(c, new, 0);
    return true;
}

int ckpt_slabs_read(struct ckpt_slabs *slabs, const struct ckpt_slab *slab, void *buf, size_t len,
                    size_t off, struct ckpt_err *err)
{
    int result = 0;

    (void)pthread_mutex_lock(&slabs->lock);
    struct slab *s = find(slabs, slab);
    if (s) {
        s->users++;
        unlink_slab(s);
        link_after(&slabs->list, s);
        while (s->state == FILLING)
            if (!fill_ahead(slabs, s))
                (void)pthread_cond_wait(&slabs->filled, &slabs->lock);
    } else if ((s = begin(slabs, slab))) {
        fill_new(slabs, s);
    } else {
        (void)pthread_mutex_unlock(&slabs->lock);
        return ckpt_nomem(err);
    }
    assert(s->state != READY || (off <= slab->len && len <= slab->len - off));
    if (s->state == FAILED) {
        result = ckpt_err_move(err, &s->err);
    } else {
        (void)pthread_mutex_unlock(&slabs->lock);
        memcpy(buf, s->data + off, len);
        (void)pthread_mutex_lock(&slabs->lock);
    }
    s->was_read_to_end |= off + len == s->is.len;
    leave(slabs, s, len);
    (void)pthread_mutex_unlock(&slabs->lock);
    return result;
}

enum ckpt_prepared ckpt_slabs_prepare(struct ckpt_slabs *slabs, const struct ckpt_slab *slab)
{
    enum ckpt_prepared result = CKPT_PREPARED_FULL;
    size_t used = 0;

    (void)pthread_mutex_lock(&slabs->lock);
    struct slab *s = find(slabs, slab);
    for (const struct slab *k = slabs->list.next; !s && k != &slabs->list; k = k->next)
        used += is_spent(k) ? 0 : k->is.len;
    if (s) {
        result = s->state == FILLING ? CKPT_PREPARED_BUSY : CKPT_PREPARED_BEFORE;
    } else if (used + slab->len <= slabs->budget / 2 && (s = begin(slabs, slab))) {
        fill_new(slabs, s);
        result = s->state == FAILED ? CKPT_PREPARED_NOT : CKPT_PREPARED_NOW;
        leave(slabs, s, 0);
    }
    (void)pthread_mutex_unlock(&slabs->lock);
    return result;
}

void ckpt_slabs_need(struct ckpt_slabs *slabs, size_t len)
{
    (void)pthread_mutex_lock(&slabs->lock);
    if (slabs->budget / 2 < len)
        slabs->budget = len > SIZE_MAX / 2 ? SIZE_MAX : 2 * len;
    (void)pthread_mutex_unlock(&slabs->lock);
}

void ckpt_slabs_forget(struct ckpt_slabs *slabs, const void *scope)
{
    (void)pthread_mutex_lock(&slabs->lock);
    for (struct slab *s = slabs->list.next, *next; s != &slabs->list; s = next) {
        next = s->next;
        if (s->is.scope == scope)
            discard(slabs, s);
    }
    (void)pthread_mutex_unlock(&slabs->lock);
}

size_t ckpt_slabs_bytes(struct ckpt_slabs *slabs)
{
    (void)pthread_mutex_lock(&slabs->lock);
    size_t n = slabs->bytes;
    (void)pthread_mutex_unlock(&slabs->lock);
    return n;
}
