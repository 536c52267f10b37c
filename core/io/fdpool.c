/* SPDX-License-Identifier: Apache-2.0 */
/* A ring of open descriptors with a clock hand. */
#include "io/fdpool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "base/mem.h"
#include "base/vec.h"

enum { MOST_OPEN = 1024, RESERVED = 64, LEAST_OPEN = 16 };

struct ckpt_fdpool {
    atomic_uint refs;
    size_t max_open;
    pthread_mutex_t lock; /* everything below, and the slots' fields */
    CKPT_VEC(struct ckpt_fdslot *) ring;
    size_t hand;
};

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
    *ret = p;
    return 0;
}

struct ckpt_fdpool *ckpt_fdpool_ref(struct ckpt_fdpool *pool)
{
    atomic_fetch_add(&pool->refs, 1);
    return pool;
}

void ckpt_fdpool_unref(struct ckpt_fdpool *pool)
{
    if (!pool || atomic_fetch_sub(&pool->refs, 1) != 1)
        return;
    (void)pthread_mutex_destroy(&pool->lock);
    ckpt_vec_release(&pool->ring);
    free(pool);
}

/* Takes a slot out of the ring; its descriptor is the caller's to close. */
static int remove_slot(struct ckpt_fdpool *p, struct ckpt_fdslot *slot)
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
        struct ckpt_fdslot *s = p->ring.ptr[p->hand];
        if (s->pins == 0 && !s->recent)
            return remove_slot(p, s);
        s->recent = false;
        p->hand++;
    }
    return -1;
}

/* Put a freshly opened fd into the slot. If another thread was faster, its descriptor stays and
 * ours is closed. */
static int install(struct ckpt_fdpool *p, struct ckpt_fdslot *slot, int *fd, struct ckpt_err *err)
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

static bool pin_if_open(struct ckpt_fdpool *p, struct ckpt_fdslot *slot)
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

int ckpt_fdpool_get(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot, const struct ckpt_dir *dir,
                    const char *name, const struct ckpt_file_id *id, int *ret_fd,
                    struct ckpt_err *err)
{
    if (!pin_if_open(pool, slot)) {
        ckpt_cleanup(ckpt_closep) int fd = -1;
        struct ckpt_dir_found now;
        if (ckpt_dir_open_file(dir, name, &fd, &now, err) < 0) {
            /* it was there when the checkpoint was opened */
            if (err && err->code == CKPT_MISSING)
                err->code = CKPT_STALE;
            return -1;
        }
        if (!ckpt_file_id_eq(&now.id, id))
            return ckpt_fail(err, CKPT_STALE, "'%s/%s' changed since the checkpoint was opened",
                             ckpt_dir_path(dir), name);
        if (install(pool, slot, &fd, err) < 0)
            return -1;
    }
    *ret_fd = slot->fd; /* pinned, so no other thread changes it */
    return 0;
}

void ckpt_fdpool_put(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot)
{
    int closing = -1;

    (void)pthread_mutex_lock(&pool->lock);
    slot->pins--;
    if (slot->pins == 0 && pool->ring.len > pool->max_open)
        closing = remove_slot(pool, slot);
    (void)pthread_mutex_unlock(&pool->lock);
    ckpt_closep(&closing);
}

int ckpt_fdpool_adopt(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot, int *fd,
                      struct ckpt_err *err)
{
    if (install(pool, slot, fd, err) < 0)
        return -1;
    ckpt_fdpool_put(pool, slot);
    return 0;
}

void ckpt_fdpool_drop(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot)
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
