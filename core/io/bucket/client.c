/* SPDX-License-Identifier: Apache-2.0 */
/* The client asks its helper for parts of objects; a thread takes the helper's answers. */
#include "io/bucket/client.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/bucket/cache.h"
#include "io/bucket/parts.h"
#include "io/bucket/start.h"
#include "io/bucket/wire.h"
#include "io/iov.h"

enum {
    /* Bytes of an object's beginning or end that are fetched when some of them are read: headers
     * and tables of contents lie there, and most fit. It takes about as long as the round trip. */
    SMALL = 64 * 1024,

    /* The largest part, and the smallest into which a load's read is cut so that several
     * connections share it. A request waits for a round trip before its bytes flow: of half the
     * size, more of the time is waiting; with twice as large ones a reader of one tensor waits for
     * what it does not read. */
    BLOCK = 8 << 20,
    MIDDLE = 1 << 20,

    /* Reads of up to ITEM bytes look at an item of many, of which the next one and the end lie
     * near: so much is fetched on both sides. */
    ITEM = 4096,
    AROUND = 8 * 1024,
};

struct ckpt_client {
    struct ckpt_client *link; /* the next one of this process */
    struct ckpt_bucket_settings settings;
    unsigned refs; /* protected by `all_lock` */
    pid_t owner;
    int cache; /* descriptor of its folder; -1: none */
    struct ckpt_helper helper;
    pthread_mutex_t lock;
    pthread_t thread;
    bool has_thread, dead; /* dead: the helper has ended */
    uint16_t worker;       /* number of its worker */
    struct ckpt_parts parts;
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ckpt_client *all;

static const XXH128_hash_t NO_OBJECT;
static const char HAS_ENDED[] =
    "the helper process that reads from buckets (ckptfs-http) has ended";

/* Take a lock until the end of the scope. */
static pthread_mutex_t *lock(pthread_mutex_t *m)
{
    (void)pthread_mutex_lock(m);
    return m;
}

static void unlockp(pthread_mutex_t **m) { (void)pthread_mutex_unlock(*m); }

/* ---- fork ---- */

/* In a child, no lock is held by a thread that the child does not have. */
static void lock_all(void)
{
    (void)pthread_mutex_lock(&all_lock);
    for (struct ckpt_client *c = all; c; c = c->link)
        (void)pthread_mutex_lock(&c->lock);
}

static void unlock_all(void)
{
    for (struct ckpt_client *c = all; c; c = c->link)
        (void)pthread_mutex_unlock(&c->lock);
    (void)pthread_mutex_unlock(&all_lock);
}

static void watch_forks(void) { (void)pthread_atfork(lock_all, unlock_all, unlock_all); }

/* ---- answers ---- */

static void part_fail(struct ckpt_client *c, struct ckpt_part *s, enum ckpt_code code,
                      const char *text)
{
    s->state = CKPT_PART_FAILED;
    s->code = code;
    s->text = strdup(text);
    (void)pthread_cond_broadcast(&s->done);
    if (s->pins == 0) /* it was read ahead: whoever needs it asks again */
        ckpt_parts_free(&c->parts, s);
}

/* Marks every part that is being fetched as failed: it will not come. */
static void fail_all(struct ckpt_client *c, enum ckpt_code code, const char *text)
{
    for (size_t i = 0; i < CKPT_PARTS; i++)
        if (c->parts.part[i].state == CKPT_PART_FETCHING)
            part_fail(c, &c->parts.part[i], code, text);
    (void)pthread_cond_broadcast(&c->parts.freed);
}

static void take_answer(struct ckpt_client *c, const struct ckpt_wire_answer *a, const char *text)
{
    struct ckpt_part *s = a->id < CKPT_PARTS ? &c->parts.part[a->id] : NULL;

    if (a->id == CKPT_WIRE_AGAIN) {
        c->worker = (uint16_t)a->len;
        fail_all(c, CKPT_OK, "");
    }

    if (!s || s->state != CKPT_PART_FETCHING)
        return;
    const bool is_list = XXH128_isEqual(s->object, NO_OBJECT);
    if (a->code != CKPT_OK) {
        part_fail(c, s, a->code <= CKPT_CANCELLED ? (enum ckpt_code)a->code : CKPT_IO, text);
    } else if (a->len > (uint64_t)s->nunit * CKPT_PARTS_UNIT || (!is_list && a->len != s->len)) {
        part_fail(c, s, CKPT_IO, "the helper gave an answer of the wrong length");
    } else {
        s->len = (uint32_t)a->len;
        s->text = is_list ? strdup(text) : NULL;
        s->state = CKPT_PART_READY;
        (void)pthread_cond_broadcast(&s->done);
        (void)pthread_cond_broadcast(&c->parts.freed);
    }
}

static void *take_answers(void *arg)
{
    struct ckpt_client *c = arg;
    union {
        struct ckpt_wire_answer a;
        char bytes[CKPT_WIRE_MOST + 1];
    } m;
    ssize_t n;

    while ((n = recv(c->helper.socket, m.bytes, CKPT_WIRE_MOST, 0)) > 0 ||
           (n < 0 && errno == EINTR)) {
        if (n < (ssize_t)sizeof m.a)
            continue;
        m.bytes[n] = '\0';
        (void)pthread_mutex_lock(&c->lock);
        take_answer(c, &m.a, m.bytes + sizeof m.a);
        (void)pthread_mutex_unlock(&c->lock);
    }
    (void)pthread_mutex_lock(&c->lock);
    c->dead = true;
    fail_all(c, CKPT_IO, HAS_ENDED);
    (void)pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- life ---- */

static void client_free(struct ckpt_client *c)
{
    const bool own = c->owner == getpid(); /* not a copy in a process that was forked */

    if (own && c->helper.socket >= 0)
        (void)shutdown(c->helper.socket, SHUT_RDWR);
    if (own && c->has_thread)
        (void)pthread_join(c->thread, NULL);
    ckpt_helper_release(&c->helper, own);
    ckpt_closep(&c->cache);
    free(c->settings.cache);
    if (c->parts.memory)
        (void)munmap(c->parts.memory, CKPT_PARTS_MEMORY);
    ckpt_parts_release(&c->parts);
    (void)pthread_mutex_destroy(&c->lock);
    free(c);
}

static int start_helper(struct ckpt_client *c, struct ckpt_err *err)
{
    const struct ckpt_wire_setup setup = {CKPT_WIRE_VERSION, CKPT_PARTS_MEMORY,
                                          c->settings.connections, c->settings.timeout_ms,
                                          c->settings.anonymous};

    return ckpt_helper_start(&c->helper, CKPT_PARTS_MEMORY, &setup, &c->parts.memory, err);
}

static int client_new(const struct ckpt_bucket_settings *s, struct ckpt_client **ret,
                      struct ckpt_err *err)
{
    struct ckpt_client *c = calloc(1, sizeof *c);

    if (!c)
        return ckpt_nomem(err);
    c->settings = *s;
    c->settings.cache = NULL;
    c->cache = -1;
    c->refs = 1;
    c->owner = getpid();
    c->helper = CKPT_HELPER_NONE;
    (void)pthread_mutex_init(&c->lock, NULL);
    ckpt_parts_init(&c->parts);
    if ((s->cache && !(c->settings.cache = strdup(s->cache)) && ckpt_nomem(err) < 0) ||
        (!s->no_cache && ckpt_cache_open(s->cache, &c->cache, err) < 0) ||
        start_helper(c, err) < 0) {
        client_free(c);
        return -1;
    }
    c->link = all;
    *ret = all = c;
    return 0;
}

static bool is_same(const struct ckpt_bucket_settings *a, const struct ckpt_bucket_settings *b)
{
    return a->connections == b->connections && a->timeout_ms == b->timeout_ms &&
           a->anonymous == b->anonymous && a->no_cache == b->no_cache &&
           strcmp(a->cache ? a->cache : "", b->cache ? b->cache : "") == 0;
}

int ckpt_client_get(const struct ckpt_bucket_settings *s, struct ckpt_client **ret,
                    struct ckpt_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int rc = 0;

    (void)pthread_once(&once, watch_forks);
    (void)pthread_mutex_lock(&all_lock);
    for (*ret = all; *ret; *ret = (*ret)->link)
        if ((*ret)->owner == getpid() && !(*ret)->dead && is_same(&(*ret)->settings, s))
            break;
    if (*ret)
        (*ret)->refs++;
    else
        rc = client_new(s, ret, err);
    (void)pthread_mutex_unlock(&all_lock);
    return rc;
}

void ckpt_client_unref(struct ckpt_client *c)
{
    if (!c)
        return;
    (void)pthread_mutex_lock(&all_lock);
    const bool last = --c->refs == 0;
    for (struct ckpt_client **at = &all; last && *at; at = &(*at)->link)
        if (*at == c) {
            *at = c->link;
            break;
        }
    (void)pthread_mutex_unlock(&all_lock);
    if (last)
        client_free(c);
}

bool ckpt_bucket_stats(struct ckpt_bucket_stats *ret)
{
    *ret = (struct ckpt_bucket_stats){0};
    (void)pthread_mutex_lock(&all_lock);
    const bool any = all != NULL;
    for (struct ckpt_client *c = all; c; c = c->link) {
        ckpt_cleanup(unlockp) pthread_mutex_t *held = lock(&c->lock); /* a child maps it anew */
        const struct ckpt_wire_shared *s = (const void *)c->parts.memory;
        if (!s)
            continue;
        ret->requests += atomic_load(&s->requests);
        ret->bytes += atomic_load(&s->bytes);
        ret->retries += atomic_load(&s->retries);
        ret->connections += atomic_load(&s->connections);
        /* texts that another process may be writing */
        (void)snprintf(ret->endpoint, sizeof ret->endpoint, "%.255s", s->endpoint);
        (void)snprintf(ret->region, sizeof ret->region, "%.63s", s->region);
        (void)snprintf(ret->credentials, sizeof ret->credentials, "%.127s", s->credentials);
    }
    (void)pthread_mutex_unlock(&all_lock);
    return any;
}

/* ---- asking; all with the lock held ---- */

/* In a process that was forked: the helper, and what it is fetching, are the parent's. */
static int begin_again(struct ckpt_client *c, struct ckpt_err *err)
{
    ckpt_helper_release(&c->helper, false);
    if (c->parts.memory)
        (void)munmap(c->parts.memory, CKPT_PARTS_MEMORY);
    c->parts.memory = NULL;
    c->has_thread = c->dead = false;
    c->worker = 0;
    ckpt_parts_init(&c->parts);
    if (start_helper(c, err) < 0)
        return -1;
    c->owner = getpid();
    return 0;
}

/* The thread is started at the first request, when a daemon's sandbox is closed already. */
static int begin(struct ckpt_client *c, struct ckpt_err *err)
{
    if (c->owner != getpid() && begin_again(c, err) < 0)
        return -1;
    if (c->dead)
        return ckpt_fail(err, CKPT_IO, HAS_ENDED);
    if (c->has_thread)
        return 0;
    sigset_t every, before; /* signals are for the program's own threads */
    (void)sigfillset(&every);
    (void)pthread_sigmask(SIG_SETMASK, &every, &before);
    const int rc = pthread_create(&c->thread, NULL, take_answers, c);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    c->has_thread = rc == 0;
    return rc ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
}

/* Until something is freed; not for ever: the room may be in the socket. */
static void wait_for_room(struct ckpt_client *c)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    (void)pthread_cond_timedwait(&c->parts.freed, &c->lock, &until);
}

/* Send a question about a new part, which is forgotten if that fails. 1: not now. */
static int ask(struct ckpt_client *c, struct ckpt_part *s, struct ckpt_wire_ask q,
               const char *bucket, const char *key, const char *third, const char *more,
               struct ckpt_err *err)
{
    const char *const text[] = {bucket, key, third, more};
    struct iovec iov[5] = {{&q, sizeof q}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 5};

    for (size_t i = 0; i < 4; i++)
        iov[i + 1] = (struct iovec){(char *)text[i], strlen(text[i]) + 1};
    const bool fits = ckpt_iov_len(iov, 5) <= CKPT_WIRE_MOST;
    q.id = (uint32_t)(s - c->parts.part);
    q.worker = c->worker;
    q.off = s->off;
    q.len = s->len;
    q.at = (uint64_t)(ckpt_part_bytes(&c->parts, s) - c->parts.memory);
    ssize_t n = -1;
    int why = EINTR;
    while (fits && n < 0 && why == EINTR) {
        n = sendmsg(c->helper.socket, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        why = errno;
    }
    if (n >= 0)
        return 0;
    ckpt_parts_free(&c->parts, s);
    if (!fits)
        return ckpt_fail(err, CKPT_LIMIT, "a key of %zu bytes in bucket '%s'", strlen(key), bucket);
    if (why == EAGAIN || why == ENOBUFS)
        return 1; /* answers will come, and need the lock */
    return ckpt_fail_errno(err, why, "asking the helper process that reads from buckets");
}

/* Fetch what is not held of [off, end), in parts of at most `most` bytes (which end at multiples of
 * it), as far as there is room: 0, and 1 if there is no more. */
static int want(struct ckpt_client *c, const struct ckpt_object *o, XXH128_hash_t object,
                uint64_t off, uint64_t end, uint64_t most, bool prefetch, struct ckpt_err *err)
{
    while (off < end) {
        uint64_t stop = ckpt_min_u64(end, (off / most + 1) * most);
        struct ckpt_part *s = ckpt_parts_find(&c->parts, object, off, &stop);
        if (!s) {
            if (!(s = ckpt_parts_add(&c->parts, object, off, (uint32_t)(stop - off), prefetch)))
                return 1;
            const int rc = ask(c, s, (struct ckpt_wire_ask){.kind = CKPT_WIRE_GET, .size = o->size},
                               o->bucket, o->key, o->tag, "", err);
            if (rc != 0)
                return rc;
        } else if (prefetch) { /* is not to be taken for what was read long ago */
            s->tick = ++c->parts.tick;
        }
        off = s->off + s->len;
    }
    return 0;
}

static XXH128_hash_t name_of(const struct ckpt_object *o)
{
    XXH128_hash_t h = XXH3_128bits(o->bucket, strlen(o->bucket));

    h = XXH3_128bits_withSeed(o->key, strlen(o->key), h.low64 ^ h.high64);
    h = XXH3_128bits_withSeed(o->tag, strlen(o->tag), h.low64 ^ h.high64);
    h.high64 |= 1; /* not zero */
    return h;
}

/* Get a part from the cache on disk, unless some of it is held. */
static void recall(struct ckpt_client *c, XXH128_hash_t object, uint64_t off, uint32_t len)
{
    ckpt_cleanup(ckpt_freep) char *buf = malloc(len);

    (void)pthread_mutex_unlock(&c->lock);
    const bool kept = buf && ckpt_cache_get(c->cache, object, off, buf, len);
    (void)pthread_mutex_lock(&c->lock);
    uint64_t end = off + len;
    struct ckpt_part *s = kept && !ckpt_parts_find(&c->parts, object, off, &end) && end == off + len
                              ? ckpt_parts_add(&c->parts, object, off, len, false)
                              : NULL;
    if (!s)
        return;
    memcpy(ckpt_part_bytes(&c->parts, s), buf, len);
    s->state = CKPT_PART_READY;
}

/* Fetch an end of an object, which is at most SMALL, or get it from the cache. */
static int want_end(struct ckpt_client *c, const struct ckpt_object *o, XXH128_hash_t object,
                    uint64_t off, struct ckpt_err *err)
{
    const uint32_t len = (uint32_t)ckpt_min_u64(SMALL, o->size - off);

    if (c->cache >= 0)
        recall(c, object, off, len);
    if (want(c, o, object, off, off + len, BLOCK, false, err) < 0)
        return -1;
    struct ckpt_part *s = ckpt_parts_find(&c->parts, object, off, NULL);
    if (s && s->state == CKPT_PART_FETCHING && s->off == off && s->len == len)
        s->is_end = c->cache >= 0;
    return 0;
}

/* ---- reading ---- */

/* Wait until the part, which the caller has pinned, is fetched; 1: it must be asked for again. */
static int wait_for(struct ckpt_client *c, struct ckpt_part *s, struct ckpt_err *err)
{
    while (s->state == CKPT_PART_FETCHING)
        (void)pthread_cond_wait(&s->done, &c->lock);
    if (s->state == CKPT_PART_READY || s->code == CKPT_OK)
        return s->state != CKPT_PART_READY;
    return s->text ? ckpt_fail(err, s->code, "%s", s->text) : ckpt_nomem(err);
}

/* Copy what the part has from `off` on, at most up to `end`; *ret_len bytes. */
static int copy(struct ckpt_client *c, struct ckpt_part *s, uint64_t off, uint64_t end,
                struct ckpt_iov_cursor *to, uint64_t *ret_len, struct ckpt_err *err)
{
    s->pins++;
    const int rc = wait_for(c, s, err);
    if (rc == 0) {
        const uint64_t stop = ckpt_min_u64(end, s->off + s->len);
        const bool keep = s->is_end, once = s->ahead || s->nunit > 1;
        *ret_len = stop - off;
        s->is_end = s->ahead = s->unread = false;
        (void)pthread_mutex_unlock(&c->lock);
        if (keep)
            ckpt_cache_put(c->cache, s->object, s->off, ckpt_part_bytes(&c->parts, s), s->len);
        ckpt_iov_put(to, (const unsigned char *)ckpt_part_bytes(&c->parts, s) + (off - s->off),
                     (size_t)*ret_len);
        (void)pthread_mutex_lock(&c->lock);
        s->tick = stop == s->off + s->len && once ? 0 : ++c->parts.tick;
    }
    if (--s->pins == 0 && s->state == CKPT_PART_FAILED)
        ckpt_parts_free(&c->parts, s);
    else if (s->pins == 0)
        (void)pthread_cond_signal(&c->parts.freed);
    return rc;
}

/* Is all of it there? Nothing is fetched. */
static bool is_held(struct ckpt_client *c, XXH128_hash_t object, uint64_t off, uint64_t end)
{
    while (off < end) {
        const struct ckpt_part *s = ckpt_parts_find(&c->parts, object, off, NULL);
        if (!s || s->state != CKPT_PART_READY)
            return false;
        off = s->off + s->len;
    }
    return true;
}

/* Begin to fetch what a read needs. */
static int prepare(struct ckpt_client *c, const struct ckpt_object *o, XXH128_hash_t object,
                   uint64_t off, uint64_t end, enum ckpt_read_how how, struct ckpt_err *err)
{
    const uint64_t len = end - off;
    const bool begun = ckpt_parts_find(&c->parts, object, off, NULL) != NULL;

    if (how == CKPT_READ_EXACT) { /* a large one by several connections */
        const uint64_t part = len / 4 < MIDDLE ? MIDDLE : len / 4 > BLOCK ? BLOCK : len / 4;
        return want(c, o, object, off, end, part, false, err);
    }
    if (end <= SMALL && !begun) /* headers are at an end of a file */
        return want_end(c, o, object, 0, err);
    if (off + SMALL >= o->size && !begun)
        return want_end(c, o, object, o->size > SMALL ? o->size - SMALL : 0, err);
    if (len <= ITEM && !begun)
        return want(c, o, object, off - AROUND, ckpt_min_u64(o->size, end + AROUND), BLOCK, false,
                    err);
    return want(c, o, object, off, end, BLOCK, false, err);
}

int ckpt_client_read(struct ckpt_client *c, const struct ckpt_object *o, const struct iovec *iov,
                     int n, uint64_t off, enum ckpt_read_how how, struct ckpt_err *err)
{
    ckpt_cleanup(unlockp) pthread_mutex_t *held = lock(&c->lock);
    const XXH128_hash_t object = name_of(o);
    const uint64_t end = off + ckpt_iov_len(iov, n);
    struct ckpt_iov_cursor to = {iov, 0};

    if (how == CKPT_READ_CACHED && (c->owner != getpid() || !is_held(c, object, off, end)))
        return 1;
    if (begin(c, err) < 0)
        return -1;
    if (how == CKPT_READ_PREFETCH)
        return want(c, o, object, off, end, BLOCK, true, err);
    if (prepare(c, o, object, off, end, how, err) < 0)
        return -1;
    while (off < end) {
        uint64_t len = 0;
        const uint64_t stop = ckpt_min_u64(end, (off / BLOCK + 1) * BLOCK);
        if (want(c, o, object, off, stop, BLOCK, false, err) < 0)
            return -1;
        struct ckpt_part *s = ckpt_parts_find(&c->parts, object, off, NULL);
        if (!s)
            wait_for_room(c);
        else if (copy(c, s, off, end, &to, &len, err) < 0)
            return -1;
        if (c->dead)
            return begin(c, err);
        off += len;
    }
    return 0;
}

/* ---- lists ---- */

static int take_page(const char *at, size_t len,
                     int (*fn)(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err)
{
    struct ckpt_wire_entry e;

    for (const char *end = at + len; at < end; at += e.tag_len + e.key_len) {
        if ((size_t)(end - at) < sizeof e)
            break;
        memcpy(&e, at, sizeof e);
        at += sizeof e;
        if (e.tag_len == 0 || e.key_len == 0 ||
            (size_t)(end - at) < (size_t)e.tag_len + e.key_len || at[e.tag_len - 1] ||
            at[e.tag_len + e.key_len - 1])
            break;
        const struct ckpt_listed item = {at + e.tag_len, at, e.size, e.mtime_ns};
        if (fn(ctx, &item, err) < 0)
            return -1;
        len -= sizeof e + e.tag_len + e.key_len;
    }
    return len ? ckpt_fail(err, CKPT_IO, "the helper gave a malformed list") : 0;
}

/* Fetch a page, which begins at *more; then *more is where the next one does, "" if there is none.
 * 1: it must be asked for again. */
static int list_page(struct ckpt_client *c, const char *bucket, const char *prefix,
                     const char *delimiter, char **more,
                     int (*fn)(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err)
{
    struct ckpt_part *s = NULL;

    if (begin(c, err) < 0)
        return -1;
    while (!c->dead && !(s = ckpt_parts_add(&c->parts, NO_OBJECT, 0, CKPT_WIRE_LIST, false)))
        wait_for_room(c);
    if (!s)
        return begin(c, err);
    int rc = ask(c, s, (struct ckpt_wire_ask){.kind = CKPT_WIRE_LIST_PAGE}, bucket, prefix,
                 delimiter, *more, err);
    if (rc > 0)
        wait_for_room(c);
    if (rc != 0)
        return rc;
    s->pins++;
    rc = wait_for(c, s, err);
    if (rc == 0) {
        rc = take_page(ckpt_part_bytes(&c->parts, s), s->len, fn, ctx, err);
        free(*more);
        *more = ckpt_steal(&s->text);
        if (rc == 0 && !*more)
            rc = ckpt_nomem(err);
    }
    s->pins = 0;
    ckpt_parts_free(&c->parts, s);
    return rc;
}

int ckpt_client_list(struct ckpt_client *c, const char *bucket, const char *prefix,
                     const char *delimiter, unsigned most_pages, bool *ret_all,
                     int (*fn)(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(unlockp) pthread_mutex_t *held = lock(&c->lock);
    ckpt_cleanup(ckpt_freep) char *more = strdup("");
    int rc = more ? 0 : ckpt_nomem(err);

    *ret_all = false;
    for (unsigned page = 0; rc == 0 && !*ret_all && page < most_pages; page++) {
        while ((rc = list_page(c, bucket, prefix, delimiter, &more, fn, ctx, err)) > 0)
            ;
        *ret_all = rc == 0 && !*more;
    }
    return rc;
}
