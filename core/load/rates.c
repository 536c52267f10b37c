/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring rates: copies and cached reads alone; storage by one rank of each node; links in rings,
 * all ranks at once, as a load uses them. */
#include "load/rates.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "load/errand.h"

enum {
    BLOCK = 1 << 20,
    BLOCKS = 4, /* of which the best counts */
    READERS = 4,
    STORAGE_MS = 2000,
    STORAGE_BLOCKS = 64, /* at most, and of a node's part at most 1/SHARE: bursts are short */
    SHARE = 8,
    TRIES = 16,
    WAIT_MS = 20,
};

/* What one rank has measured; 0: not. */
struct sample {
    double storage, page_cache, copy, local_link, network;
    uint64_t cpus;
};

static double rate_of(uint64_t bytes, uint64_t begin_ns)
{
    const uint64_t ns = ckpt_now_ns() - begin_ns;

    return (double)bytes * 1e9 / (double)(ns ? ns : 1);
}

static double larger(double a, double b) { return a > b ? a : b; }

/* ---- memory ---- */

/* Into memory that nobody has touched, as destinations are. */
static double copy_rate(const unsigned char *from)
{
    unsigned char *to = mmap(NULL, (size_t)BLOCKS * BLOCK, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double best = 0;

    if (to == MAP_FAILED)
        return 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        const uint64_t begin = ckpt_now_ns();
        memcpy(to + i * BLOCK, from, BLOCK);
        best = larger(best, rate_of(BLOCK, begin));
    }
    (void)munmap(to, (size_t)BLOCKS * BLOCK);
    return best;
}

/* What is in the page cache, of the first files that have some of it there. */
static double cached_rate(const struct ckpt_catalog *cat, unsigned char *buf)
{
    double best = 0;

    for (size_t i = 0, done = 0; i < cat->sources.len && i < 8 && done < BLOCKS; i++) {
        struct ckpt_source *s = cat->sources.ptr[i];
        for (uint64_t off = 0; off + BLOCK <= s->size && done < BLOCKS; off += BLOCK) {
            struct iovec iov = {buf, BLOCK};
            const uint64_t begin = ckpt_now_ns();
            if (!ckpt_source_preadv_cached(s, &iov, 1, off))
                break;
            best = larger(best, rate_of(BLOCK, begin));
            done++;
        }
    }
    return best;
}

/* ---- storage ---- */

/* Blocks that threads read, which may never come back. */
struct reading {
    struct ckpt_errand errand;
    uint32_t good;
    struct ckpt_source *source;
    uint64_t off;
    uint32_t next, n;
};

static void reading_free(struct ckpt_errand *e)
{
    struct reading *r = (struct reading *)e;

    ckpt_source_unref(r->source);
    free(r);
}

static void read_blocks(struct ckpt_errand *e)
{
    struct reading *r = (struct reading *)e;
    unsigned char *buf = malloc(BLOCK);

    (void)pthread_mutex_lock(&e->lock);
    while (buf && !e->late && r->next < r->n) {
        const uint64_t off = r->off + (uint64_t)r->next++ * BLOCK;
        (void)pthread_mutex_unlock(&e->lock);
        const bool good = ckpt_source_pread(r->source, buf, BLOCK, off, NULL) == 0;
        (void)pthread_mutex_lock(&e->lock);
        r->good += good;
    }
    (void)pthread_mutex_unlock(&e->lock);
    free(buf);
}

/* Blocks that are not in the page cache, about where this node's part of the files is: if the node
 * is to read only a part, it has them then. */
static bool find_cold(const struct ckpt_rates_site *site, uint32_t node, struct reading *r)
{
    const struct ckpt_catalog *cat = site->cat;
    const uint64_t want = ckpt_min_u64(site->bytes / site->nnode / SHARE / BLOCK, STORAGE_BLOCKS);
    uint64_t total = 0, at, tries = TRIES;

    for (size_t i = 0; i < cat->sources.len; i++)
        total += cat->sources.ptr[i]->size;
    at = (uint64_t)((double)total * (node + 0.5) / site->nnode);
    for (size_t i = 0; i < cat->sources.len && tries; i++) {
        struct ckpt_source *s = cat->sources.ptr[i];
        uint64_t off = at / BLOCK * BLOCK;
        at -= ckpt_min_u64(at, s->size);
        for (; off + READERS * BLOCK <= s->size && tries; off += READERS * BLOCK, tries--) {
            const uint64_t n = ckpt_min_u64(ckpt_max_u64(want, READERS), (s->size - off) / BLOCK);
            if (ckpt_source_resident(s, off, n * BLOCK) > 0)
                continue;
            r->source = ckpt_source_ref(s);
            r->off = off;
            r->n = (uint32_t)n;
            return true;
        }
    }
    return false;
}

/* What is read stays in the page cache: the load has it then. Storage that does not answer is the
 * load's matter, which says where. */
static double storage_rate(const struct ckpt_rates_site *site, uint32_t node)
{
    struct reading *r = calloc(1, sizeof *r);
    double rate = 0;

    if (!r)
        return 0;
    ckpt_errand_init(&r->errand, read_blocks, reading_free);
    if (find_cold(site, node, r)) {
        const uint64_t begin = ckpt_now_ns();
        (void)ckpt_errand_start(&r->errand, READERS);
        (void)ckpt_errand_wait(&r->errand, STORAGE_MS);
        (void)pthread_mutex_lock(&r->errand.lock);
        rate = r->good ? rate_of((uint64_t)r->good * BLOCK, begin) : 0;
        (void)pthread_mutex_unlock(&r->errand.lock);
    }
    ckpt_errand_unref(&r->errand);
    return rate;
}

/* ---- links ---- */

/* To one rank, from another; until both are through. */
struct pass {
    struct ckpt_comm *comm;
    uint32_t to, from;
    unsigned char *out, *in;
    uint32_t timeout_ms;
    bool leak; /* the buffers may still be touched */
};

static int wait_for(const struct pass *p, struct ckpt_xfer *t, size_t n, struct ckpt_err *err)
{
    struct ckpt_xport *x = p->comm->x;
    const uint64_t until = ckpt_now_ms() + p->timeout_ms;

    for (size_t done = 0; done < n;) {
        bool moved;
        if (ckpt_comm_poll(p->comm, &moved, err) < 0)
            return -1;
        for (done = 0; done < n && atomic_load(&t[done].done); done++)
            if (t[done].there && x->ops->fetch(x, &t[done]))
                t[done].there = false;
        if (done < n && ckpt_now_ms() > until)
            return ckpt_fail(err, CKPT_TIMEOUT, "rank %" PRIu32 " sent nothing for %.1f s", p->from,
                             p->timeout_ms / 1000.0);
        ckpt_comm_alive(p->comm, p->timeout_ms);
        if (done < n && !moved)
            x->ops->wait(x, WAIT_MS);
    }
    return 0;
}

static int post_block(const struct pass *p, struct ckpt_xfer t[2], struct ckpt_err *err)
{
    struct ckpt_xport *x = p->comm->x;

    t[0].buf = p->in;
    t[0].peer = p->from;
    t[1].buf = p->out;
    t[1].peer = p->to;
    t[1].send = true;
    t[0].len = t[1].len = BLOCK;
    return x->ops->post(x, &t[0], err) < 0 || x->ops->post(x, &t[1], err) < 0 ? -1 : 0;
}

static int pass_block(struct pass *p, struct ckpt_err *err)
{
    struct ckpt_xport *x = p->comm->x;
    struct ckpt_xfer t[2] = {0};

    if (post_block(p, t, err) == 0 && wait_for(p, t, 2, err) == 0)
        return 0;
    p->leak = !x->ops->cancel(x);
    p->comm->broken = x->ops->one_shot;
    return -1;
}

/* The next of these ranks, around, gets blocks of ours. The best counts: others may be late. */
static int ring_rate(struct pass *p, const uint32_t *ring, uint32_t n, double *ret,
                     struct ckpt_err *err)
{
    uint32_t at = 0;

    while (at < n && ring[at] != p->comm->x->rank)
        at++;
    if (n < 2 || at == n)
        return 0;
    p->to = ring[(at + 1) % n];
    p->from = ring[(at + n - 1) % n];
    for (size_t i = 0; i < BLOCKS; i++) {
        const uint64_t begin = ckpt_now_ns();
        if (pass_block(p, err) < 0)
            return -1;
        *ret = larger(*ret, rate_of(BLOCK, begin));
    }
    return 0;
}

static int link_rates(const struct ckpt_rates_site *site, const struct ckpt_rates *given,
                      struct pass *p, struct sample *ret, struct ckpt_err *err)
{
    const uint32_t n = site->comm->x->size, self = site->comm->x->rank;
    ckpt_cleanup(ckpt_freep) uint32_t *ring = malloc(n * sizeof *ring);
    uint32_t count = 0, nleader = 0;

    if (!ring)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++)
        if (site->node[r] == site->node[self])
            ring[count++] = r;
    if (given->local_link <= 0 && ring_rate(p, ring, count, &ret->local_link, err) < 0)
        return -1;
    for (uint32_t r = 0; r < n; r++) /* nodes are numbered in the order of their first ranks */
        if (site->node[r] == nleader)
            ring[nleader++] = r;
    return given->network <= 0 ? ring_rate(p, ring, nleader, &ret->network, err) : 0;
}

/* ---- together ---- */

static void slowest(double *to, double rate)
{
    if (rate > 0 && (*to <= 0 || rate < *to))
        *to = rate;
}

static int judge_samples(void *ctx, const unsigned char *const *data, const size_t *len,
                         struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_rates_site *site = ctx;
    const uint32_t n = site->comm->x->size;
    struct ckpt_rates all = {0};

    for (uint32_t r = 0; r < n; r++) {
        struct sample s;
        uint32_t local = 0;
        if (len[r] != sizeof s)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version", r);
        memcpy(&s, data[r], sizeof s);
        for (uint32_t k = 0; k < n; k++)
            local += site->node[k] == site->node[r];
        /* several ranks copy at once, as far as there are processors; devices do by themselves */
        const double at_once = (double)ckpt_min_u64(local, s.cpus ? s.cpus : 1);
        slowest(&all.node_storage, s.storage);
        slowest(&all.page_cache, s.page_cache * at_once);
        slowest(&all.copy, s.copy * (site->comm->x->device ? local : at_once));
        slowest(&all.local_link, s.local_link);
        slowest(&all.network, s.network);
    }
    ckpt_str_append(answer, (const char *)&all, sizeof all);
    return answer->failed ? ckpt_nomem(err) : 0;
}

static int sample_links(const struct ckpt_rates_site *site, const struct ckpt_rates *given,
                        struct sample *ret, unsigned char **buf, struct ckpt_err *err)
{
    struct pass p = {
        .comm = site->comm, .out = *buf, .in = *buf + BLOCK, .timeout_ms = site->timeout_ms};
    struct ckpt_rates of_device = {0};

    if (site->comm->x->device) {
        if (ckpt_rates_of_devices(site, &of_device, err) < 0)
            return -1;
        ret->copy = of_device.copy;
        ret->local_link = of_device.local_link;
        ret->network = of_device.network;
        return 0;
    }
    int rc = link_rates(site, given, &p, ret, err);
    if (p.leak)
        (void)ckpt_steal(buf);
    return rc;
}

static int take_sample(const struct ckpt_rates_site *site, const struct ckpt_rates *given,
                       struct sample *ret, struct ckpt_err *err)
{
    const uint32_t self = site->comm->x->rank;
    ckpt_cleanup(ckpt_freep) unsigned char *buf = calloc(2, BLOCK);
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t first = 0;

    *ret = (struct sample){.cpus = cpus > 0 ? (uint64_t)cpus : 1};
    if (!buf)
        return ckpt_nomem(err);
    memset(buf, 1, (size_t)2 * BLOCK);
    /* links first, while all are here */
    if (sample_links(site, given, ret, &buf, err) < 0)
        return -1;
    if (given->copy <= 0 && !site->comm->x->device)
        ret->copy = copy_rate(buf);
    if (given->page_cache <= 0)
        ret->page_cache = cached_rate(site->cat, buf);
    while (site->node[first] != site->node[self])
        first++;
    if (given->node_storage <= 0 && site->hot < 1 && first == self)
        ret->storage = storage_rate(site, site->node[self]);
    return 0;
}

static void fill(double *rate, double measured)
{
    if (*rate <= 0)
        *rate = measured;
}

int ckpt_rates_measure(const struct ckpt_rates_site *site, struct ckpt_rates *rates,
                       struct ckpt_err *err)
{
    struct ckpt_round round = {.judge = judge_samples, .ctx = (void *)site};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    struct ckpt_rates all;
    struct sample own;
    size_t len;
    int rc = take_sample(site, rates, &own, err);

    if (ckpt_round_run(&round, site->comm, rc, &own, sizeof own, site->timeout_ms, &answer, &len,
                       err) < 0)
        return -1;
    if (len != sizeof all)
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    memcpy(&all, answer, sizeof all);
    fill(&rates->node_storage, all.node_storage);
    fill(&rates->page_cache, all.page_cache);
    fill(&rates->copy, all.copy);
    fill(&rates->local_link, all.local_link);
    fill(&rates->network, all.network);
    return 0;
}
