/* SPDX-License-Identifier: Apache-2.0 */
/* From every rank's wants to one plan that all agree on. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "load/comm.h"
#include "load/device.h"
#include "load/load_inner.h"
#include "load/near.h"
#include "load/same.h"
#include "tensor/region.h"

enum {
    HOT_PIECE = 2 << 20, /* of what is in memory: stays in the CPU's cache */
    MOST_THREADS = 8,
    COLD_THREADS = 4,   /* what a disk wants in flight */
    HOT_GAP = 4096,     /* reading on in the page cache is as dear as another call */
    LONG_RUN = 4096,    /* is read alone rather than with what lies between */
    HELLO_FILES = 1024, /* whose sizes are told, to name the one that differs */
    EXACT_RUN = 32,     /* the same where every byte is to be read once */
};

/* ---- round 1: who is here ---- */

enum { STEP_TEXT = 128 };

struct hello { /* then the sizes of the first files, uint64_t */
    unsigned char checkpoint[16];
    char step[STEP_TEXT]; /* its name, or the beginning of that */
    uint64_t step_hash;
    uint64_t wants_lo, wants_hi, node, options, files;
    double hot;
    uint32_t shared, version;
};

struct hello_answer { /* then class_of[], node[], first rank of each class[], all uint32_t */
    uint32_t nclass, nnode;
    double hot;
    uint32_t shared, copies; /* copies: not all ranks have the very same files */
};

/* In which file do two checkpoints differ? By size; false: in none that was told. */
static bool fail_file(const struct ckpt_load *load, uint32_t r, const unsigned char *data,
                      size_t len, struct ckpt_err *err)
{
    const struct ckpt_catalog *cat = load->view->cat;

    for (size_t i = 0; i < cat->sources.len && (i + 1) * sizeof(uint64_t) <= len; i++) {
        uint64_t size;
        memcpy(&size, data + i * sizeof size, sizeof size);
        if (size == cat->sources.ptr[i]->size)
            continue;
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(cat->sources.ptr[i]);
        (void)ckpt_fail(err, CKPT_CONFLICT,
                        "rank %" PRIu32 " sees another checkpoint than rank 0: '%s' has %" PRIu64
                        " bytes here, its like there %" PRIu64,
                        r, name ? name : "a file", cat->sources.ptr[i]->size, size);
        return true;
    }
    return false;
}

static int compare_hello(uint32_t r, const struct hello *a, const struct hello *b,
                         struct ckpt_err *err)
{
    if (a->version != b->version)
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs", r);
    if (a->step_hash != b->step_hash)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "rank %" PRIu32 " loads '%.*s', rank 0 '%.*s': all ranks must load the "
                         "same step, and copies of it must have the same name",
                         r, STEP_TEXT - 1, b->step, STEP_TEXT - 1, a->step);
    if (memcmp(a->checkpoint, b->checkpoint, sizeof a->checkpoint) != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "rank %" PRIu32 " sees another checkpoint than rank 0, or another view "
                         "of it: other tensors, shapes, dtypes, files or computed values",
                         r);
    if (a->options != b->options)
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " was given other options than rank 0",
                         r);
    return 0;
}

/* Number equal keys in the order of their first rank. */
static uint32_t number_keys(const uint64_t (*key)[2], uint32_t n, uint32_t *ret, uint32_t *first)
{
    uint32_t count = 0;

    for (uint32_t r = 0; r < n; r++) {
        uint32_t c = count;
        while (c-- > 0)
            if (key[first[c]][0] == key[r][0] && key[first[c]][1] == key[r][1])
                break;
        if (c == UINT32_MAX) {
            c = count;
            first[count++] = r;
        }
        ret[r] = c;
    }
    return count;
}

static int judge_hello(void *ctx, const unsigned char *const *data, const size_t *len,
                       struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_load *load = ctx;
    const uint32_t n = load->comm->x->size;
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = malloc(n * sizeof *key);
    ckpt_cleanup(ckpt_freep) uint64_t(*node)[2] = malloc(n * sizeof *node);
    ckpt_cleanup(ckpt_freep) uint32_t *number = malloc(4 * (size_t)n * sizeof *number);
    struct hello first = {0};
    struct hello_answer a = {.hot = 1};

    if (!key || !node || !number)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++) {
        struct hello h;
        if (len[r] < sizeof h)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs",
                             r);
        memcpy(&h, data[r], sizeof h);
        if (r == 0)
            first = h;
        if (memcmp(h.checkpoint, first.checkpoint, sizeof h.checkpoint) != 0 &&
            fail_file(load, r, data[r] + sizeof h, len[r] - sizeof h, err))
            return -1;
        if (compare_hello(r, &first, &h, err) < 0)
            return -1;
        key[r][0] = h.wants_lo;
        key[r][1] = h.wants_hi;
        node[r][0] = h.node;
        node[r][1] = 0;
        a.hot = h.hot < a.hot ? h.hot : a.hot;
        a.shared |= h.shared;
        a.copies |= h.files != first.files;
    }
    uint32_t *class_of = number, *node_of = number + n, *rep = number + 2 * (size_t)n;
    a.nclass = number_keys((const uint64_t(*)[2])key, n, class_of, rep);
    a.nnode = number_keys((const uint64_t(*)[2])node, n, node_of, rep + n);
    ckpt_str_append(answer, (const char *)&a, sizeof a);
    ckpt_str_append(answer, (const char *)class_of, n * sizeof *class_of);
    ckpt_str_append(answer, (const char *)node_of, n * sizeof *node_of);
    ckpt_str_append(answer, (const char *)rep, a.nclass * sizeof *rep);
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* ---- round 2: what they want ---- */

struct tables_ctx {
    uint32_t nclass;
    const uint32_t *rep;
};

static int judge_tables(void *ctx, const unsigned char *const *data, const size_t *len,
                        struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct tables_ctx *t = ctx;

    for (uint32_t c = 0; c < t->nclass; c++) {
        const uint64_t n = len[t->rep[c]];
        ckpt_str_append(answer, (const char *)&n, sizeof n);
        ckpt_str_append(answer, (const char *)data[t->rep[c]], n);
    }
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* This rank's own table as bytes: what it gets back must be the same. */
struct own_table {
    const unsigned char *data;
    size_t len;
};

/* Takes class_of. */
static int parse_tables(struct ckpt_load *load, const unsigned char *data, size_t len,
                        const struct own_table *own, uint32_t *class_of, uint32_t nclass,
                        struct ckpt_err *err)
{
    const uint32_t nrank = load->comm->x->size;
    struct ckpt_wants *table = calloc(nclass, sizeof *table);
    struct ckpt_roster *roster = calloc(1, sizeof *roster);
    int rc = table && roster ? 0 : ckpt_nomem(err);

    for (uint32_t c = 0; c < nclass && rc == 0; c++) {
        uint64_t n = 0;
        if (len < sizeof n)
            rc = ckpt_fail(err, CKPT_FORMAT, "the wants of all ranks are cut short");
        else
            memcpy(&n, data, sizeof n);
        if (rc == 0 && n > len - sizeof n)
            rc = ckpt_fail(err, CKPT_FORMAT, "the wants of all ranks are cut short");
        if (rc == 0 && c == class_of[load->comm->x->rank] &&
            (n != own->len || memcmp(data + sizeof n, own->data, n) != 0))
            rc = ckpt_fail(err, CKPT_FORMAT, "rank 0 sent other wants than this rank's");
        if (rc == 0)
            rc = ckpt_wants_parse(data + sizeof n, n, load->view->cat, nrank, &table[c], err);
        if (rc == 0) {
            data += sizeof n + n;
            len -= sizeof n + n;
        }
    }
    if (rc == 0) {
        rc = ckpt_roster_init(roster, load->view->cat, nrank, class_of, table, nclass, err);
        table = NULL;
        class_of = NULL;
    }
    if (rc < 0) {
        for (uint32_t c = 0; table && c < nclass; c++)
            ckpt_wants_release(&table[c]);
        free(table);
        free(class_of);
        free(roster);
        return -1;
    }
    load->parts.roster = roster;
    return 0;
}

/* ---- what to do ---- */

static uint64_t sum_needed(const struct ckpt_roster *r, uint32_t rank)
{
    const struct ckpt_wants *w = &r->table[r->class_of[rank]];
    uint64_t bytes = 0;

    for (size_t e = 0; e < w->entries.len; e++) {
        const struct ckpt_tensor *t = &r->cat->tensors.ptr[w->entries.ptr[e].tensor];
        struct ckpt_box box;
        if (ckpt_wants_box(w, &w->entries.ptr[e], t, rank, &box))
            bytes += ckpt_box_numel(&box) * ckpt_dtype_size(t->dtype);
    }
    return bytes;
}

int ckpt_load_weigh(const struct ckpt_roster *roster, const uint32_t *node, uint32_t nnode,
                    struct ckpt_cost_input *in, struct ckpt_err *err)
{
    const uint32_t n = roster->nrank;
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc((n + 1) * sizeof *rank);
    ckpt_cleanup(ckpt_freep) uint64_t *need = calloc(nnode + 1, sizeof *need);

    if (!rank || !need)
        return ckpt_nomem(err);
    in->nrank = n;
    in->nnode = nnode;
    for (uint32_t r = 0; r < n; r++) {
        uint64_t bytes = sum_needed(roster, r);
        in->needed += bytes;
        need[node[r]] += bytes;
        rank[r] = r;
    }
    if (ckpt_plan_bytes(roster, rank, n, &in->unique, err) < 0)
        return -1;
    for (uint32_t k = 0; k < nnode; k++) {
        uint64_t unique = in->unique;
        uint32_t count = 0;
        for (uint32_t r = 0; r < n; r++)
            if (node[r] == k)
                rank[count++] = r;
        if (nnode > 1 && ckpt_plan_bytes(roster, rank, count, &unique, err) < 0)
            return -1;
        in->node_needed = ckpt_max_u64(in->node_needed, need[k]);
        in->node_unique = ckpt_max_u64(in->node_unique, unique);
        in->sum_node_unique += unique;
    }
    return 0;
}

int ckpt_load_domain(enum ckpt_readers readers, uint32_t self, const uint32_t *node, uint32_t nrank,
                     uint32_t **ret, uint32_t *ret_n, struct ckpt_err *err)
{
    uint32_t *rank = malloc(nrank * sizeof *rank), n = 0;

    if (!rank)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < nrank; r++)
        if (readers == CKPT_READERS_ONCE || r == self ||
            (readers == CKPT_READERS_NODE && node[r] == node[self]))
            rank[n++] = r;
    *ret = rank;
    *ret_n = n;
    return 0;
}

/* ---- round 3: the same plan? does it fit? ---- */

struct need {
    uint64_t host, device;
};

struct fit {
    uint64_t digest;
    struct need need;
    uint32_t domain, zero; /* its first rank */
};

static int judge_fit(void *ctx, const unsigned char *const *data, const size_t *len,
                     struct ckpt_str *answer, struct ckpt_err *err)
{
    const uint32_t n = ((struct ckpt_comm *)ctx)->x->size;
    struct need most = {0};

    for (uint32_t r = 0; r < n; r++) {
        struct fit f, first;
        if (len[r] != sizeof f)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version", r);
        memcpy(&f, data[r], sizeof f);
        memcpy(&first, data[f.domain < n ? f.domain : 0], sizeof first);
        if (f.digest != first.digest)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "ranks %" PRIu32 " and %" PRIu32 " have made different plans",
                             f.domain, r);
        most.host = ckpt_max_u64(most.host, f.need.host);
        most.device = ckpt_max_u64(most.device, f.need.device);
    }
    ckpt_str_append(answer, (const char *)&most, sizeof most);
    return 0;
}

struct planning {
    struct ckpt_load *load;
    uint32_t *rank; /* the domain */
    uint32_t nrank, slots;
    struct ckpt_plan_sizes sizes;
};

/* Plan with these sizes; *ret_need: what the rank that needs most would take. */
static int try_plan(struct planning *p, struct need *ret_need, struct ckpt_err *err)
{
    struct ckpt_load *load = p->load;
    struct ckpt_round round = {.judge = judge_fit, .ctx = load->comm};
    struct fit f = {.domain = p->rank[0]};
    unsigned char *answer = NULL;
    size_t len = 0;
    int rc;

    ckpt_plan_free(load->parts.plan);
    load->parts.plan = NULL;
    load->parts.receives.len = 0;
    rc = ckpt_plan_new(load->parts.roster, p->rank, p->nrank, &p->sizes, &load->parts.plan, err);
    if (rc == 0)
        rc = ckpt_plan_receives(load->parts.plan, load->comm->x->rank, &load->parts.receives, err);
    if (rc == 0)
        rc = ckpt_engine_measure(load->parts.plan, load->comm->x->rank, &load->engine_opt.mode,
                                 &load->parts.receives, &load->sizes, err);
    if (rc == 0) {
        f.digest = ckpt_plan_digest(load->parts.plan);
        f.need.host = p->slots * load->sizes.host;
        f.need.device = p->slots * load->sizes.device;
    }
    rc = ckpt_round_run(&round, load->comm, rc, &f, sizeof f, load->opt.exchange_timeout_ms,
                        &answer, &len, err);
    if (rc == 0 && len == sizeof *ret_need)
        memcpy(ret_need, answer, len);
    free(answer);
    return rc;
}

/* Small units are padded, and equal parts are gathered for several: what fits is found by trying.
 */
static int fit_plan(struct planning *p, struct ckpt_err *err)
{
    const struct ckpt_load_options *opt = &p->load->opt;
    const bool device = p->load->engine_opt.mode.device;
    const uint64_t windows = opt->host_bytes - ckpt_load_aside(opt);
    struct need need = {0};

    for (int i = 0; i < 12; i++) {
        if (try_plan(p, &need, err) < 0)
            return -1;
        if (need.host <= windows && (!device || need.device <= opt->device_bytes))
            return 0;
        uint64_t piece = p->sizes.piece / 2;
        if (piece < CKPT_LOAD_PIECE / 16)
            break;
        p->sizes.piece = piece;
        p->sizes.unit = ckpt_min_u64(p->sizes.unit, piece);
    }
    const bool host = need.host > windows;
    return ckpt_fail(err, CKPT_LIMIT, "%s is %" PRIu64 ", but the plan needs at least %" PRIu64,
                     host ? "host_bytes" : "device_bytes",
                     host ? opt->host_bytes : opt->device_bytes,
                     host ? ckpt_load_host_bytes(need.host) : need.device);
}

/* Ranks of a node that read for themselves may want the same bytes: the page cache reads them once.
 */
static enum ckpt_direct choose_direct(const struct ckpt_load *load, double hot, uint32_t local)
{
    if (load->opt.direct == CKPT_LOAD_DIRECT_ALWAYS)
        return CKPT_DIRECT_ALL;
    if (load->opt.direct == CKPT_LOAD_DIRECT_NEVER || hot > CKPT_LOAD_HOT ||
        (load->readers == CKPT_READERS_EACH && local > 1))
        return CKPT_DIRECT_NONE;
    return CKPT_DIRECT_COLD;
}

static uint32_t choose_threads(const struct ckpt_load_options *opt, uint32_t local, double hot,
                               bool device)
{
    const uint32_t least = hot > CKPT_LOAD_HOT ? 1 : COLD_THREADS;
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n = cpus > 0 ? (uint32_t)cpus / local : 1;

    if (opt->threads)
        return opt->threads;
    n = n < least ? least : n;
    const uint32_t most = device ? 2 * MOST_THREADS : MOST_THREADS;
    return n > most ? most : n;
}

static int choose_readers(struct ckpt_load *load, const struct hello_answer *a,
                          const uint32_t *node, struct ckpt_cost_input *in, struct ckpt_err *err)
{
    const bool device = load->comm->x->device != NULL;
    struct ckpt_cost cost;

    *in = (struct ckpt_cost_input){.hot = a->hot, .shared = a->shared, .device = device};
    if (ckpt_load_weigh(load->parts.roster, node, a->nnode, in, err) < 0)
        return -1;
    load->rates = load->opt.rates;
    load->readers = load->opt.readers;
    ckpt_rates_assume(&load->rates, device);
    ckpt_cost_estimate(in, &load->rates, &cost);
    if (load->readers == CKPT_READERS_AUTO)
        load->readers = ckpt_cost_choose(&cost);
    return 0;
}

static int choose(struct ckpt_load *load, const struct hello_answer *a, const uint32_t *node,
                  struct ckpt_err *err)
{
    const uint32_t self = load->comm->x->rank, n = load->comm->x->size;
    struct planning p = {.load = load};
    struct ckpt_cost_input in;
    const bool device = load->comm->x->device != NULL;
    const bool hot = a->hot > CKPT_LOAD_HOT;
    const uint64_t aside = ckpt_load_aside(&load->opt);
    struct ckpt_load_share share;
    uint32_t local = 0;

    if (choose_readers(load, a, node, &in, err) < 0)
        return -1;
    if (n == 1)
        load->readers = CKPT_READERS_EACH;
    load->unique_bytes = in.unique;
    load->needed_bytes = sum_needed(load->parts.roster, self);
    for (uint32_t r = 0; r < n; r++)
        local += node[r] == node[self];
    const enum ckpt_direct direct = choose_direct(load, a->hot, local);
    uint32_t threads = choose_threads(&load->opt, local, a->hot, device);
    ckpt_load_share(aside, direct != CKPT_DIRECT_NONE, hot, &threads, &share);
    load->engine_opt = (struct ckpt_engine_options){
        .threads = threads,
        .read_timeout_ms = load->opt.read_timeout_ms,
        .exchange_timeout_ms = load->opt.exchange_timeout_ms,
        .mode = {.verify = load->opt.verify, .device = device},
        .cost = {hot ? HOT_GAP : CKPT_REGION_GAP, share.bound, LONG_RUN, {direct, NULL}},
        .bounce = share.bounce,
    };
    if (ckpt_load_domain(load->readers, self, node, n, &p.rank, &p.nrank, err) < 0)
        return -1;
    if (p.nrank > 1) /* what lies in holes is another unit's, read by another worker or rank */
        load->engine_opt.cost.run = EXACT_RUN;
    const struct ckpt_engine_mode *mode = &load->engine_opt.mode;
    if (load->opt.window_bytes == 0 && hot && a->nnode == 1 && !mode->device)
        load->opt.window_bytes = (uint64_t)p.nrank * HOT_PIECE;
    int rc = ckpt_load_sizes(&load->opt, p.nrank, in.unique, load->engine_opt.threads, mode->device,
                             aside, &p.sizes, &p.slots, err);
    p.sizes.common = mode->device && !mode->verify && p.nrank == n;
    load->engine_opt.slots = p.slots;
    if (rc == 0)
        rc = fit_plan(&p, err);
    free(p.rank);
    return rc;
}

/* ---- all of it ---- */

static void make_hello(const struct ckpt_load *load, const unsigned char *table, size_t len,
                       struct hello *h)
{
    XXH128_hash_t wants = XXH3_128bits(table, len);
    const struct ckpt_load_options *opt = &load->opt;
    const uint64_t number[6] = {opt->readers,      opt->host_bytes, opt->device_bytes,
                                opt->window_bytes, opt->verify,     opt->direct};
    const double rate[6] = {opt->rates.node_storage, opt->rates.shared_storage,
                            opt->rates.page_cache,   opt->rates.copy,
                            opt->rates.local_link,   opt->rates.network};
    bool shared;

    memset(h, 0, sizeof *h);
    ckpt_catalog_digest(load->view->cat, h->checkpoint);
    (void)snprintf(h->step, sizeof h->step, "%s", load->view->name);
    h->step_hash = XXH3_64bits(load->view->name, strlen(load->view->name));
    h->wants_lo = wants.low64;
    h->wants_hi = wants.high64;
    h->node = ckpt_node_digest();
    h->options = XXH3_64bits_withSeed(rate, sizeof rate, XXH3_64bits(number, sizeof number));
    h->files = ckpt_catalog_files(load->view->cat);
    ckpt_load_residency(load->view->cat, &h->hot, &shared);
    h->shared = shared;
    h->version = 6;
}

static int exchange_wants(struct ckpt_load *load, const unsigned char *table, size_t len,
                          const struct hello_answer *a, uint32_t *class_of, const uint32_t *rep,
                          struct ckpt_err *err)
{
    const uint32_t self = load->comm->x->rank;
    struct tables_ctx ctx = {a->nclass, rep};
    struct ckpt_round round = {.judge = judge_tables, .ctx = &ctx};
    const bool mine = rep[class_of[self]] == self;
    unsigned char *answer = NULL;
    size_t answer_len = 0;

    if (ckpt_round_run(&round, load->comm, 0, mine ? table : NULL, mine ? len : 0,
                       load->opt.exchange_timeout_ms, &answer, &answer_len, err) < 0) {
        free(class_of);
        return -1;
    }
    const struct own_table own = {table, len};
    int rc = parse_tables(load, answer, answer_len, &own, class_of, a->nclass, err);
    free(answer);
    return rc;
}

/* Are all numbers of rank 0's answer in range? word: class_of[n], node[n], first rank[nclass]. */
static bool answer_ok(const struct hello_answer *a, const uint32_t *word, uint32_t n)
{
    if (a->nclass < 1 || a->nclass > n || a->nnode < 1 || a->nnode > n)
        return false;
    for (uint32_t r = 0; r < n; r++)
        if (word[r] >= a->nclass || word[n + r] >= a->nnode)
            return false;
    for (uint32_t c = 0; c < a->nclass; c++)
        if (word[2 * (size_t)n + c] >= n)
            return false;
    return true;
}

static int agree(struct ckpt_load *load, const unsigned char *table, size_t len,
                 struct ckpt_err *err)
{
    const uint32_t n = load->comm->x->size;
    const struct ckpt_catalog *cat = load->view->cat;
    const size_t nfile = cat->sources.len < HELLO_FILES ? cat->sources.len : HELLO_FILES;
    struct ckpt_round round = {.judge = judge_hello, .ctx = load};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    ckpt_cleanup(ckpt_freep) unsigned char *message =
        malloc(sizeof(struct hello) + nfile * sizeof(uint64_t));
    struct hello_answer a;
    struct hello h;
    struct ckpt_err own = {0};
    size_t got;

    if (!message)
        return ckpt_nomem(err);
    make_hello(load, table, len, &h);
    memcpy(message, &h, sizeof h);
    for (size_t i = 0; i < nfile; i++)
        memcpy(message + sizeof h + i * sizeof(uint64_t), &cat->sources.ptr[i]->size,
               sizeof(uint64_t));
    if (ckpt_round_run(&round, load->comm, 0, message, sizeof h + nfile * sizeof(uint64_t),
                       load->opt.exchange_timeout_ms, &answer, &got, &own) < 0)
        return ckpt_fail(err, own.code, "%s", own.text);
    if (got < sizeof a)
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    memcpy(&a, answer, sizeof a);
    if (got != sizeof a + (2 * (size_t)n + a.nclass) * sizeof(uint32_t))
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    const uint32_t *word = (const uint32_t *)(const void *)(answer + sizeof a);
    if (!answer_ok(&a, word, n))
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a broken message");
    if (a.copies && ckpt_load_compare(load, err) < 0)
        return -1;
    uint32_t *class_of = malloc(n * sizeof *class_of);
    if (!class_of)
        return ckpt_nomem(err);
    memcpy(class_of, word, n * sizeof *class_of);
    if (exchange_wants(load, table, len, &a, class_of, word + 2 * (size_t)n, err) < 0)
        return -1;
    return choose(load, &a, word + n, err);
}

int ckpt_load_plan(struct ckpt_load *load, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();
    ckpt_cleanup(ckpt_freep) unsigned char *table = NULL;
    size_t len;

    if (load->planned)
        return ckpt_fail(err, CKPT_USAGE, "a load is planned once");
    if (load->comm->busy || load->comm->broken)
        return ckpt_fail(err, CKPT_USAGE,
                         load->comm->busy ? "another load of this comm runs"
                                          : "this comm's last load failed: make a new comm");
    load->parts.view = load->view;
    load->parts.comm = load->comm;
    if (ckpt_wants_dump(&load->wants, &table, &len, err) < 0 || agree(load, table, len, err) < 0)
        return -1;
    load->parts.needed_bytes = load->needed_bytes;
    load->parts.unique_bytes = load->unique_bytes;
    load->planned = true;
    load->plan_ns = ckpt_now_ns() - begin;
    return 0;
}
