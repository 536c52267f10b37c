/* SPDX-License-Identifier: Apache-2.0 */
/* The client asks its helper for parts of objects; a thread takes the helper's answers. */
#include "io/bucket/client.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
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
#include "base/thread.h"
#include "base/vec.h"
#include "io/bucket/cache.h"
#include "io/bucket/start.h"
#include "io/bucket/wire.h"
#include "io/far/far.h"
#include "io/iov.h"

enum {
    /* The smallest part into which a load's read is cut so that several connections share it. */
    MIDDLE = 1 << 20,

    AROUND = 8 * 1024,
};

/* The helper's memory: its head, and parts. */
#define MEMORY (CKPT_WIRE_HEAD + (uint64_t)CKPT_PARTS_UNITS * CKPT_PARTS_UNIT)

struct ckpt_client {
    struct ckpt_far far;      /* dead: the helper has ended */
    struct ckpt_client *link; /* the next one of this process */
    struct ckpt_bucket_settings settings;
    unsigned refs; /* protected by `all_lock` */
    int cache;     /* descriptor of its folder; -1: none */
    struct ckpt_helper helper;
    char *memory; /* MEMORY bytes, which are shared with the helper */
    pthread_t thread;
    bool has_thread;
    uint16_t worker; /* number of its worker */
};

static struct ckpt_client *self(struct ckpt_far *f) { return (struct ckpt_client *)f; }

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ckpt_client *all;

static const XXH128_hash_t NO_OBJECT;
static const char HAS_ENDED[] =
    "the helper process that reads from buckets (ckptfs-http) has ended";

static const struct ckpt_far_ops client_ops;

/* ---- fork ---- */

/* In a child, no lock is held by a thread that the child does not have. */
static void lock_all(void)
{
    (void)pthread_mutex_lock(&all_lock);
    for (struct ckpt_client *c = all; c; c = c->link)
        (void)pthread_mutex_lock(&c->far.lock);
}

static void unlock_all(void)
{
    for (struct ckpt_client *c = all; c; c = c->link)
        (void)pthread_mutex_unlock(&c->far.lock);
    (void)pthread_mutex_unlock(&all_lock);
}

static void watch_forks(void) { (void)pthread_atfork(lock_all, unlock_all, unlock_all); }

/* ---- answers ---- */

static void take_answer(struct ckpt_client *c, const struct ckpt_wire_answer *a, const char *text)
{
    struct ckpt_part *s = a->id < CKPT_PARTS ? &c->far.parts.part[a->id] : NULL;

    if (a->id == CKPT_WIRE_AGAIN) {
        c->worker = (uint16_t)a->len;
        ckpt_far_all_failed(&c->far, CKPT_OK, "");
    }

    if (!s || s->state != CKPT_PART_FETCHING)
        return;
    const bool is_list = XXH128_isEqual(s->object, NO_OBJECT);
    if (a->code != CKPT_OK) {
        ckpt_far_failed(&c->far, s, a->code <= CKPT_CANCELLED ? (enum ckpt_code)a->code : CKPT_IO,
                        text);
    } else if (a->len > (uint64_t)s->nunit * CKPT_PARTS_UNIT || (!is_list && a->len != s->len)) {
        ckpt_far_failed(&c->far, s, CKPT_IO, "the helper gave an answer of the wrong length");
    } else {
        s->len = (uint32_t)a->len;
        s->text = is_list ? strdup(text) : NULL;
        ckpt_far_arrived(&c->far, s);
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
        (void)pthread_mutex_lock(&c->far.lock);
        take_answer(c, &m.a, m.bytes + sizeof m.a);
        (void)pthread_mutex_unlock(&c->far.lock);
    }
    (void)pthread_mutex_lock(&c->far.lock);
    c->far.dead = true;
    ckpt_far_all_failed(&c->far, CKPT_IO, HAS_ENDED);
    (void)pthread_mutex_unlock(&c->far.lock);
    return NULL;
}

/* ---- life ---- */

static void client_free(struct ckpt_client *c)
{
    const bool own = c->far.owner == getpid(); /* not a copy in a process that was forked */

    if (own && c->helper.socket >= 0)
        (void)shutdown(c->helper.socket, SHUT_RDWR);
    if (own && c->has_thread)
        (void)pthread_join(c->thread, NULL);
    ckpt_helper_release(&c->helper, own);
    ckpt_closep(&c->cache);
    free(c->settings.cache);
    if (c->memory)
        (void)munmap(c->memory, MEMORY);
    ckpt_parts_release(&c->far.parts);
    (void)pthread_mutex_destroy(&c->far.lock);
    free(c);
}

static int start_helper(struct ckpt_client *c, struct ckpt_err *err)
{
    const struct ckpt_wire_setup setup = {CKPT_WIRE_VERSION, MEMORY, c->settings.connections,
                                          c->settings.timeout_ms, c->settings.anonymous};

    if (ckpt_helper_start(&c->helper, MEMORY, &setup, &c->memory, err) < 0)
        return -1;
    c->far.parts.memory = c->memory + CKPT_WIRE_HEAD;
    return 0;
}

static int client_new(const struct ckpt_bucket_settings *s, struct ckpt_client **ret,
                      struct ckpt_err *err)
{
    struct ckpt_client *c = calloc(1, sizeof *c);

    if (!c)
        return ckpt_nomem(err);
    c->far.ops = &client_ops;
    c->settings = *s;
    c->settings.cache = NULL;
    c->cache = -1;
    c->refs = 1;
    c->far.owner = getpid();
    c->helper = CKPT_HELPER_NONE;
    (void)pthread_mutex_init(&c->far.lock, NULL);
    ckpt_parts_init(&c->far.parts, CKPT_PARTS_UNITS);
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
        if ((*ret)->far.owner == getpid() && !(*ret)->far.dead && is_same(&(*ret)->settings, s))
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
        ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held =
            ckpt_lock(&c->far.lock); /* a child maps it anew */
        const struct ckpt_wire_shared *s = (const void *)c->memory;
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
    if (c->memory)
        (void)munmap(c->memory, MEMORY);
    c->memory = NULL;
    c->has_thread = c->far.dead = false;
    c->worker = 0;
    ckpt_parts_init(&c->far.parts, CKPT_PARTS_UNITS);
    if (start_helper(c, err) < 0)
        return -1;
    c->far.owner = getpid();
    return 0;
}

/* The thread is started at the first request, when a daemon's sandbox is closed already. */
static int begin(struct ckpt_far *f, struct ckpt_err *err)
{
    struct ckpt_client *c = self(f);

    if (c->far.owner != getpid() && begin_again(c, err) < 0)
        return -1;
    if (c->far.dead)
        return ckpt_fail(err, CKPT_IO, HAS_ENDED);
    if (c->has_thread)
        return 0;
    const int rc = ckpt_thread_start(&c->thread, NULL, take_answers, c);
    c->has_thread = rc == 0;
    return rc ? ckpt_fail_errno(err, rc, "starting a thread") : 0;
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
    q.id = (uint32_t)(s - c->far.parts.part);
    q.worker = c->worker;
    q.off = s->off;
    q.len = s->len;
    q.at = (uint64_t)(ckpt_part_bytes(&c->far.parts, s) - c->memory);
    ssize_t n = -1;
    int why = EINTR;
    while (fits && n < 0 && why == EINTR) {
        n = sendmsg(c->helper.socket, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        why = errno;
    }
    if (n >= 0)
        return 0;
    ckpt_parts_free(&c->far.parts, s);
    if (!fits)
        return ckpt_fail(err, CKPT_LIMIT, "a key of %zu bytes in bucket '%s'", strlen(key), bucket);
    if (why == EAGAIN || why == ENOBUFS)
        return 1; /* answers will come, and need the lock */
    return ckpt_fail_errno(err, why, "asking the helper process that reads from buckets");
}

static int ask_for_bytes(struct ckpt_far *f, struct ckpt_part *part,
                         const struct ckpt_far_object *object, struct ckpt_err *err)
{
    const struct ckpt_object *o = object->what;

    return ask(self(f), part, (struct ckpt_wire_ask){.kind = CKPT_WIRE_GET, .size = o->size},
               o->bucket, o->key, o->tag, "", err);
}

static bool recall(struct ckpt_far *f, XXH128_hash_t object, uint64_t off, void *buf, size_t len)
{
    return self(f)->cache >= 0 && ckpt_cache_get(self(f)->cache, object, off, buf, (uint32_t)len);
}

static void keep(struct ckpt_far *f, const struct ckpt_part *part)
{
    if (self(f)->cache >= 0)
        ckpt_cache_put(self(f)->cache, part->object, part->off, ckpt_part_bytes(&f->parts, part),
                       part->len);
}

static const struct ckpt_far_ops client_ops = {.begin = begin,
                                               .ask = ask_for_bytes,
                                               .recall = recall,
                                               .keep = keep,
                                               .end = CKPT_FAR_END,
                                               .around = AROUND,
                                               .align = 1,
                                               .least = MIDDLE,
                                               .block = CKPT_FAR_BLOCK};

/* ---- reading ---- */

static XXH128_hash_t name_of(const struct ckpt_object *o)
{
    XXH128_hash_t h = XXH3_128bits(o->bucket, strlen(o->bucket));

    h = XXH3_128bits_withSeed(o->key, strlen(o->key), h.low64 ^ h.high64);
    h = XXH3_128bits_withSeed(o->tag, strlen(o->tag), h.low64 ^ h.high64);
    h.high64 |= 1; /* not zero */
    return h;
}

int ckpt_client_read(struct ckpt_client *c, const struct ckpt_object *o, const struct iovec *iov,
                     int n, uint64_t off, enum ckpt_read_how how, struct ckpt_err *err)
{
    const struct ckpt_far_object object = {name_of(o), o->size, o, 0};

    return ckpt_far_read(&c->far, &object, iov, n, off, how, err);
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

    if (begin(&c->far, err) < 0)
        return -1;
    while (!c->far.dead &&
           !(s = ckpt_parts_add(&c->far.parts, NO_OBJECT, 0, CKPT_WIRE_LIST, false)))
        (void)ckpt_far_wait_for_room(&c->far, 0, 0, err);
    if (!s)
        return begin(&c->far, err);
    int rc = ask(c, s, (struct ckpt_wire_ask){.kind = CKPT_WIRE_LIST_PAGE}, bucket, prefix,
                 delimiter, *more, err);
    if (rc > 0)
        (void)ckpt_far_wait_for_room(&c->far, 0, 0, err);
    if (rc != 0)
        return rc;
    s->pins++;
    rc = ckpt_far_wait(&c->far, s, 0, err); /* the helper always answers */
    if (rc == 0) {
        rc = take_page(ckpt_part_bytes(&c->far.parts, s), s->len, fn, ctx, err);
        free(*more);
        *more = ckpt_steal(&s->text);
        if (rc == 0 && !*more)
            rc = ckpt_nomem(err);
    }
    s->pins = 0;
    ckpt_parts_free(&c->far.parts, s);
    return rc;
}

int ckpt_client_list(struct ckpt_client *c, const char *bucket, const char *prefix,
                     const char *delimiter, unsigned most_pages, bool *ret_all,
                     int (*fn)(void *ctx, const struct ckpt_listed *e, struct ckpt_err *err),
                     void *ctx, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_unlockp) pthread_mutex_t *held = ckpt_lock(&c->far.lock);
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
