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

/* So many bytes after the next chunk are prepared, as far as the view has room: scanned layers make
 * the first layer need chunks of all layers, which several threads decompress if they see some of
 * them. With half of it fewer do; with twice, the list of tensors to look at between two chunks is
 * longer. */
enum { PREPARE = 1 << 30 };

static const uint64_t IDLE = UINT64_MAX;

struct chunk {
    uint64_t ticket, off;
    size_t item, len;
    bool first, last; /* the first, or last, of its item in this run */
};

struct place {
    size_t item;
    uint64_t off, bytes; /* bytes: of all items, those that this run moves before it */
};

struct state {
    const struct ckpt_pump *p;
    pthread_mutex_t lock;
    /* Signalled when a chunk was hashed, was passed on, and when a thread has ended; the first two
     * at a stop, too. One for all would wake every thread for each chunk. */
    pthread_cond_t hashed, landed, ended;
    bool stop;
    struct ckpt_err err;   /* the first failure */
    struct place next;     /* where the next chunk begins */
    uint64_t ticket;       /* ticket of the next chunk */
    uint64_t turn;         /* ticket of the chunk to be hashed next */
    struct place prepared; /* what is before it is; item SIZE_MAX: something can't be, and no more
                              is prepared, as a read will fail */
    uint64_t
        *flying; /* per thread: the ticket that it has not yet passed on and reported, or IDLE */
    XXH3_state_t *hash; /* hash of the current item; only used by the thread whose turn it is */
    unsigned nthread, active;
    _Atomic uint64_t done; /* bytes */
};

struct worker {
    struct state *s;
    unsigned index;
    pthread_t thread;
};

static void fail(struct state *s, const struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&s->lock);
    if (!s->stop)
        s->err = *err;
    s->stop = true;
    (void)pthread_cond_broadcast(&s->hashed);
    (void)pthread_cond_broadcast(&s->landed);
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

/* Take the next chunk. Every item has at least one, even an empty item. */
static bool take(struct state *s, unsigned index, struct chunk *ret)
{
    const struct ckpt_items *items = s->p->items;
    bool more;

    (void)pthread_mutex_lock(&s->lock);
    more = !s->stop && s->next.item < items->n;
    if (more) {
        const struct ckpt_item *item = &items->item[s->next.item];
        uint64_t left = item->size - s->next.off;
        *ret = (struct chunk){.ticket = s->ticket++,
                              .off = s->next.off,
                              .item = s->next.item,
                              .len = left < CKPT_PUMP_CHUNK ? (size_t)left : CKPT_PUMP_CHUNK,
                              .first = s->next.off == item->start};
        ret->last = ret->len == left;
        s->flying[index] = ret->ticket;
        advance(items, &s->next, ret->len);
    }
    (void)pthread_mutex_unlock(&s->lock);
    return more;
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

static bool has_mark(const struct chunk *c)
{
    return c->last || (c->off + c->len) % CKPT_PUMP_MARK == 0;
}

static bool has_turn(const struct state *s, const struct chunk *c) { return s->turn == c->ticket; }

/* Have all earlier chunks been passed on and reported? */
static bool is_first_in_flight(const struct state *s, const struct chunk *c)
{
    for (unsigned i = 0; i < s->nthread; i++)
        if (s->flying[i] < c->ticket)
            return false;
    return true;
}

/* Wait until something is true of the chunk, as a condition tells. False: the run was stopped. */
static bool wait_until(struct state *s, const struct chunk *c, pthread_cond_t *told,
                       bool (*is_true)(const struct state *s, const struct chunk *c))
{
    (void)pthread_mutex_lock(&s->lock);
    while (!s->stop && !is_true(s, c))
        (void)pthread_cond_wait(told, &s->lock);
    const bool stop = s->stop;
    (void)pthread_mutex_unlock(&s->lock);
    return !stop;
}

/* Wait for this chunk's turn and add it to its item's hash. False: the run was stopped. */
static bool hash_in_turn(struct state *s, const struct chunk *c, const void *buf,
                         XXH128_hash_t *ret)
{
    const XXH3_state_t *before = s->p->items->item[c->item].state;

    if (!wait_until(s, c, &s->hashed, has_turn))
        return false;
    if (c->first && before)
        XXH3_copyState(s->hash, before);
    else if (c->first)
        (void)XXH3_128bits_reset(s->hash);
    if (c->len)
        (void)XXH3_128bits_update(s->hash, buf, c->len);
    if (has_mark(c))
        *ret = XXH3_128bits_digest(s->hash);
    (void)pthread_mutex_lock(&s->lock);
    s->turn++;
    (void)pthread_cond_broadcast(&s->hashed);
    (void)pthread_mutex_unlock(&s->lock);
    return true;
}

static void land(struct state *s, unsigned index)
{
    (void)pthread_mutex_lock(&s->lock);
    s->flying[index] = IDLE;
    (void)pthread_cond_broadcast(&s->landed);
    (void)pthread_mutex_unlock(&s->lock);
}

static int move(struct worker *w, const struct chunk *c, char *buf, struct ckpt_err *err)
{
    struct state *s = w->s;
    const struct ckpt_pump *p = s->p;
    struct ckpt_item *item = &p->items->item[c->item];
    XXH128_hash_t hash = {0};

    if (c->len && ckpt_item_pread(p->view, item, buf, c->len, c->off, err) < 0)
        return -1;
    if (p->hash && !hash_in_turn(s, c, buf, &hash))
        return 0;
    if (p->sink && c->len &&
        p->sink(p->ctx, c->item, buf, c->len, c->off, buf + CKPT_PUMP_CHUNK, err) < 0)
        return -1;
    (void)atomic_fetch_add_explicit(&s->done, c->len, memory_order_relaxed);
    if (p->hash && has_mark(c)) {
        /* An item of one chunk has no earlier chunks. */
        if (!(c->first && c->last) && !wait_until(s, c, &s->landed, is_first_in_flight))
            return 0;
        item->hash = hash;
        if (p->mark && p->mark(p->ctx, c->item, c->off + c->len, err) < 0)
            return -1;
    }
    land(s, w->index);
    return 0;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct ckpt_err err = {0};
    struct chunk c;
    void *buf = NULL;

    if (posix_memalign(&buf, PAGE, 2 * (size_t)CKPT_PUMP_CHUNK) != 0) {
        (void)ckpt_nomem(&err);
        fail(w->s, &err);
    } else {
        for (prepare(w->s); take(w->s, w->index, &c); prepare(w->s))
            if (move(w, &c, buf, &err) < 0) {
                fail(w->s, &err);
                break;
            }
    }
    free(buf);
    (void)pthread_mutex_lock(&w->s->lock);
    w->s->flying[w->index] = IDLE;
    w->s->active--;
    (void)pthread_cond_broadcast(&w->s->landed);
    (void)pthread_cond_signal(&w->s->ended);
    (void)pthread_mutex_unlock(&w->s->lock);
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

static int run(struct state *s, struct worker *worker, struct ckpt_err *err)
{
    struct ckpt_progress bar;
    unsigned started = 0;
    int rc = 0;

    s->active = s->nthread;
    ckpt_progress_begin(&bar, bytes_already(s->p), s->p->items->bytes, s->p->quiet);
    atomic_store(&s->done, bar.already);
    for (; started < s->nthread; started++) {
        worker[started] = (struct worker){.s = s, .index = started};
        if ((rc = pthread_create(&worker[started].thread, NULL, work, &worker[started])) != 0)
            break;
    }
    if (started == 0) /* fewer threads than asked for are enough */
        return ckpt_fail_errno(err, rc, "starting a thread");
    (void)pthread_mutex_lock(&s->lock);
    s->active -= s->nthread - started;
    (void)pthread_mutex_unlock(&s->lock);
    watch(s, &bar);
    for (unsigned i = 0; i < started; i++)
        (void)pthread_join(worker[i].thread, NULL);
    ckpt_progress_end(&bar);
    if (s->stop) {
        *err = s->err;
        return -1;
    }
    return 0;
}

int ckpt_pump_run(const struct ckpt_pump *p, double *ret_seconds, struct ckpt_err *err)
{
    struct state s = {.p = p, .nthread = ckpt_pump_jobs(p->jobs), .hash = XXH3_createState()};
    struct worker *worker = calloc(s.nthread, sizeof *worker);
    const uint64_t begin = ckpt_now_ns();
    int rc = -1;

    s.flying = calloc(s.nthread, sizeof *s.flying);
    (void)pthread_mutex_init(&s.lock, NULL);
    ckpt_cond_init(&s.hashed);
    ckpt_cond_init(&s.landed);
    ckpt_cond_init(&s.ended);
    if (!worker || !s.flying || !s.hash) {
        (void)ckpt_nomem(err);
    } else {
        for (unsigned i = 0; i < s.nthread; i++)
            s.flying[i] = IDLE;
        skip_items(p->items, &s.next);
        rc = run(&s, worker, err);
    }
    if (ret_seconds)
        *ret_seconds = (double)(ckpt_now_ns() - begin) * 1e-9;
    (void)pthread_cond_destroy(&s.hashed);
    (void)pthread_cond_destroy(&s.landed);
    (void)pthread_cond_destroy(&s.ended);
    (void)pthread_mutex_destroy(&s.lock);
    (void)XXH3_freeState(s.hash);
    free(s.flying);
    free(worker);
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
