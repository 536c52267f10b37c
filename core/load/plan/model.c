/* SPDX-License-Identifier: Apache-2.0 */
/* Planning without loading (`ckpt plan`): counts what a job that need not exist would read and
 * send. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/sort.h"
#include "io/dir.h"
#include "load/plan/holders.h"
#include "load/plan/policy.h"
#include "load/plan/weigh.h"
#include "run/checkpoint.h"
#include "tensor/read.h"
#include "tensor/residency.h"
#include "tensor/strided.h"

enum { CPUS = 8 }; /* processors per rank that the policy is told */

/* The traffic of one rank, in bytes, and the number of its reads. */
struct traffic {
    uint64_t read, reads, sent, received;
    uint64_t asked; /* of `read`: of files that the rank has not */
};

/* The traffic of a rank that shares with no other, by a hash of the lengths of its boxes. */
struct shape {
    XXH128_hash_t lengths;
    struct traffic traffic;
};

struct model {
    struct ckpt_job_wants job_wants;
    struct ckpt_replicas replicas;
    uint32_t nrank, nnode, *node;
    uint32_t nshare, *with;  /* groups that share, the group of each rank */
    struct traffic *traffic; /* per rank */
    uint32_t nwindow;        /* the most windows of a rank */
    struct ckpt_plan_sizes sizes;
    struct ckpt_known_lists known; /* groups of the current domain that have been counted */
    struct ckpt_weight *weight;    /* per rank */
    struct ckpt_holders holders;   /* who has which file; of a run that all see: nothing */
    bool is_spread;                /* nodes have different files */
    bool device;
    uint64_t most;     /* bytes that the rank which exchanges most exchanges, */
    json_t *exchanges; /* and how */
    CKPT_VEC(struct shape) shapes;
    CKPT_VEC(uint64_t) lengths; /* of all boxes of one rank */
    struct ckpt_err *err;
};

/* ---- the wants of all ranks ---- */

static int make_job_wants(struct model *m, const struct ckpt_view *view, const char *layout)
{
    uint32_t *class_of = malloc(m->nrank * sizeof *class_of), nclass = 0;
    struct ckpt_wants *table = NULL;
    int rc = class_of ? 0 : ckpt_nomem(m->err);

    for (uint32_t r = 0; r < m->nrank && rc == 0; r++) {
        rc = ckpt_layout_class(layout, r, m->nrank, &class_of[r], m->err);
        if (rc == 0 && class_of[r] >= nclass)
            nclass = class_of[r] + 1;
    }
    if (rc == 0 && !(table = calloc(nclass, sizeof *table)))
        rc = ckpt_nomem(m->err);
    for (uint32_t r = 0; r < m->nrank && rc == 0; r++)
        if (table[class_of[r]].entries.len == 0)
            rc = ckpt_layout_wants(view, layout, r, m->nrank, &table[class_of[r]], m->err);
    if (rc == 0)
        return ckpt_job_wants_init(&m->job_wants, view->cat, m->nrank, class_of, table, nclass,
                                   m->err);
    for (uint32_t c = 0; table && c < nclass; c++)
        ckpt_wants_release(&table[c]);
    free(table);
    free(class_of);
    return -1;
}

/* ---- one domain: a set of ranks that share what they read ---- */

/* Has a rank the file? */
static bool has_file(const struct model *m, uint32_t source, uint32_t rank)
{
    const uint32_t set = ckpt_holders_set(&m->holders, source);

    if (set == CKPT_NONE)
        return true;
    const ckpt_numbers *ranks = &m->holders.ranks.ptr[set];
    return bsearch(&rank, ranks->ptr, ranks->len, sizeof rank, ckpt_u32s_cmp) != NULL;
}

/* Adding up what a rank asks of others. */
struct asking {
    const struct model *m;
    const struct ckpt_plan *p;
    uint32_t rank;
    uint64_t bytes;
};

/* Add the bytes of a box that lie in files which the rank has not. */
static int add_asked(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    struct asking *a = ctx;
    const struct ckpt_tensor *t = ckpt_tensor_stored(ckpt_plan_unit_tensor(a->p, unit));
    uint64_t begin, end;

    (void)at;
    ckpt_box_range(box, t->dim, &begin, &end);
    for (size_t i = ckpt_tensor_first_piece(t, begin); i < t->npiece && t->piece[i].dst < end; i++)
        if (!has_file(a->m, t->piece[i].source, a->rank))
            a->bytes += ckpt_piece_count(t, &t->piece[i], box) * ckpt_dtype_size(t->dtype);
    return 0;
}

/* Add what the members of a group read to their traffic, and to read[], by index in the group. */
static void add_reads(struct model *m, const struct ckpt_plan *p, uint32_t group, uint64_t *read)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    const struct ckpt_stream *s = &p->stream[group];
    uint64_t from, to;

    for (uint32_t u = s->lo; u < s->hi; u++) {
        const struct ckpt_unit *unit = &p->units.ptr[u];
        const struct ckpt_tensor *t = ckpt_plan_unit_tensor(p, u);
        const uint64_t esize = ckpt_dtype_size(t->dtype);
        const uint64_t stored = ckpt_dtype_size(ckpt_tensor_stored(t)->dtype);
        struct ckpt_box box;
        ckpt_plan_unit_box(p, u, &box);
        const uint64_t end = unit->at + ckpt_box_numel(&box) * esize;
        for (uint64_t lo = unit->at, hi; lo < end; lo = hi) {
            const uint32_t reader = ckpt_plan_reader(p, group, lo);
            struct traffic *traffic = &m->traffic[g->rank[reader]];
            ckpt_plan_span(p, group, reader, &from, &to);
            hi = ckpt_min_u64(end, to);
            traffic->reads++;
            traffic->read += (hi - lo) / esize * stored;
            struct asking a = {m, p, g->rank[reader], 0};
            if (m->is_spread)
                (void)ckpt_plan_boxes(p, u, lo, hi, add_asked, &a);
            traffic->asked += a.bytes;
        }
    }
    for (uint32_t i = 0; i < g->n; i++) { /* what travels has the gaps between units */
        ckpt_plan_span(p, group, i, &from, &to);
        read[i] = to - from;
    }
}

/* Add the traffic of a group to that of its members. */
static int add_group(struct model *m, const struct ckpt_plan *p, uint32_t group)
{
    const struct ckpt_group *g = &p->groups.ptr[group];
    ckpt_cleanup(ckpt_freep) uint64_t *read = calloc((size_t)g->n + 1, sizeof *read);
    ckpt_cleanup(ckpt_freep) uint64_t *sent = calloc((size_t)g->n + 1, sizeof *sent);
    uint64_t total = 0;

    if (!read || !sent)
        return ckpt_nomem(m->err);
    add_reads(m, p, group, read);
    if (g->n == 1)
        return 0;
    if (ckpt_broadcast_sent(&p->broadcast[group], read, sent, m->err) < 0)
        return -1;
    for (uint32_t i = 0; i < g->n; i++)
        total += read[i];
    for (uint32_t i = 0; i < g->n; i++) {
        m->traffic[g->rank[i]].sent += sent[i];
        m->traffic[g->rank[i]].received += total - read[i];
    }
    return 0;
}

/* Append one kind of call of a plan: n ranks, in the order of their nodes, whose slices are `each`
 * bytes. */
static int add_exchange(struct model *m, json_t *list, const char *call, const uint32_t *rank,
                        uint32_t n, uint64_t each, uint32_t windows)
{
    uint32_t nodes = 1;

    for (uint32_t i = 1; i < n; i++)
        nodes += m->node[rank[i]] != m->node[rank[i - 1]];
    return json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I, s:I}", "call", call,
                                                 "members", (json_int_t)n, "nodes",
                                                 (json_int_t)nodes, "windows", (json_int_t)windows,
                                                 "window_bytes", (json_int_t)(n * each)));
}

/* If this rank exchanges more than those before, note its exchanges. On hosts, a group's relay
 * trees do what is two steps on devices. */
static int list_exchanges(struct model *m, const struct ckpt_plan *p)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();
    uint64_t bytes = 0;
    int rc = list ? 0 : -1;

    for (uint32_t g = 0; g < p->groups.len && rc == 0; g++) {
        const struct ckpt_stream *s = &p->stream[g];
        const struct ckpt_group *group = &p->groups.ptr[g];
        bytes += s->nstep ? s->len : 0;
        const uint64_t each = s->span ? s->len / s->nwindow / group->n : s->slice;
        for (uint32_t k = 0; k < s->nstep && m->device && !s->pairs && rc == 0; k++)
            rc = add_exchange(m, list, "allgather", s->step[k].rank, s->step[k].n,
                              (uint64_t)s->slice * (k ? s->step[0].n : 1), s->nwindow);
        if (s->nstep && (!m->device || s->pairs) && rc == 0)
            rc = add_exchange(m, list, m->device ? "pairs" : "allgather", group->rank, group->n,
                              each, s->nwindow);
    }
    if (rc == 0 && bytes > m->most) {
        m->most = bytes;
        json_decref(m->exchanges);
        m->exchanges = json_incref(list);
    }
    return rc < 0 ? ckpt_nomem(m->err) : 0;
}

/* Plan one rank, and add the traffic of its groups that have not been counted. */
static int add_rank(struct model *m, const struct ckpt_policy *policy, uint32_t rank)
{
    const struct ckpt_sharing sharing = {policy->readers, m->node, m->with, &m->holders};
    ckpt_cleanup(ckpt_plan_freep) struct ckpt_plan *p = NULL;

    if (ckpt_plan_new(&m->job_wants, rank, &sharing, true, &m->sizes, &p, m->err) < 0)
        return -1;
    for (uint32_t g = 0; g < p->groups.len; g++) {
        const struct ckpt_group *group = &p->groups.ptr[g];
        bool is_new;
        if (ckpt_lists_know(&m->known, group->rank, group->n, 0, &is_new) < 0)
            return ckpt_nomem(m->err);
        if (is_new && add_group(m, p, g) < 0)
            return -1;
    }
    if (p->windows.len > m->nwindow)
        m->nwindow = (uint32_t)p->windows.len;
    return list_exchanges(m, p);
}

/* Hash the lengths of all boxes that a rank wants. */
static int hash_lengths(struct model *m, uint32_t rank, XXH128_hash_t *ret)
{
    const uint32_t class = m->job_wants.class_of[rank];
    const struct ckpt_wants *w = &m->job_wants.table[class];
    struct ckpt_box box;

    m->lengths.len = 0;
    for (size_t e = 0; e < w->entries.len; e++) {
        const struct ckpt_want *want = &w->entries.ptr[e];
        const struct ckpt_tensor *t = &m->job_wants.cat->tensors.ptr[want->tensor];
        const bool any = ckpt_wants_box(w, want, t, rank, &box);
        if (ckpt_vec_reserve(&m->lengths, CKPT_MAX_RANK + 1) < 0)
            return ckpt_nomem(m->err);
        for (uint32_t d = 0; d < t->rank || d == 0; d++)
            m->lengths.ptr[m->lengths.len++] = !any ? 0 : t->rank ? box.n[d] : 1;
    }
    *ret = XXH3_128bits_withSeed(m->lengths.ptr, m->lengths.len * sizeof *m->lengths.ptr, class);
    return 0;
}

/* With FSDP each rank wants other bytes, but most want boxes of the same lengths and have the same
 * traffic. */
static int add_alone(struct model *m, const struct ckpt_policy *policy, uint32_t rank)
{
    struct shape s;

    if (hash_lengths(m, rank, &s.lengths) < 0)
        return -1;
    for (size_t i = 0; i < m->shapes.len; i++)
        if (XXH128_isEqual(m->shapes.ptr[i].lengths, s.lengths)) {
            m->traffic[rank] = m->shapes.ptr[i].traffic;
            return 0;
        }
    if (add_rank(m, policy, rank) < 0)
        return -1;
    s.traffic = m->traffic[rank];
    return ckpt_vec_push(&m->shapes, s) < 0 ? ckpt_nomem(m->err) : 0;
}

/* Plan n ranks that share, from rank `first` on. Ranks of a replica group are in the same groups,
 * so one of them is planned. */
static int add_domain(struct model *m, const struct ckpt_policy *policy, uint32_t first, uint32_t n)
{
    ckpt_cleanup(ckpt_freep) bool *seen = calloc((size_t)m->replicas.n + 1, sizeof *seen);
    int rc = seen ? 0 : ckpt_nomem(m->err);

    for (uint32_t r = first; r < first + n && rc == 0; r++) {
        const uint32_t replica = m->replicas.of[r];
        if (policy->readers == CKPT_READERS_EACH ||
            ckpt_class_is_alone(&m->job_wants, m->job_wants.class_of[r]))
            rc = (m->is_spread ? add_rank : add_alone)(m, policy, r);
        else if (!seen[replica])
            rc = add_rank(m, policy, r);
        seen[replica] = true;
    }
    ckpt_lists_forget(&m->known);
    return rc;
}

/* ---- all domains: those whose ranks are in the same replica groups have the same traffic ---- */

struct known {
    XXH128_hash_t groups;
    uint32_t first, n; /* first rank and number of ranks */
};

/* Ranks that share are consecutive: the number of those from rank `first` on. */
static uint32_t count_domain(const struct model *m, enum ckpt_readers readers, uint32_t first)
{
    const struct ckpt_sharing sharing = {readers, m->node, m->with};
    uint32_t end = first;

    while (end < m->nrank &&
           ckpt_sharing_number(&sharing, end) == ckpt_sharing_number(&sharing, first))
        end++;
    return end - first;
}

static int add_domains(struct model *m, const struct ckpt_policy *policy)
{
    ckpt_cleanup(ckpt_freep) struct known *known = malloc((m->nrank + 1) * sizeof *known);
    uint32_t nknown = 0, i, n;
    int rc = known ? 0 : ckpt_nomem(m->err);

    m->sizes = policy->slots.sizes;
    for (uint32_t r = 0; r < m->nrank && rc == 0; r += n) {
        n = count_domain(m, policy->readers, r);
        const XXH128_hash_t hash = XXH3_128bits(&m->replicas.of[r], n * sizeof *m->replicas.of);
        for (i = nknown; i > 0; i--)
            if (!m->is_spread && known[i - 1].n == n && XXH128_isEqual(known[i - 1].groups, hash))
                break;
        if (i > 0) {
            memcpy(&m->traffic[r], &m->traffic[known[i - 1].first], n * sizeof *m->traffic);
            continue;
        }
        known[nknown++] = (struct known){hash, r, n};
        rc = add_domain(m, policy, r, n);
    }
    return rc;
}

/* ---- the report ---- */

static json_t *spread(const struct model *m, size_t member)
{
    uint64_t least = UINT64_MAX, most = 0;
    double sum = 0;

    for (uint32_t r = 0; r < m->nrank; r++) {
        uint64_t v;
        memcpy(&v, (const char *)&m->traffic[r] + member, sizeof v);
        least = ckpt_min_u64(least, v);
        most = ckpt_max_u64(most, v);
        sum += (double)v;
    }
    return json_pack("{s:I, s:I, s:I}", "least", (json_int_t)least, "mean",
                     (json_int_t)(sum / m->nrank), "most", (json_int_t)most);
}

/* List what the ranks of each node read of its files, and what they ask of others. */
static json_t *list_nodes(const struct model *m)
{
    json_t *list = json_array();

    for (uint32_t r = 0, next; r < m->nrank && list; r = next) {
        uint64_t read = 0, asked = 0;
        for (next = r; next < m->nrank && m->node[next] == m->node[r]; next++) {
            read += m->traffic[next].read - m->traffic[next].asked;
            asked += m->traffic[next].asked;
        }
        if (json_array_append_new(list, json_pack("{s:I, s:I, s:I}", "node", (json_int_t)m->node[r],
                                                  "read_bytes", (json_int_t)read, "asked_bytes",
                                                  (json_int_t)asked)) < 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static int report(const struct model *m, const char *layout, uint32_t per_node,
                  const struct ckpt_policy *policy, const struct ckpt_cost_input *in, char **ret)
{
    const struct ckpt_cost *cost = &policy->cost;
    const struct ckpt_rates *r = &policy->rates;
    static const char *const name[] = {"auto", "once", "node", "each"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:s, s:I, s:I, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:{s:f, s:f, s:f}, "
        "s:{s:f, s:f, s:f, s:f, s:f, s:f}, s:s, s:f, s:O}",
        "layout", layout, "ranks", (json_int_t)m->nrank, "nodes", (json_int_t)m->nnode,
        "ranks_per_node", (json_int_t)per_node, "readers", name[policy->readers], "unique_bytes",
        (json_int_t)in->unique, "needed_bytes", (json_int_t)in->needed, "read_bytes",
        spread(m, offsetof(struct traffic, read)), "reads",
        spread(m, offsetof(struct traffic, reads)), "sent_bytes",
        spread(m, offsetof(struct traffic, sent)), "received_bytes",
        spread(m, offsetof(struct traffic, received)), "windows", (json_int_t)m->nwindow,
        "piece_bytes", (json_int_t)m->sizes.chunk, "modelled_s", "each", cost->each, "node",
        cost->node, "once", cost->once, "rates", "node_storage", r->node_storage, "shared_storage",
        r->shared_storage, "page_cache", r->page_cache, "copy", r->copy, "local_link",
        r->local_link, "network", r->network, "transport", m->device ? "nccl" : "host", "setup_s",
        in->setup, "exchanges", m->exchanges);

    if (!j ||
        (m->is_spread &&
         (json_object_set_new(j, "asked_bytes", spread(m, offsetof(struct traffic, asked))) < 0 ||
          json_object_set_new(j, "by_node", list_nodes(m)) < 0)))
        return ckpt_nomem(m->err);
    return ckpt_json_dump(j, CKPT_JSON_PYTHON, false, ret, NULL, m->err);
}

/* Weigh all ranks; of those that want the same, the first. */
static int weigh_all(struct model *m, const struct ckpt_policy_input *in,
                     const struct ckpt_load_places *at, struct ckpt_cost_input *ret)
{
    const struct ckpt_plan_sizes once = ckpt_policy_once(in);
    ckpt_cleanup(ckpt_weighing_release) struct ckpt_weighing w = {.job_wants = &m->job_wants,
                                                                  .at = at,
                                                                  .sizes = &once,
                                                                  .device = m->device,
                                                                  .logarithmic = m->device,
                                                                  .weight = m->weight};
    for (uint32_t r = 0; r < m->nrank; r++) {
        const uint32_t first = m->replicas.rank[m->replicas.of[r]];
        if (first == r && ckpt_load_weigh(&w, r, m->err) < 0)
            return -1;
        m->weight[r].needed = m->weight[first].needed;
    }
    return ckpt_load_add_weights(m->weight, m->nrank, at, ret, m->err);
}

static int model_run(struct model *m, const struct ckpt_view *view, const char *layout,
                     uint32_t per_node, const struct ckpt_load_options *opt, char **ret)
{
    const uint32_t local = per_node < m->nrank ? per_node : m->nrank;
    struct ckpt_policy_input in = {
        .opt = opt, .local = local, .cpus = CPUS * local, .is_spread = m->is_spread};
    struct ckpt_policy policy;
    struct ckpt_residency residency;

    if (make_job_wants(m, view, layout) < 0 ||
        ckpt_holders_find(view->cat, m->nrank, &m->holders, m->err) < 0 ||
        ckpt_replicas_find(&m->job_wants, &m->replicas, m->err) < 0)
        return -1;
    ckpt_residency_estimate(view->cat, 0, 1, &residency);
    /* a job of many nodes starts with cold caches */
    in.cost = (struct ckpt_cost_input){.nrank = m->nrank,
                                       .nnode = m->nnode,
                                       .cached = m->nnode > 1 ? 0 : ckpt_residency_part(&residency),
                                       .shared = residency.shared || opt->rates.shared_storage > 0,
                                       .device = m->device,
                                       .setup = m->device ? ckpt_cost_setup(m->nrank) : 0};
    const struct ckpt_load_places at = {m->node, m->with, m->nnode, m->nshare};
    if (weigh_all(m, &in, &at, &in.cost) < 0 || ckpt_policy_choose(&in, &policy, m->err) < 0 ||
        add_domains(m, &policy) < 0)
        return -1;
    return report(m, layout, per_node, &policy, &in.cost, ret);
}

int ckpt_load_model(struct ckpt_view *view, const char *layout, uint32_t ranks,
                    uint32_t ranks_per_node, uint32_t share_ranks, const char *transport,
                    const struct ckpt_load_options *opt, char **ret_json, struct ckpt_err *err)
{
    struct model m = {.err = err,
                      .device = transport && strcmp(transport, "nccl") == 0,
                      .is_spread = ckpt_dir_is_spread(view->dir)};
    struct ckpt_load_options own = {0};
    int rc;

    if (ranks_per_node == 0)
        return ckpt_fail(err, CKPT_USAGE, "a job needs at least one rank per node");
    if (ranks == 0 && ckpt_layout_ranks(layout, &ranks, err) < 0)
        return -1;
    m.nrank = ranks;
    if (ckpt_load_take_options(&own, opt, err) < 0)
        return -1;
    if (own.share)
        return ckpt_fail(err, CKPT_USAGE,
                         "options.share is of one rank: give share_ranks to plan a job");
    if (share_ranks == 0)
        share_ranks = ranks;
    m.nnode = (ranks - 1) / ranks_per_node + 1;
    m.nshare = (ranks - 1) / share_ranks + 1;
    m.node = malloc(ranks * sizeof *m.node);
    m.with = malloc(ranks * sizeof *m.with);
    m.traffic = calloc(ranks, sizeof *m.traffic);
    m.weight = calloc(ranks, sizeof *m.weight);
    m.exchanges = json_array();
    rc = m.node && m.with && m.traffic && m.weight && m.exchanges ? 0 : ckpt_nomem(err);
    for (uint32_t r = 0; r < ranks && rc == 0; r++) {
        m.node[r] = r / ranks_per_node;
        m.with[r] = r / share_ranks;
    }
    if (rc == 0)
        rc = model_run(&m, view, layout, ranks_per_node, &own, ret_json);
    if (m.job_wants.use)
        ckpt_job_wants_release(&m.job_wants);
    free(m.replicas.of);
    free(m.replicas.rank);
    ckpt_holders_release(&m.holders);
    ckpt_vec_release(&m.shapes);
    ckpt_vec_release(&m.lengths);
    free(m.node);
    free(m.with);
    free(m.traffic);
    free(m.weight);
    json_decref(m.exchanges);
    return rc;
}
