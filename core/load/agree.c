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
#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "load/comm.h"
#include "load/device.h"
#include "load/load_inner.h"
#include "load/near.h"
#include "load/policy.h"
#include "load/same.h"
#include "tensor/strided.h"

enum { HELLO_FILES = 1024 }; /* whose sizes are told, to name the one that differs */

/* ---- round 1: who is here ---- */

enum { STEP_TEXT = 128 };

struct hello { /* then the sizes of the first files, uint64_t */
    unsigned char checkpoint[16];
    char step[STEP_TEXT]; /* its name, or the beginning of that */
    uint64_t step_hash;
    uint64_t wants_lo, wants_hi, node, options, files;
    double resident, bytes; /* of the files that this rank looked at */
    uint32_t shared, version;
    uint32_t far;     /* does not read the memory of all ranks of its node */
    uint32_t renewed; /* how often the transport was renewed */
};

struct hello_answer { /* then class_of[], node[], first rank of each class[], all uint32_t */
    uint32_t nclass, nnode;
    double hot;
    uint32_t shared, copies; /* copies: not all ranks have the very same files */
    uint32_t far, unused;
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
    if (a->renewed != b->renewed)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "the last load failed on rank 0 or on rank %" PRIu32
                         ", but not on both: make a new comm",
                         r);
    return 0;
}

/* Number equal keys in the order of their first rank; *ret_n: how many there are. */
static int number_keys(const uint64_t (*key)[2], uint32_t n, uint32_t *ret, uint32_t *first,
                       uint32_t *ret_n)
{
    struct ckpt_map map = {0};
    bool new;

    *ret_n = 0;
    for (uint32_t r = 0; r < n; r++) {
        if (ckpt_map_put(&map, (const char *)key[r], sizeof key[r], *ret_n, &ret[r], &new) < 0) {
            ckpt_map_release(&map);
            return -1;
        }
        if (new)
            first[(*ret_n)++] = r;
    }
    ckpt_map_release(&map);
    return 0;
}

/* The part of the files that is in the page cache of the node that has the least of them. */
static int least_resident(const struct ckpt_residency *of, uint32_t n, const uint32_t *node_of,
                          uint32_t nnode, double *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_residency *node = calloc(nnode, sizeof *node);

    if (!node)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++) {
        node[node_of[r]].resident += of[r].resident;
        node[node_of[r]].bytes += of[r].bytes;
    }
    *ret = 1;
    for (uint32_t k = 0; k < nnode; k++) {
        const double part = ckpt_residency_part(&node[k]);
        *ret = part < *ret ? part : *ret;
    }
    return 0;
}

static int judge_hello(void *ctx, const unsigned char *const *data, const size_t *len,
                       struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_load *load = ctx;
    const uint32_t n = load->comm->x->size;
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = malloc(n * sizeof *key);
    ckpt_cleanup(ckpt_freep) uint64_t(*node)[2] = malloc(n * sizeof *node);
    ckpt_cleanup(ckpt_freep) uint32_t *number = malloc(4 * (size_t)n * sizeof *number);
    ckpt_cleanup(ckpt_freep) struct ckpt_residency *residency = calloc(n, sizeof *residency);
    struct hello first = {0};
    struct hello_answer a = {0};

    if (!key || !node || !number || !residency)
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
        residency[r] = (struct ckpt_residency){h.resident, h.bytes, h.shared != 0};
        a.shared |= h.shared;
        a.copies |= h.files != first.files;
        a.far |= h.far;
    }
    uint32_t *class_of = number, *node_of = number + n, *rep = number + 2 * (size_t)n;
    if (number_keys((const uint64_t(*)[2])key, n, class_of, rep, &a.nclass) < 0 ||
        number_keys((const uint64_t(*)[2])node, n, node_of, rep + n, &a.nnode) < 0)
        return ckpt_nomem(err);
    if (least_resident(residency, n, node_of, a.nnode, &a.hot, err) < 0)
        return -1;
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

/* ---- round 3: the same plan? does it fit? ---- */

/* What the members of a group must agree on. */
struct group_digest {
    uint64_t ranks, plan;
};

enum { DIGESTS = 64 }; /* of a rank's groups, that are compared */

struct fit {               /* then the digests */
    uint64_t host, device; /* bytes that are needed at least */
    uint64_t windows;      /* in which something is exchanged */
};

static int digest_cmp(const void *pa, const void *pb)
{
    const struct group_digest *a = pa, *b = pb;

    return (a->ranks > b->ranks) - (a->ranks < b->ranks);
}

static int compare_digests(struct group_digest *d, size_t n, struct ckpt_err *err)
{
    if (n)
        qsort(d, n, sizeof *d, digest_cmp);
    for (size_t i = 1; i < n; i++)
        if (d[i].ranks == d[i - 1].ranks && d[i].plan != d[i - 1].plan)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "ranks that want the same have made different plans");
    return 0;
}

static int judge_fit(void *ctx, const unsigned char *const *data, const size_t *len,
                     struct ckpt_str *answer, struct ckpt_err *err)
{
    const uint32_t n = ((struct ckpt_comm *)ctx)->x->size;
    CKPT_VEC(struct group_digest) all = {0};
    struct fit most = {0};
    int rc = 0;

    for (uint32_t r = 0; r < n && rc == 0; r++) {
        const size_t count = (len[r] - sizeof most) / sizeof *all.ptr;
        struct fit f;
        if (len[r] < sizeof f || len[r] != sizeof f + count * sizeof *all.ptr) {
            rc = ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version", r);
            break;
        }
        memcpy(&f, data[r], sizeof f);
        most.host = ckpt_max_u64(most.host, f.host);
        most.device = ckpt_max_u64(most.device, f.device);
        most.windows = ckpt_max_u64(most.windows, f.windows);
        if (ckpt_vec_reserve(&all, count + 1) < 0)
            rc = ckpt_nomem(err);
        else
            memcpy(all.ptr + all.len, data[r] + sizeof f, count * sizeof *all.ptr);
        all.len += rc == 0 ? count : 0;
    }
    if (rc == 0)
        rc = compare_digests(all.ptr, all.len, err);
    ckpt_vec_release(&all);
    ckpt_str_append(answer, (const char *)&most, sizeof most);
    return rc;
}

/* Those of groups of several ranks. */
static void add_digests(const struct ckpt_plan *p, struct ckpt_str *out)
{
    uint32_t count = 0;

    for (uint32_t g = 0; g < p->groups.len && count < DIGESTS; g++) {
        const struct ckpt_group *group = &p->groups.ptr[g];
        const struct group_digest d = {XXH3_64bits(group->rank, group->n * sizeof *group->rank),
                                       ckpt_plan_digest(p, g)};
        if (group->n == 1)
            continue;
        ckpt_str_append(out, (const char *)&d, sizeof d);
        count++;
    }
}

/* How much of the budget slots take; less of them where that is too much: one rank's alone, and so
 * nobody else's concern. False: even the least does not fit. */
static bool fit_slots(struct ckpt_load *load, uint64_t plan_bytes, struct fit *ret)
{
    struct ckpt_engine_options *o = &load->engine_opt;
    const struct ckpt_engine_sizes *z = &load->sizes;
    const uint64_t aside = ckpt_load_aside(&load->opt);

    for (;;) {
        ret->host = o->ahead * z->read_host + o->slots * z->window_host + plan_bytes;
        ret->device = o->ahead * z->read_device + o->slots * z->window_device;
        if (ret->host + aside <= load->opt.host_bytes &&
            (!o->mode.device || ret->device <= load->opt.device_bytes))
            return true;
        if (o->ahead > 2)
            o->ahead--;
        else if (o->slots > 1)
            o->slots--;
        else if (o->ahead > 1)
            o->ahead--;
        else
            return false;
    }
}

static int make_plan(struct ckpt_load *load, const struct ckpt_policy *policy, const uint32_t *node,
                     bool star, struct fit *ret, struct ckpt_err *err)
{
    const struct ckpt_sharing sharing = {policy->readers, node};
    struct ckpt_plan **plan = &load->parts.plan;

    ckpt_plan_free(*plan);
    *plan = NULL;
    if (ckpt_plan_new(load->parts.roster, load->comm->x->rank, &sharing, star, &policy->slots.sizes,
                      plan, err) < 0 ||
        ckpt_engine_measure(*plan, &load->engine_opt.mode, &load->sizes, err) < 0)
        return -1;
    ret->windows = (*plan)->windows.len;
    (void)fit_slots(load, ckpt_plan_memory(*plan), ret);
    return 0;
}

/* Do all ranks' plans fit, and agree? */
static int check_plans(struct ckpt_load *load, int rc, const struct fit *own, struct ckpt_err *err)
{
    struct ckpt_round round = {.judge = judge_fit, .ctx = load->comm};
    const uint64_t windows = load->opt.host_bytes - ckpt_load_aside(&load->opt);
    unsigned char *answer = NULL;
    struct ckpt_str data = {0};
    struct fit most = {0};
    size_t len = 0;

    ckpt_str_append(&data, (const char *)own, sizeof *own);
    if (rc == 0)
        add_digests(load->parts.plan, &data);
    if (data.failed)
        rc = ckpt_nomem(err);
    rc = ckpt_round_run(&round, load->comm, rc, data.ptr, data.len, load->opt.exchange_timeout_ms,
                        &answer, &len, err);
    if (rc == 0 && len == sizeof most)
        memcpy(&most, answer, len);
    free(answer);
    ckpt_str_release(&data);
    load->exchanges = most.windows > 0;
    const bool host = most.host > windows;
    if (rc < 0 ||
        (!host && (!load->engine_opt.mode.device || most.device <= load->opt.device_bytes)))
        return rc;
    return ckpt_fail(err, CKPT_LIMIT, "%s is %" PRIu64 ", but the plan needs at least %" PRIu64,
                     host ? "host_bytes" : "device_bytes",
                     host ? load->opt.host_bytes : load->opt.device_bytes,
                     host ? ckpt_load_host_bytes(most.host) : most.device);
}

/* Who is asked to read what this rank can't: a rank of another node, if there is one. */
static uint32_t helper_of(const struct ckpt_load *load, const uint32_t *node)
{
    const uint32_t self = load->comm->x->rank, n = load->comm->x->size;

    for (uint32_t k = 1; k < n; k++)
        if (node[(self + k) % n] != node[self])
            return (self + k) % n;
    return (self + 1) % n;
}

static int plan_for(struct ckpt_load *load, const struct ckpt_policy_input *in,
                    const struct ckpt_policy *policy, const uint32_t *node, bool star,
                    struct ckpt_err *err)
{
    struct fit fit = {0};

    load->readers = policy->readers;
    load->engine_opt = (struct ckpt_engine_options){
        .ahead = policy->slots.ahead,
        .slots = policy->slots.windows,
        .threads = policy->threads,
        .helper = helper_of(load, node),
        .read_timeout_ms = load->opt.read_timeout_ms,
        .exchange_timeout_ms = load->opt.exchange_timeout_ms,
        .mode = {.verify = load->opt.verify, .device = in->cost.device},
        .cost = {policy->gap, policy->share.bound, policy->run, {policy->direct, NULL}},
        .bounce = policy->share.bounce,
    };
    int rc = make_plan(load, policy, node, star, &fit, err);
    return check_plans(load, rc, &fit, err);
}

/* A device's communicator is made when something is to be exchanged, and not before. */
static int connect_device(struct ckpt_load *load, struct ckpt_err *err)
{
    struct ckpt_device *d = load->comm->x->device;

    return d && d->ops->connect && load->exchanges ? d->ops->connect(d, load->comm, err) : 0;
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
    while ((rc = plan_for(load, &in, &policy, node, !a->far, &own)) < 0) {
        enum ckpt_readers less = policy.readers;
        if (own.code != CKPT_LIMIT || load->opt.readers != CKPT_READERS_AUTO ||
            !ckpt_policy_less(&less))
            break;
        own = (struct ckpt_err){0};
        if (ckpt_policy_sizes(&in, less, &policy, &own) < 0)
            break;
    }
    return rc < 0 ? ckpt_fail(err, own.code, "%s", own.text) : connect_device(load, err);
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
    struct ckpt_residency residency;

    memset(h, 0, sizeof *h);
    ckpt_catalog_digest(load->view->cat, h->checkpoint);
    (void)snprintf(h->step, sizeof h->step, "%s", load->view->name);
    h->step_hash = XXH3_64bits(load->view->name, strlen(load->view->name));
    h->wants_lo = wants.low64;
    h->wants_hi = wants.high64;
    h->node = ckpt_node_digest();
    h->options = XXH3_64bits_withSeed(rate, sizeof rate, XXH3_64bits(number, sizeof number));
    h->files = ckpt_catalog_files(load->view->cat);
    ckpt_load_residency(load->view->cat, load->comm->x->rank, load->comm->x->size, &residency);
    h->resident = residency.resident;
    h->bytes = residency.bytes;
    h->shared = residency.shared;
    h->far = !load->comm->x->near;
    h->renewed = load->comm->renewed;
    h->version = 9;
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

/* What the user should know of the transport: once. */
static void show_remark(struct ckpt_load *load)
{
    struct ckpt_xport *x = load->comm->x;

    if (x->remark)
        ckpt_logf(&load->view->shared->opt->log, CKPT_LOG_WARNING, "%s", x->remark);
    x->remark = NULL;
}

int ckpt_load_plan(struct ckpt_load *load, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();
    ckpt_cleanup(ckpt_freep) unsigned char *table = NULL;
    size_t len;

    if (load->planned)
        return ckpt_fail(err, CKPT_USAGE, "a load is planned once");
    if (load->comm->busy)
        return ckpt_fail(err, CKPT_USAGE, "another load of this comm runs");
    ckpt_comm_renew(load->comm);
    load->parts.view = load->view;
    load->parts.comm = load->comm;
    if (ckpt_wants_dump(&load->wants, &table, &len, err) < 0)
        return -1;
    ckpt_comm_permit(load->comm, true); /* connections are made from now on */
    if (agree(load, table, len, err) < 0) {
        ckpt_comm_permit(load->comm, false);
        return -1;
    }
    show_remark(load);
    load->parts.needed_bytes = load->needed_bytes;
    load->parts.unique_bytes = load->unique_bytes;
    load->planned = true;
    load->plan_ns = ckpt_now_ns() - begin;
    return 0;
}
