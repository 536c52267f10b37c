/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets, turns and threads. */
#include "tool/pump.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "common.h"
#include "out.h"

enum { FEWEST_JOBS = 4, CUSTOMARY_JOBS = 16, TICK_MS = 200, PAGE = 4096 };

/* So many buffers more than threads: who has moved a chunk whose turn to be hashed has not come
 * goes on with the next one. With more, they are not in the processors' caches when they are
 * hashed. */
enum { SPARE = 2 };

/* So many bytes after the next chunk are prepared, as far as the view has room: scanned layers make
 * the first layer need chunks of all layers, which several threads decompress if they see some of
 * them. With half of it fewer do; with twice, the list of tensors to look at between two chunks is
 * longer. */
enum { PREPARE = 1 << 30 };

struct chunk {
    uint64_t ticket, off;
    size_t item, len;
    bool first, last; /* the first, or last, of its item in this run */
    char *buf;        /* its bytes; NULL: it is none */
};

struct place {
    size_t item;
    uint64_t off, bytes; /* bytes: of all items, those that this run moves before it */
};

struct state {
    const struct ckpt_pump *p;
    pthread_mutex_t lock;
    pthread_cond_t work;     /* there may be work for a thread that waits for it */
    pthread_cond_t reported; /* a thread has called `mark` */
    pthread_cond_t ended;    /* a thread has ended */
    bool stop;
    struct ckpt_err err;   /* the first failure */
    struct place next;     /* where the next chunk begins */
    uint64_t ticket;       /* ticket of the next chunk */
    uint64_t turn;         /* ticket of the chunk to be hashed next */
    struct place prepared; /* what is before it is; item SIZE_MAX: something can't be, and no more
                              is prepared, as a read will fail */
    char *memory;          /* nbuffer buffers, and one for each thread's scratch */
    char **free;           /* nbuffer: the buffers that no chunk has, the last one used on top */
    size_t nbuffer, nfree;
    /* nbuffer: chunks that were moved and wait for their turn, at their tickets modulo nbuffer: as
     * each in flight has a buffer, their tickets are no further apart. */
    struct chunk *waiting;
    bool is_hashing;    /* a thread adds the chunk whose turn it is to the hash */
    XXH3_state_t *hash; /* hash of the current item; only used by that thread */
    struct worker *worker;
    unsigned nthread, active;
    _Atomic uint64_t done; /* bytes */
};

/* A mark that a thread reports. */
struct report {
    bool is; /* there is one */
    uint64_t ticket;
    size_t item;
};

struct worker {
    struct state *s;
    pthread_t thread;
    void *scratch;
    struct report report;
};

static void fail(struct state *s, const struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&s->lock);
    if (!s->stop)
        s->err = *err;
    s->stop = true;
    (void)pthread_cond_broadcast(&s->work);
    (void)pthread_cond_broadcast(&s->reported);
    (void)pthread_mutex_unlock(&s->lock);
}

/* Come to the first item from this one on that is not skipped. */
static void skip_items(const struct ckpt_items *items, struct place *at)
{
    while (at->item < items->n && items->item[at->item].start == CKPT_PUMP_SKIP)
        at->item++;
    if (at->item < items->n)
        at->off = items->item[at->item].start;
}

/* Go on by len bytes of the item, and from its end to the next one. */
static void advance(const struct ckpt_items *items, struct place *at, uint64_t len)
{
    at->off += len;
    at->bytes += len;
    if (at->off == items->item[at->item].size) {
        at->item++;
        skip_items(items, at);
    }
}

static struct chunk *place_of(const struct state *s, uint64_t ticket)
{
    return &s->waiting[ticket % s->nbuffer];
}

/* These questions are asked with the lock held. */

/* Is there a chunk that can be hashed now? */
static bool has_turn(const struct state *s) { return !s->is_hashing && place_of(s, s->turn)->buf; }

static bool has_more(const struct state *s) { return s->next.item < s->p->items->n; }

/* May a thread that has nothing to do get something to do later? */
static bool has_prospects(const struct state *s)
{
    return has_more(s) || (s->p->hash && s->turn < s->ticket);
}

/* Cut off the next chunk. Every item has at least one, even an empty item. */
static void cut(struct state *s, struct chunk *ret)
{
    const struct ckpt_items *items = s->p->items;
    const struct ckpt_item *item = &items->item[s->next.item];
    const uint64_t left = item->size - s->next.off;

    *ret = (struct chunk){.ticket = s->ticket++,
                          .off = s->next.off,
                          .item = s->next.item,
                          .len = left < CKPT_PUMP_CHUNK ? (size_t)left : CKPT_PUMP_CHUNK,
                          .first = s->next.off == item->start,
                          .buf = s->free[--s->nfree]};
    ret->last = ret->len == left;
    advance(items, &s->next, ret->len);
}

/* Wait for work: *ret is a chunk to move, or none where there is one to be hashed. False: there is
 * no more, or the run was stopped. */
static bool take(struct state *s, struct chunk *ret)
{
    *ret = (struct chunk){0};
    (void)pthread_mutex_lock(&s->lock);
    while (!s->stop && !has_turn(s) && !(has_more(s) && s->nfree) && has_prospects(s))
        (void)pthread_cond_wait(&s->work, &s->lock);
    const bool hash = has_turn(s), any = !s->stop && (hash || has_more(s));
    if (any && !hash)
        cut(s, ret);
    (void)pthread_mutex_unlock(&s->lock);
    return any;
}

static bool is_before(struct place a, struct place b)
{
    return a.item < b.item || (a.item == b.item && a.off < b.off);
}

/* Let the view make one part of what comes next. The thread has no chunk now, so that no other one
 * waits for it. */
static void prepare(struct state *s)
{
    const struct ckpt_items *items = s->p->items;
    bool whole = true;
    int rc = 2;

    (void)pthread_mutex_lock(&s->lock);
    const bool stop = s->stop;
    const uint64_t end = s->next.bytes + PREPARE;
    struct place done = is_before(s->prepared, s->next) ? s->next : s->prepared;
    (void)pthread_mutex_unlock(&s->lock);
    for (struct place at = done; !stop && at.item < items->n && at.bytes < end && rc > 0;) {
        const struct ckpt_item *item = &items->item[at.item];
        const uint64_t left = item->size - at.off, room = end - at.bytes;
        const uint64_t len = left < room ? left : room;
        rc = item->file ? ckpt_view_prepare(s->p->view, item->file, at.off, at.off + len) : 2;
        advance(items, &at, len);
        whole = whole && rc == 2;
        if (whole)
            done = at;
    }
    if (rc < 0)
        done.item = SIZE_MAX;
    (void)pthread_mutex_lock(&s->lock);
    s->prepared = is_before(s->prepared, done) ? done : s->prepared;
    (void)pthread_mutex_unlock(&s->lock);
}

/* Nobody needs the buffer any more. With the lock held. */
static void put_buffer(struct state *s, char *buf)
{
    s->free[s->nfree++] = buf;
    (void)pthread_cond_signal(&s->work);
}

/* Read a chunk and pass it to the sink; then it waits to be hashed. */
static int move(struct worker *w, const struct chunk *c, struct ckpt_err *err)
{
    struct state *s = w->s;
    const struct ckpt_pump *p = s->p;

    if (c->len &&
        (ckpt_item_pread(p->view, &p->items->item[c->item], c->buf, c->len, c->off, err) < 0 ||
         (p->sink && p->sink(p->ctx, c->item, c->buf, c->len, c->off, w->scratch, err) < 0)))
        return -1;
    (void)atomic_fetch_add_explicit(&s->done, c->len, memory_order_relaxed);
    (void)pthread_mutex_lock(&s->lock);
    if (p->hash)
        *place_of(s, c->ticket) = *c;
    else
        put_buffer(s, c->buf);
    (void)pthread_mutex_unlock(&s->lock);
    return 0;
}

static bool has_mark(const struct chunk *c)
{
    return c->last || (c->off + c->len) % CKPT_PUMP_MARK == 0;
}

/* Add a chunk to its item's hash, which *ret is where there is a mark. */
static void add(struct state *s, const struct chunk *c, XXH128_hash_t *ret)
{
    const XXH3_state_t *before = s->p->items->item[c->item].state;

    if (c->first && before)
        XXH3_copyState(s->hash, before);
    else if (c->first)
        (void)XXH3_128bits_reset(s->hash);
    if (c->len)
        (void)XXH3_128bits_update(s->hash, c->buf, c->len);
    if (has_mark(c))
        *ret = XXH3_128bits_digest(s->hash);
}

/* Does another thread still report an earlier mark of the same item? */
static bool is_reported_before(const struct state *s, const struct report *r)
{
    for (unsigned i = 0; i < s->nthread; i++) {
        const struct report *other = &s->worker[i].report;
        if (other->is && other->item == r->item && other->ticket < r->ticket)
            return true;
    }
    return false;
}

/* Report that an item has come to a mark, while other threads hash and move what follows. */
static int report(struct worker *w, const struct chunk *c, const XXH128_hash_t *hash,
                  struct ckpt_err *err)
{
    struct state *s = w->s;
    const struct ckpt_pump *p = s->p;
    int rc = 0;

    (void)pthread_mutex_lock(&s->lock);
    while (!s->stop && is_reported_before(s, &w->report))
        (void)pthread_cond_wait(&s->reported, &s->lock);
    const bool stop = s->stop;
    (void)pthread_mutex_unlock(&s->lock);
    if (!stop) {
        p->items->item[c->item].hash = *hash;
        rc = p->mark ? p->mark(p->ctx, c->item, c->off + c->len, err) : 0;
    }
    (void)pthread_mutex_lock(&s->lock);
    w->report.is = false;
    (void)pthread_cond_broadcast(&s->reported);
    (void)pthread_mutex_unlock(&s->lock);
    return rc;
}

/* Hash the chunks that can be, one after the other, and report the marks among them. */
static int hash(struct worker *w, struct ckpt_err *err)
{
    struct state *s = w->s;
    XXH128_hash_t sum = {0};
    int rc = 0;

    (void)pthread_mutex_lock(&s->lock);
    while (rc == 0 && !s->stop && has_turn(s)) {
        const struct chunk c = *place_of(s, s->turn);
        s->is_hashing = true;
        (void)pthread_mutex_unlock(&s->lock);
        add(s, &c, &sum);
        (void)pthread_mutex_lock(&s->lock);
        s->is_hashing = false;
        place_of(s, s->turn++)->buf = NULL;
        put_buffer(s, c.buf); /* who waits for it hashes while this thread reports */
        if (!has_prospects(s))
            (void)pthread_cond_broadcast(&s->work);
        if (has_mark(&c)) {
            w->report = (struct report){.is = true, .ticket = c.ticket, .item = c.item};
            (void)pthread_mutex_unlock(&s->lock);
            rc = report(w, &c, &sum, err);
            (void)pthread_mutex_lock(&s->lock);
        }
    }
    (void)pthread_mutex_unlock(&s->lock);
    return rc;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct state *s = w->s;
    struct ckpt_err err = {0};
    struct chunk c;

    for (prepare(s); take(s, &c); prepare(s))
        if ((c.buf && move(w, &c, &err) < 0) || hash(w, &err) < 0) {
            fail(s, &err);
            break;
        }
    (void)pthread_mutex_lock(&s->lock);
    s->active--;
    (void)pthread_cond_signal(&s->ended);
    (void)pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Redraw the progress bar until all threads have ended. */
static void watch(struct state *s, const struct ckpt_progress *bar)
{
    const struct ckpt_items *items = s->p->items;

    (void)pthread_mutex_lock(&s->lock);
    while (s->active) {
        const char *name = s->next.item < items->n ? items->item[s->next.item].path : "";
        ckpt_progress_draw(bar, atomic_load(&s->done), name);
        const struct timespec until = ckpt_deadline(TICK_MS);
        while (s->active)
            if (pthread_cond_timedwait(&s->ended, &s->lock, &until) == ETIMEDOUT)
                break;
    }
    (void)pthread_mutex_unlock(&s->lock);
}

unsigned ckpt_pump_jobs(unsigned given)
{
    cpu_set_t set;
    const unsigned cpus =
        sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : CUSTOMARY_JOBS;

    if (given)
        return given;
    return cpus < FEWEST_JOBS ? FEWEST_JOBS : cpus > CUSTOMARY_JOBS ? CUSTOMARY_JOBS : cpus;
}

static uint64_t bytes_already(const struct ckpt_pump *p)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < p->items->n; i++) {
        const struct ckpt_item *item = &p->items->item[i];
        sum += (item->start == CKPT_PUMP_SKIP ? item->size : item->start) - item->first;
    }
    return sum;
}

static int run(struct state *s, struct ckpt_err *err)
{
    struct ckpt_progress bar;
    unsigned started = 0;
    int rc = 0;

    s->active = s->nthread;
    ckpt_progress_begin(&bar, bytes_already(s->p), s->p->items->bytes, s->p->quiet);
    atomic_store(&s->done, bar.already);
    for (; started < s->nthread; started++)
        if ((rc = pthread_create(&s->worker[started].thread, NULL, work, &s->worker[started])) != 0)
            break;
    if (started == 0) /* fewer threads than asked for are enough */
        return ckpt_fail_errno(err, rc, "starting a thread");
    (void)pthread_mutex_lock(&s->lock);
    s->active -= s->nthread - started;
    (void)pthread_mutex_unlock(&s->lock);
    watch(s, &bar);
    for (unsigned i = 0; i < started; i++)
        (void)pthread_join(s->worker[i].thread, NULL);
    ckpt_progress_end(&bar);
    if (s->stop) {
        *err = s->err;
        return -1;
    }
    return 0;
}

static int state_init(struct state *s, struct ckpt_err *err)
{
    const size_t nbuffer = (size_t)s->nthread + SPARE;
    void *memory = NULL;
    bool good;

    s->nbuffer = nbuffer;
    s->waiting = calloc(s->nbuffer, sizeof *s->waiting);
    s->free = calloc(s->nbuffer, sizeof *s->free);
    s->hash = XXH3_createState();
    s->worker = calloc(s->nthread, sizeof *s->worker);
    good = s->waiting && s->free && s->hash && s->worker &&
           posix_memalign(&memory, PAGE, (nbuffer + s->nthread) * CKPT_PUMP_CHUNK) == 0;
    s->memory = memory;
    for (; good && s->nfree < nbuffer; s->nfree++)
        s->free[s->nfree] = s->memory + s->nfree * CKPT_PUMP_CHUNK;
    for (unsigned i = 0; good && i < s->nthread; i++)
        s->worker[i] =
            (struct worker){.s = s, .scratch = s->memory + (nbuffer + i) * CKPT_PUMP_CHUNK};
    (void)pthread_mutex_init(&s->lock, NULL);
    ckpt_cond_init(&s->work);
    ckpt_cond_init(&s->reported);
    ckpt_cond_init(&s->ended);
    return good ? 0 : ckpt_nomem(err);
}

static void state_release(struct state *s)
{
    (void)pthread_cond_destroy(&s->work);
    (void)pthread_cond_destroy(&s->reported);
    (void)pthread_cond_destroy(&s->ended);
    (void)pthread_mutex_destroy(&s->lock);
    free(s->worker);
    (void)XXH3_freeState(s->hash);
    free(s->memory);
    free(s->free);
    free(s->waiting);
}

int ckpt_pump_run(const struct ckpt_pump *p, double *ret_seconds, struct ckpt_err *err)
{
    struct state s = {.p = p, .nthread = ckpt_pump_jobs(p->jobs)};
    const uint64_t begin = ckpt_now_ns();
    int rc = state_init(&s, err);

    if (rc == 0) {
        skip_items(p->items, &s.next);
        rc = run(&s, err);
    }
    if (ret_seconds)
        *ret_seconds = (double)(ckpt_now_ns() - begin) * 1e-9;
    state_release(&s);
    return rc;
}

const char *ckpt_hash_hex(const XXH128_hash_t *hash, char buf[CKPT_HEX])
{
    (void)snprintf(buf, CKPT_HEX, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash->high64,
                   (uint64_t)hash->low64);
    return buf;
}

bool ckpt_hash_of_hex(const char *hex, XXH128_hash_t *ret)
{
    uint64_t high, low;

    if (strlen(hex) != CKPT_HEX - 1 || sscanf(hex, "%16" SCNx64 "%16" SCNx64, &high, &low) != 2)
        return false;
    *ret = (XXH128_hash_t){.high64 = high, .low64 = low};
    return true;
}

size_t ckpt_same_bytes(const void *a, const void *b, size_t len)
{
    const unsigned char *x = a, *y = b;
    size_t n = 0;

    if (memcmp(a, b, len) == 0)
        return len;
    while (x[n] == y[n])
        n++;
    return n;
}

json_t *ckpt_hash_list(const struct ckpt_items *items)
{
    json_t *list = json_array();
    char hex[CKPT_HEX];

    for (size_t i = 0; i < items->n; i++)
        ckpt_json_append(&list,
                         json_pack("{s:o, s:I, s:s}", "name", ckptfs_json_text(items->item[i].path),
                                   "bytes", (json_int_t)items->item[i].size, "xxh3",
                                   ckpt_hash_hex(&items->item[i].hash, hex)));
    return list;
}

static int by_path(const void *a, const void *b)
{
    const struct ckpt_item *const *x = a, *const *y = b;
    return strcmp((*x)->path, (*y)->path);
}

int ckpt_hash_whole(const struct ckpt_items *items, XXH128_hash_t *ret, struct ckpt_err *err)
{
    const struct ckpt_item **order = calloc(items->n + 1, sizeof *order);
    XXH3_state_t *state = XXH3_createState();
    char hex[CKPT_HEX];
    bool good = order && state;

    for (size_t i = 0; good && i < items->n; i++)
        order[i] = &items->item[i];
    if (good) {
        qsort(order, items->n, sizeof *order, by_path);
        (void)XXH3_128bits_reset(state);
    }
    for (size_t i = 0; good && i < items->n; i++) {
        (void)XXH3_128bits_update(state, ckpt_hash_hex(&order[i]->hash, hex), CKPT_HEX - 1);
        (void)XXH3_128bits_update(state, "  ", 2);
        (void)XXH3_128bits_update(state, order[i]->path, strlen(order[i]->path));
        (void)XXH3_128bits_update(state, "\n", 1);
    }
    if (good)
        *ret = XXH3_128bits_digest(state);
    (void)XXH3_freeState(state);
    free(order);
    return good ? 0 : ckpt_nomem(err);
}
