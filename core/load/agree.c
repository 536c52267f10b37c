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
#include "load/policy.h"
#include "load/same.h"
#include "tensor/region.h"

enum { HELLO_FILES = 1024 }; /* whose sizes are told, to name the one that differs */

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
    uint64_t smaller; /* 1: there are smaller windows to try */
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
        most.smaller |= f.need.smaller;
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
        struct ckpt_plan_sizes smaller = p->sizes;
        f.need.smaller = ckpt_policy_shrink(&smaller, p->nrank);
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

    do {
        if (try_plan(p, &need, err) < 0)
            return -1;
        if (need.host <= windows && (!device || need.device <= opt->device_bytes))
            return 0;
        (void)ckpt_policy_shrink(&p->sizes, p->nrank);
    } while (need.smaller);
    const bool host = need.host > windows;
    return ckpt_fail(err, CKPT_LIMIT, "%s is %" PRIu64 ", but the plan needs at least %" PRIu64,
                     host ? "host_bytes" : "device_bytes",
                     host ? opt->host_bytes : opt->device_bytes,
                     host ? ckpt_load_host_bytes(need.host) : need.device);
}

/* Plan for these readers, in windows of the sizes that policy gives and memory allows. */
static int plan_for(struct ckpt_load *load, const struct ckpt_policy_input *in,
                    const struct ckpt_policy *policy, const uint32_t *node, struct ckpt_err *err)
{
    const uint32_t self = load->comm->x->rank, n = load->comm->x->size;
    struct planning p = {.load = load, .sizes = policy->sizes, .slots = policy->slots};

    load->readers = policy->readers;
    load->engine_opt = (struct ckpt_engine_options){
        .slots = policy->slots,
        .threads = policy->threads,
        .read_timeout_ms = load->opt.read_timeout_ms,
        .exchange_timeout_ms = load->opt.exchange_timeout_ms,
        .mode = {.verify = load->opt.verify, .device = in->cost.device},
        .cost = {policy->gap, policy->share.bound, policy->run, {policy->direct, NULL}},
        .bounce = policy->share.bounce,
    };
    if (ckpt_load_domain(policy->readers, self, node, n, &p.rank, &p.nrank, err) < 0)
        return -1;
    int rc = fit_plan(&p, err);
    free(p.rank);
    return rc;
}

/* With AUTO, ranks that can't share what they read (nothing fits) share less. All ranks come to the
 * same end: what does not fit on one fits on none. */
static int choose(struct ckpt_load *load, const struct hello_answer *a, const uint32_t *node,
                  struct ckpt_err *err)
{
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct ckpt_policy_input in = {.opt = &load->opt, .cpus = cpus > 0 ? (uint32_t)cpus : 1};
    struct ckpt_policy policy;
    struct ckpt_err own = {0};
    uint64_t stored;
    int rc;

    in.cost = (struct ckpt_cost_input){
        .hot = a->hot, .shared = a->shared, .device = load->comm->x->device != NULL};
    for (uint32_t r = 0; r < load->comm->x->size; r++)
        in.local += node[r] == node[load->comm->x->rank];
    if (ckpt_load_weigh(load->parts.roster, node, a->nnode, &in.cost, err) < 0 ||
        ckpt_policy_choose(&in, &policy, err) < 0 ||
        ckpt_load_needed(load->parts.roster, load->comm->x->rank, &load->needed_bytes, &stored,
                         err) < 0)
        return -1;
    load->rates = policy.rates;
    load->unique_bytes = in.cost.unique;
    while ((rc = plan_for(load, &in, &policy, node, &own)) < 0) {
        enum ckpt_readers less = policy.readers;
        if (own.code != CKPT_LIMIT || load->opt.readers != CKPT_READERS_AUTO ||
            !ckpt_policy_less(&less))
            break;
        own = (struct ckpt_err){0};
        if (ckpt_policy_sizes(&in, less, &policy, &own) < 0)
            break;
    }
    return rc < 0 ? ckpt_fail(err, own.code, "%s", own.text) : 0;
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
