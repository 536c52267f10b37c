/* SPDX-License-Identifier: Apache-2.0 */
/* The agreement: from the wants of each rank to plans that match and fit into memory on all ranks.
 * Three rounds (comm.h): facts about the ranks (job.c), wants, and the check of the plans. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "comm/comm.h"
#include "device/device.h"
#include "load/engine/job.h"
#include "load/engine/same.h"
#include "load/load_inner.h"
#include "load/plan/divisions.h"
#include "load/plan/holders.h"
#include "load/plan/policy.h"
#include "load/plan/weigh.h"

/* ---- what all ranks want ---- */

/* Get the part of its table that the first rank of a class sends: the boxes alone, unless its class
 * owns the form. */
static struct ckpt_table sent_of(const struct ckpt_job *job, const struct ckpt_table *own,
                                 uint32_t class)
{
    const size_t form = job->owner_of[class] == class ? 0 : own->form;

    return (struct ckpt_table){own->data + form, own->len - form, 0};
}

/* On rank 0: the answer is what was sent for each class, with its length before it. */
static int reduce_tables(void *ctx, const unsigned char *const *data, const size_t *len,
                         struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_job *job = ctx;

    for (uint32_t c = 0; c < job->is.nclass; c++) {
        const uint64_t n = len[job->first_of[c]];
        ckpt_str_append(answer, (const char *)&n, sizeof n);
        ckpt_str_append(answer, (const char *)data[job->first_of[c]], n);
    }
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* Parse the tables of all classes, each with its length before it. The table of this rank's class
 * must be this rank's own. */
static int parse_tables(const struct ckpt_load *load, const struct ckpt_table *all,
                        const struct ckpt_table *own, const struct ckpt_job *job,
                        struct ckpt_wants *ret, struct ckpt_err *err)
{
    const uint32_t class = job->class_of[load->comm->x->rank];
    const struct ckpt_table mine = sent_of(job, own, class);
    const unsigned char *data = all->data;
    size_t left = all->len;

    for (uint32_t c = 0; c < job->is.nclass; c++) {
        uint64_t n = 0;
        if (left >= sizeof n)
            memcpy(&n, data, sizeof n);
        if (left < sizeof n || n > left - sizeof n)
            return ckpt_fail(err, CKPT_FORMAT,
                             "the wants of all ranks, as rank 0 sent them, are cut short");
        data += sizeof n;
        if (c == class && (n != mine.len || memcmp(data, mine.data, n) != 0))
            return ckpt_fail(err, CKPT_FORMAT,
                             "the wants that rank 0 sent for this rank are not this rank's");
        if (ckpt_wants_parse(data, n, load->view->cat, load->comm->x->size,
                             job->owner_of[c] == c ? NULL : &ret[job->owner_of[c]], &ret[c],
                             err) < 0)
            return -1;
        bool meet = true;
        if (ret[c].form && c != class &&
            ckpt_wants_meet(&ret[c], &load->wants, load->view->cat, load->comm->x->rank, &meet,
                            err) < 0)
            return -1;
        if (!meet) /* no group of this rank has a rank of that class; the form tells the dtypes */
            ckpt_wants_release(&ret[c]);
        data += n;
        left -= sizeof n + n;
    }
    return 0;
}

/* Make inputs.job_wants from the tables of all classes. */
static int take_tables(struct ckpt_load *load, const struct ckpt_table *all,
                       const struct ckpt_table *own, const struct ckpt_job *job,
                       struct ckpt_err *err)
{
    const uint32_t size = load->comm->x->size;
    uint32_t *class_of = malloc(size * sizeof *class_of);
    struct ckpt_wants *table = calloc(job->is.nclass, sizeof *table);
    struct ckpt_job_wants *job_wants = calloc(1, sizeof *job_wants);
    int rc = class_of && table && job_wants ? parse_tables(load, all, own, job, table, err)
                                            : ckpt_nomem(err);

    if (rc == 0) {
        memcpy(class_of, job->class_of, size * sizeof *class_of);
        rc = ckpt_job_wants_init(job_wants, load->view->cat, size, class_of, table, job->is.nclass,
                                 err);
    } else {
        for (uint32_t c = 0; table && c < job->is.nclass; c++)
            ckpt_wants_release(&table[c]);
        free(table);
        free(class_of);
    }
    if (rc < 0) {
        free(job_wants);
        return -1;
    }
    load->inputs.job_wants = job_wants;
    load->wants_hash = XXH3_64bits(all->data, all->len) | 1;
    return 0;
}

/* The second round: the first rank of a class sends its table, and every rank gets all tables. -1:
 * all ranks have failed. *ret_rc: whether this rank could use the tables, which the others learn in
 * the next round. */
static int exchange_wants(struct ckpt_load *load, const struct ckpt_table *own,
                          struct ckpt_job *job, int *ret_rc, struct ckpt_err *err)
{
    const uint32_t self = load->comm->x->rank;
    const struct ckpt_table mine = sent_of(job, own, job->class_of[self]);
    const bool first = job->first_of[job->class_of[self]] == self;
    struct ckpt_round round = {.comm = load->comm,
                               .timeout_ms = load->opt.exchange_timeout_ms,
                               .own = first ? mine.data : NULL,
                               .own_len = first ? mine.len : 0,
                               .reduce = reduce_tables,
                               .ctx = job};
    struct ckpt_table all = {0};

    if (ckpt_round_run(&round, 0, &all.data, &all.len, err) < 0)
        return err->code != CKPT_LIMIT
                   ? -1
                   : ckpt_err_in(err, "ranks want too many different boxes: where they cut tensors "
                                      "alike, a mesh and placements say so in a few bytes");
    *ret_rc = take_tables(load, &all, own, job, err);
    free(all.data);
    return 0;
}

/* ---- the third round: are the plans equal, and do they fit? ---- */

enum { GROUPS = 64 }; /* the most groups that a rank proposes: those that exchange most */

/* A rank's message, which its claims follow if the transport has communicators. */
struct fit {
    uint64_t claim;        /* ckpt_plan_claim; rank 0 adds them up */
    uint64_t host, device; /* the least bytes that the plan needs, without ckpt_load_aside */
    uint64_t exchanges;    /* 1: the rank sends something to others, or receives something */
    uint64_t facts;        /* hash of what rank 0 sent in the rounds before, on which plans are
                              built; the same on all ranks */
};

/* Append to the answer the places of the groups that get a communicator. */
static int place_groups(struct ckpt_group_claim *claim, size_t n, uint32_t nrank,
                        struct ckpt_str *answer, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_group_places places = {0};

    if (ckpt_divisions_choose(claim, n, nrank, &places, err) < 0)
        return -1;
    ckpt_str_append(answer, (const char *)places.ptr, places.len * sizeof *places.ptr);
    return 0;
}

/* Rank 0 gathers this from the messages of all ranks. */
struct fits {
    struct fit most; /* the maximum of each number, and the sum of the claims */
    CKPT_VEC(struct ckpt_group_claim) claims;
};

/* Add a rank's message. */
static int add_fit(struct fits *all, uint32_t rank, const unsigned char *data, size_t len,
                   struct ckpt_err *err)
{
    struct fit f;

    if (len < sizeof f || (len - sizeof f) % sizeof(struct ckpt_group_claim))
        return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs",
                         rank);
    memcpy(&f, data, sizeof f);
    if (rank == 0)
        all->most.facts = f.facts;
    if (f.facts != all->most.facts)
        return ckpt_fail(err, CKPT_FORMAT,
                         "what rank 0 sent about the wants of all ranks arrived damaged at rank "
                         "%" PRIu32 ", or is damaged in its memory",
                         rank);
    all->most.claim += f.claim;
    all->most.host = ckpt_max_u64(all->most.host, f.host);
    all->most.device = ckpt_max_u64(all->most.device, f.device);
    all->most.exchanges |= f.exchanges;
    for (size_t at = sizeof f; at < len; at += sizeof(struct ckpt_group_claim)) {
        struct ckpt_group_claim claim;
        memcpy(&claim, data + at, sizeof claim);
        claim.rank = rank;
        if (ckpt_vec_push(&all->claims, claim) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* On rank 0: the answer is struct fit of all ranks together, then the groups' places. */
static int reduce_fit(void *ctx, const unsigned char *const *data, const size_t *len,
                      struct ckpt_str *answer, struct ckpt_err *err)
{
    const struct ckpt_comm *comm = ctx;
    struct fits all = {0};
    int rc = 0;

    for (uint32_t r = 0; r < comm->x->size && rc == 0; r++)
        rc = add_fit(&all, r, data[r], len[r], err);
    if (rc == 0 && all.most.claim != 0)
        rc = ckpt_fail(err, CKPT_CONFLICT,
                       "ranks that want the same bytes have made different plans, or not all of "
                       "them have planned to share: this is a bug in ckptfs");
    ckpt_str_append(answer, (const char *)&all.most, sizeof all.most);
    if (rc == 0 && comm->x->ops->connect)
        rc = place_groups(all.claims.ptr, all.claims.len, comm->x->size, answer, err);
    ckpt_vec_release(&all.claims);
    return rc;
}

static uint64_t hash_of(const uint32_t *rank, uint32_t n)
{
    return XXH3_64bits(rank, n * sizeof *rank);
}

/* Has a set of ranks a communicator? */
static bool is_placed(const uint32_t *rank, uint32_t n, const struct ckpt_group_place *place,
                      size_t nplace)
{
    const uint64_t set = hash_of(rank, n);
    size_t i = 0;

    while (i < nplace && place[i].group != set)
        i++;
    return i < nplace;
}

/* A group of two steps in host memory: unless all of its rails and nodes have communicators, no
 * member uses one. The rail of this rank is the last that is put together in s->members. */
static void check_steps(const struct ckpt_broadcast *b, struct ckpt_stream *s,
                        const struct ckpt_group_place *place, size_t nplace)
{
    const uint32_t local = s->step[1].n;
    bool all = true;

    for (uint32_t k = 0; k < b->nnode; k++)
        all = all && is_placed(b->member + k * local, local, place, nplace);
    for (uint32_t i = 1; i <= local; i++) {
        for (uint32_t k = 0; k < b->nnode; k++)
            s->members[k] = b->member[k * local + (s->step[1].self + i) % local];
        all = all && is_placed(s->members, b->nnode, place, nplace);
    }
    if (!all)
        s->step[0].division = s->step[1].division = CKPT_DIVISION_NONE;
}

/* Note this rank's places in the divisions. The hash of a division's groups (id) tells whether the
 * communicators of the last load can be kept. */
static void take_places(struct ckpt_load *load, const struct ckpt_group_place *place, size_t n)
{
    struct ckpt_plan *p = load->inputs.plan;

    for (int i = 0; i < CKPT_DIVISIONS; i++)
        load->division[i] = (struct ckpt_device_division){.colour = CKPT_NONE};
    for (size_t i = 0; i < n; i++) {
        if (place[i].division >= CKPT_DIVISIONS)
            continue;
        struct ckpt_device_division *f = &load->division[place[i].division];
        f->id = XXH3_64bits_withSeed(&place[i], sizeof place[i], f->id) | 1;
        for (uint32_t g = 0; g < p->groups.len; g++)
            for (uint32_t k = 0; k < p->stream[g].nstep && !p->stream[g].pairs; k++) {
                struct ckpt_collective *c = &p->stream[g].step[k];
                if (hash_of(c->rank, c->n) != place[i].group)
                    continue;
                c->division = (uint8_t)(place[i].division + 1);
                f->colour = place[i].colour;
                f->place = c->self;
            }
    }
    for (uint32_t g = 0; g < p->groups.len && !p->sizes.device; g++)
        if (p->stream[g].nstep == 2)
            check_steps(&p->broadcast[g], &p->stream[g], place, n);
}

static int set_cmp(const void *pa, const void *pb)
{
    const struct ckpt_group_claim *a = pa, *b = pb;

    return ckpt_u64_cmp(a->group, b->group);
}

/* Append the sets of ranks that are to get a communicator if there are not too many. Two ranks do
 * as well by sends and receives, but in host memory both steps must be all-gathers. Groups that
 * exchange in pairs use none. */
static int add_groups(const struct ckpt_plan *p, struct ckpt_str *out, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_group_claim *group =
        calloc(2 * p->groups.len + 1, sizeof *group);
    size_t n = 0, kept = 0;

    if (!group)
        return ckpt_nomem(err);
    for (size_t g = 0; g < p->groups.len; g++)
        for (uint32_t k = 0; k < p->stream[g].nstep && !p->stream[g].pairs; k++) {
            const struct ckpt_collective *c = &p->stream[g].step[k];
            if (c->n >= CKPT_DIVISION_LEAST || (p->stream[g].nstep == 2 && !p->sizes.device))
                group[n++] = (struct ckpt_group_claim){hash_of(c->rank, c->n), p->stream[g].len,
                                                       c->n, p->self};
        }
    qsort(group, n, sizeof *group, set_cmp);
    for (size_t i = 0; i < n; i++) /* several groups may have the same rails or nodes */
        if (kept && group[kept - 1].group == group[i].group)
            group[kept - 1].bytes += group[i].bytes;
        else
            group[kept++] = group[i];
    qsort(group, kept, sizeof *group, ckpt_group_claim_cmp);
    ckpt_str_append(out, (const char *)group, ckpt_min_u64(kept, GROUPS) * sizeof *group);
    return 0;
}

/* Compute the memory of plan and slots, and lower the numbers of slots until it fits the budget.
 * These numbers concern this rank alone, so the others need not know. False: even the fewest slots
 * do not fit; *ret has what they need. */
static bool fit_slots(struct ckpt_load *load, uint64_t plan_bytes, struct fit *ret)
{
    struct ckpt_engine_options *o = &load->engine_opt;
    const struct ckpt_engine_sizes *z = &load->sizes;
    const uint64_t aside = ckpt_load_aside(&load->opt);

    for (;;) {
        ret->host = o->ahead * z->read + o->slots * z->window_host + plan_bytes;
        ret->device = o->slots * z->window_device;
        if (ret->host + aside <= load->opt.host_bytes &&
            (!o->mode.device || ret->device <= load->opt.device_bytes))
            return true;
        const uint32_t held = load->inputs.plan->held;
        if (o->ahead > ckpt_max_u64(2, held) && ret->host + aside > load->opt.host_bytes)
            o->ahead--;
        else if (o->slots > 1)
            o->slots--;
        else if (o->ahead > held)
            o->ahead--;
        else
            return false;
    }
}

/* Unless dtype= was given, tensors are not rounded before they are cast for their destinations. */
static int choose_dtypes(struct ckpt_load *load, bool travels, struct ckpt_err *err)
{
    return load->view->shared->opt->dtype_rule == CKPT_DTYPE_AUTO
               ? ckpt_job_wants_cast(load->inputs.job_wants, load->view->cat, travels, err)
               : 0;
}

/* Make this rank's plan and measure it. Whether it fits is decided by all ranks together. */
static int make_plan(struct ckpt_load *load, const struct ckpt_policy *policy,
                     const struct ckpt_job *job, struct fit *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_holders_release) struct ckpt_holders holders = {0};
    const struct ckpt_sharing sharing = {policy->readers, job->node, job->share, &holders};
    struct ckpt_plan **plan = &load->inputs.plan;

    ckpt_plan_free(*plan);
    *plan = NULL;
    if (choose_dtypes(load, policy->readers != CKPT_READERS_EACH, err) < 0 ||
        ckpt_holders_find(load->view->cat, load->comm->x->size, &holders, err) < 0 ||
        ckpt_plan_new(load->inputs.job_wants, load->comm->x->rank, &sharing, !job->is.no_same_host,
                      &policy->slots.sizes, plan, err) < 0 ||
        ckpt_engine_measure(*plan, &load->engine_opt.mode, &load->sizes, err) < 0)
        return -1;
    ret->exchanges = (*plan)->exchanges;
    ret->facts = XXH3_64bits_withSeed(&load->wants_hash, sizeof load->wants_hash, job->hash);
    ret->claim = ckpt_plan_claim(*plan);
    (void)fit_slots(load, ckpt_plan_memory(*plan), ret);
    return 0;
}

/* COLLECTIVE. Check that all ranks' plans fit into memory (LIMIT), and that groups' plans match. */
static int check_plans(struct ckpt_load *load, int rc, const struct fit *own, struct ckpt_err *err)
{
    struct ckpt_round round = {.comm = load->comm,
                               .timeout_ms = load->opt.exchange_timeout_ms,
                               .reduce = reduce_fit,
                               .ctx = load->comm};
    const uint64_t windows = load->opt.host_bytes - ckpt_load_aside(&load->opt);
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str data = {0};
    struct fit most = {0};
    size_t len = 0;

    ckpt_str_append(&data, (const char *)own, sizeof *own);
    if (rc == 0 && load->comm->x->ops->connect)
        rc = add_groups(load->inputs.plan, &data, err);
    if (data.failed)
        rc = ckpt_nomem(err);
    round.own = data.ptr;
    round.own_len = data.len;
    rc = ckpt_round_run(&round, rc, &answer, &len, err);
    if (rc == 0 && len >= sizeof most) {
        memcpy(&most, answer, sizeof most);
        take_places(load, (const struct ckpt_group_place *)(const void *)(answer + sizeof most),
                    (len - sizeof most) / sizeof(struct ckpt_group_place));
    }
    load->exchanges = most.exchanges;
    const bool host = most.host > windows;
    if (rc < 0 ||
        (!host && (!load->engine_opt.mode.device || most.device <= load->opt.device_bytes)))
        return rc;
    return ckpt_fail(err, CKPT_LIMIT, "%s is %" PRIu64 ", but the plan needs at least %" PRIu64,
                     host ? "host_bytes" : "device_bytes",
                     host ? load->opt.host_bytes : load->opt.device_bytes,
                     host ? ckpt_load_host_bytes(most.host) : most.device);
}

/* COLLECTIVE. Plan for one choice of readers and sizes. */
static int plan_for(struct ckpt_load *load, const struct ckpt_policy_input *in,
                    const struct ckpt_policy *policy, const struct ckpt_job *job,
                    struct ckpt_err *err)
{
    struct fit fit = {0};

    load->readers = policy->readers;
    load->engine_opt = (struct ckpt_engine_options){
        .ahead = policy->slots.ahead,
        .slots = policy->slots.windows,
        .threads = policy->threads,
        .read_timeout_ms = load->opt.read_timeout_ms,
        .exchange_timeout_ms = load->opt.exchange_timeout_ms,
        .mode = {.verify = load->opt.verify, .device = in->cost.device},
        .cost = {policy->gap, policy->buffers.bound, policy->run, {.direct = policy->direct}},
        .bounce = policy->buffers.bounce,
    };
    for (size_t i = 0; i < load->target.len; i++)
        load->engine_opt.mode.hosts |= load->target.ptr[i].host;
    int rc = make_plan(load, policy, job, &fit, err);
    if (rc == 0 && policy->readers == CKPT_READERS_EACH && in->local > 1)
        rc = ckpt_plan_find_again(load->inputs.plan, in->use, err);
    return check_plans(load, rc, &fit, err);
}

/* Unless a rate is given, take the one that the comm's last load has measured in place of an
 * assumed one. */
static void use_measured(const struct ckpt_comm *comm, uint32_t nnode, struct ckpt_rates *rates)
{
    double *rate = nnode > 1 ? &rates->network : &rates->local_link;

    if (*rate <= 0)
        *rate = nnode > 1 ? comm->exchange_rate * comm->x->size / nnode : comm->exchange_rate;
}

/* The weights of all ranks, on their way to rank 0. */
struct weighed {
    const struct ckpt_load_places *at;
    struct ckpt_cost_input in;
};

static int reduce_weights(void *ctx, const unsigned char *const *data, const size_t *len,
                          struct ckpt_str *answer, struct ckpt_err *err)
{
    struct weighed *w = ctx;
    ckpt_cleanup(ckpt_freep) struct ckpt_weight *weight = calloc(w->in.nrank, sizeof *weight);
    const uint32_t n = w->in.nrank;

    if (!weight)
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < n; r++) {
        if (len[r] != sizeof *weight)
            return ckpt_fail(err, CKPT_CONFLICT, "rank %" PRIu32 " runs another version of ckptfs",
                             r);
        memcpy(&weight[r], data[r], sizeof *weight);
    }
    if (ckpt_load_add_weights(weight, n, w->at, &w->in, err) < 0)
        return -1;
    ckpt_str_append(answer, (const char *)&w->in, sizeof w->in);
    return answer->failed ? ckpt_nomem(err) : 0;
}

/* Weigh this rank's groups, by the sizes that a load would have in which all ranks share. */
static int weigh_own(struct ckpt_load *load, const struct ckpt_policy_input *in,
                     const struct ckpt_load_places *at, struct ckpt_weight *ret,
                     struct ckpt_err *err)
{
    const uint32_t self = load->comm->x->rank;
    ckpt_cleanup(ckpt_freep) struct ckpt_weight *weight =
        calloc(load->comm->x->size, sizeof *weight);
    const struct ckpt_plan_sizes once = ckpt_policy_once(in);

    if (!weight)
        return ckpt_nomem(err);
    struct ckpt_weighing w = {.job_wants = load->inputs.job_wants,
                              .at = at,
                              .sizes = &once,
                              .device = in->cost.device,
                              .logarithmic = in->cost.device && load->comm->x->device->logarithmic,
                              .weight = weight,
                              .use = in->use};
    const int rc = ckpt_load_weigh(&w, self, err);
    ckpt_weighing_release(&w);
    *ret = weight[self];
    return rc;
}

/* COLLECTIVE. Find out how to read, and what this rank and the job want. rc and *err are this
 * rank's status so far. */
static int choose(struct ckpt_load *load, int rc, const struct ckpt_job *job,
                  struct ckpt_policy_input *in, struct ckpt_err *err)
{
    const struct ckpt_load_places at = {job->node, job->share, job->is.nnode, job->is.nshare};
    const struct ckpt_device *d = load->comm->x->device;
    struct ckpt_weight own = {0};
    struct weighed all = {.at = &at};
    ckpt_cleanup(ckpt_freep) unsigned char *answer = NULL;
    size_t len = 0;

    in->cost = (struct ckpt_cost_input){.nrank = load->comm->x->size,
                                        .nnode = job->is.nnode,
                                        .cached = job->is.cached,
                                        .shared = job->is.shared,
                                        .device = d != NULL};
    if (d && job->is.alone)
        in->cost.setup = ckpt_cost_setup(in->cost.nrank);
    for (uint32_t r = 0; r < load->comm->x->size; r++)
        in->local += job->node[r] == job->node[load->comm->x->rank];
    if (rc == 0)
        rc = weigh_own(load, in, &at, &own, err);
    all.in = in->cost;
    struct ckpt_round round = {.comm = load->comm,
                               .timeout_ms = load->opt.exchange_timeout_ms,
                               .own = &own,
                               .own_len = sizeof own,
                               .reduce = reduce_weights,
                               .ctx = &all};
    if (ckpt_round_run(&round, rc, &answer, &len, err) < 0)
        return -1;
    if (len == sizeof in->cost)
        memcpy(&in->cost, answer, len);
    load->inputs.needed_bytes = own.needed;
    load->inputs.unique_bytes = in->cost.unique;
    return 0;
}

/* COLLECTIVE. Plan; rc and *err are this rank's status so far. With AUTO, if the plan does not fit
 * into memory, plan again so that fewer ranks share. All ranks take the same steps: check_plans
 * fails on all of them or on none. */
static int plan_all(struct ckpt_load *load, int rc, const struct ckpt_job *job,
                    struct ckpt_err *err)
{
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct ckpt_xport *x = load->comm->x;
    struct ckpt_load_options opt = load->opt;
    ckpt_cleanup(ckpt_freep) struct ckpt_file_use *use =
        calloc(load->view->cat->sources.len + 1, sizeof *use);
    struct ckpt_policy_input in = {.opt = &opt,
                                   .cpus = cpus > 0 ? (uint32_t)cpus : 1,
                                   .use = use,
                                   .is_spread = ckpt_dir_is_spread(load->view->dir)};
    const struct fit none = {0};
    struct ckpt_policy policy;
    struct ckpt_err own = {0};

    use_measured(load->comm, job->is.nnode, &opt.rates);
    if (rc == 0 && !use)
        rc = ckpt_nomem(err);
    if (choose(load, rc, job, &in, err) < 0)
        return -1;
    if (ckpt_policy_choose(&in, &policy, err) < 0)
        return check_plans(load, -1, &none, err);
    load->rates = policy.rates;
    while ((rc = plan_for(load, &in, &policy, job, &own)) < 0) {
        enum ckpt_readers less = policy.readers;
        if (own.code != CKPT_LIMIT || load->opt.readers != CKPT_READERS_AUTO ||
            !ckpt_policy_less(&less))
            break;
        own = (struct ckpt_err){0};
        if (ckpt_policy_sizes(&in, less, &policy, &own) < 0)
            break;
    }
    if (rc < 0)
        return ckpt_err_move(err, &own);
    /* the communicators, unless no rank exchanges anything */
    return x->ops->connect && load->exchanges ? x->ops->connect(x, load->comm, load->division, err)
                                              : 0;
}

/* ---- all of it ---- */

/* COLLECTIVE. The whole agreement; the caller releases *job. */
static int agree(struct ckpt_load *load, int rc, const struct ckpt_table *table,
                 struct ckpt_job *job, struct ckpt_err *err)
{
    struct ckpt_device *device = load->comm->x->device;

    if (ckpt_job_agree(load, rc, table, job, err) < 0 ||
        (job->is.copies && ckpt_load_compare(load, err) < 0))
        return -1;
    rc = 0;
    if (job->is.send_all && load->inputs.job_wants)
        ckpt_job_wants_skip_none(load->inputs.job_wants);
    if (job->is.alone && device && device->connected) /* some rank has given back its own */
        (void)device->ops->drain(device);
    if (!load->inputs.job_wants && exchange_wants(load, table, job, &rc, err) < 0)
        return -1;
    if (rc == 0)
        rc = choose_dtypes(load, false, err);
    return plan_all(load, rc, job, err);
}

/* Show the transport's remark to the user, once. */
static void show_remark(struct ckpt_load *load)
{
    struct ckpt_xport *x = load->comm->x;

    if (x->remark)
        ckpt_logf(&load->view->shared->opt->log, CKPT_LOG_WARNING, "%s", x->remark);
    x->remark = NULL;
}

int ckpt_load_agree(struct ckpt_load *load, int rc, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ns();
    struct ckpt_table own = {0};
    struct ckpt_job job;

    ckpt_comm_renew(load->comm);
    ckpt_comm_set_doing(load->comm, "plan the load of", ckpt_view_source(load->view));
    if (rc == 0)
        rc = ckpt_wants_dump(&load->wants, load->view->cat, &own, err);
    rc = agree(load, rc, &own, &job, err);
    free(job.answer);
    free(own.data);
    ckpt_comm_set_doing(load->comm, NULL, NULL);
    if (rc < 0)
        return -1;
    show_remark(load);
    load->inputs.view = load->view;
    load->inputs.comm = load->comm;
    load->planned = load->ready = true;
    load->plan_ns = ckpt_now_ns() - begin;
    return 0;
}

/* Forget the wants of all ranks that a failed call of ckpt_load_plan has exchanged. */
static void drop_wanted(struct ckpt_load *load)
{
    if (load->inputs.job_wants)
        ckpt_job_wants_release(load->inputs.job_wants);
    free(ckpt_steal(&load->inputs.job_wants));
    load->wants_hash = 0;
}

int ckpt_load_plan(struct ckpt_load *load, struct ckpt_err *err)
{
    if (load->planned)
        return ckpt_fail(err, CKPT_USAGE, "a load is planned once; ckpt_load_reload plans again");
    if (load->comm->busy)
        return ckpt_fail(err, CKPT_USAGE, "another load of this comm runs");
    drop_wanted(load);
    return ckpt_load_agree(load, 0, err);
}
