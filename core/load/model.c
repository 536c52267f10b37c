/* SPDX-License-Identifier: Apache-2.0 */
/* Planning only: what a job would do that need not exist. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "load/demand.h"
#include "load/load_inner.h"
#include "load/policy.h"
#include "load/replicas.h"
#include "tensor/boxes.h"

enum {
    CPUS = 8, /* of each rank, for the policy: its node need not exist */
    HOST_BYTES = 256 << 20,
    KEPT_BYTES = 48 << 20, /* of what is remembered of tensors of the same shape */
};

/* Of one rank. */
struct share {
    uint64_t read, reads, sent, received;
};

/* What a domain wants of tensors of one shape: the layers of a model are alike. */
struct shape {
    XXH128_hash_t key;
    ckpt_demands demands;
};

struct model {
    struct ckpt_roster roster;
    struct ckpt_replicas replicas;
    uint32_t nrank, nnode, *node;
    struct share *share;
    uint32_t nwindow;
    struct ckpt_plan_sizes sizes;
    CKPT_VEC(struct shape) shapes; /* of the domain at hand */
    uint64_t kept;
    struct ckpt_err *err;
};

/* ---- who wants what ---- */

static int make_roster(struct model *m, const struct ckpt_view *view, const char *layout)
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
        return ckpt_roster_init(&m->roster, view->cat, m->nrank, class_of, table, nclass, m->err);
    for (uint32_t c = 0; table && c < nclass; c++)
        ckpt_wants_release(&table[c]);
    free(table);
    free(class_of);
    return -1;
}

/* ---- one domain ---- */

static void forget_shapes(struct model *m)
{
    for (size_t i = 0; i < m->shapes.len; i++)
        ckpt_vec_release(&m->shapes.ptr[i].demands);
    m->shapes.len = 0;
    m->kept = 0;
}

/* Tensors with equal keys are wanted alike: same shape, wanted by the same classes in the same way.
 */
static XXH128_hash_t shape_key(const struct ckpt_roster *r, uint32_t tensor)
{
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];
    XXH128_hash_t h = XXH3_128bits(t->dim, t->rank * sizeof *t->dim);

    for (uint64_t i = r->first[tensor]; i < r->first[tensor + 1]; i++) {
        const struct ckpt_wants *w = &r->table[r->use[i].class];
        const struct ckpt_want *e = &w->entries.ptr[r->use[i].entry];
        struct {
            XXH128_hash_t before;
            uint32_t class, spec, rank, boxed;
            uint64_t lo[CKPT_MAX_RANK], n[CKPT_MAX_RANK];
        } use;
        memset(&use, 0, sizeof use);
        use.before = h;
        use.class = r->use[i].class;
        use.spec = e->spec;
        use.rank = t->rank;
        use.boxed = e->box != CKPT_NONE;
        for (uint32_t d = 0; use.boxed && d < t->rank; d++) {
            use.lo[d] = w->boxes.ptr[e->box].lo[d];
            use.n[d] = w->boxes.ptr[e->box].n[d];
        }
        h = XXH3_128bits(&use, sizeof use);
    }
    return h;
}

static const ckpt_demands *find_shape(struct model *m, const struct ckpt_domain *domain,
                                      uint32_t tensor)
{
    struct shape s = {.key = shape_key(&m->roster, tensor)};

    for (size_t i = m->shapes.len; i-- > 0;)
        if (XXH128_isEqual(m->shapes.ptr[i].key, s.key))
            return &m->shapes.ptr[i].demands;
    if (m->kept > KEPT_BYTES)
        forget_shapes(m);
    if (ckpt_demand_of(domain, tensor, &s.demands, m->err) < 0 ||
        ckpt_vec_push(&m->shapes, s) < 0) {
        ckpt_vec_release(&s.demands);
        (void)ckpt_nomem(m->err);
        return NULL;
    }
    m->kept += s.demands.cap * sizeof *s.demands.ptr;
    return &m->shapes.ptr[m->shapes.len - 1].demands;
}

/* Elements of a box that a rank wants. */
static uint64_t wanted_by(const struct ckpt_roster *r, uint32_t rank, uint32_t tensor,
                          const struct ckpt_box *box)
{
    const struct ckpt_wants *w = &r->table[r->class_of[rank]];
    struct ckpt_box want, both;
    uint64_t numel = 0, i, end = ckpt_roster_uses(r, tensor, r->class_of[rank], &i);

    for (; i < end; i++)
        if (ckpt_wants_box(w, &w->entries.ptr[r->use[i].entry], &r->cat->tensors.ptr[tensor], rank,
                           &want) &&
            ckpt_box_intersect(&want, box, &both))
            numel += ckpt_box_numel(&both);
    return numel;
}

/* A unit is sent to all who want something of it but its owner, who receives what is left of its
 * wants. demands: NULL: nobody else is there. */
static void add_unit(struct model *m, const struct ckpt_plan *p, uint32_t unit, uint32_t owner,
                     const ckpt_demands *demands)
{
    const struct ckpt_tensor *t = ckpt_plan_unit_tensor(p, unit);
    const uint32_t tensor = (uint32_t)(t - p->roster->cat->tensors.ptr);
    struct share *share = &m->share[owner];
    const struct ckpt_catalog *cat;
    const size_t esize = ckpt_dtype_size(t->dtype);
    struct ckpt_box box;

    ckpt_plan_unit_box(p, unit, &box);
    share->reads++;
    share->read +=
        ckpt_box_numel(&box) * ckpt_dtype_size(ckpt_tensor_stored(p->roster->cat, t, &cat)->dtype);
    if (!demands)
        return;
    const uint64_t own = wanted_by(p->roster, owner, tensor, &box);
    share->sent += (ckpt_demand_numel(demands, &box) - own) * esize;
    share->received -= own * esize;
}

static int add_units(struct model *m, const struct ckpt_plan *p, const struct ckpt_domain *domain)
{
    const ckpt_demands *demands = NULL;
    uint32_t of = UINT32_MAX;
    uint64_t stored;

    for (uint32_t o = 0; o < p->nowner; o++) {
        if (p->nowner > 1 && ckpt_load_needed(&m->roster, p->owner[o],
                                              &m->share[p->owner[o]].received, &stored, m->err) < 0)
            return -1;
        for (uint32_t u = p->owner_unit[o]; u < p->owner_unit[o + 1]; u++) {
            const uint32_t tensor = p->regions.ptr[p->units.ptr[u].region].tensor;
            if (p->nowner > 1 && tensor != of && !(demands = find_shape(m, domain, of = tensor)))
                return -1;
            add_unit(m, p, u, p->owner[o], demands);
        }
    }
    return 0;
}

static int add_domain(struct model *m, const struct ckpt_policy *policy, const uint32_t *rank,
                      uint32_t n)
{
    ckpt_cleanup(ckpt_freep) uint32_t *count = calloc(m->replicas.n + 1, sizeof *count);
    const struct ckpt_domain domain = {&m->roster, &m->replicas, count};
    struct ckpt_plan *p = NULL;

    if (!count)
        return ckpt_nomem(m->err);
    for (uint32_t k = 0; k < n; k++)
        count[m->replicas.of[rank[k]]]++;
    m->sizes = policy->sizes;
    int rc = ckpt_plan_new(&m->roster, rank, n, &m->sizes, &p, m->err);
    if (rc == 0)
        rc = add_units(m, p, &domain);
    if (rc == 0 && p->nwindow > m->nwindow)
        m->nwindow = p->nwindow;
    ckpt_plan_free(p);
    forget_shapes(m);
    return rc;
}

/* ---- all domains: those whose ranks are of the same groups do the same ---- */

struct known {
    XXH128_hash_t groups;
    uint32_t first, n; /* its first rank, and how many follow */
};

/* The ranks that share what rank `from` reads, the first of them; how many. */
static uint32_t next_domain(const struct model *m, enum ckpt_readers readers, uint32_t from,
                            uint32_t *rank)
{
    uint32_t n = 0;

    for (uint32_t r = from; r < m->nrank; r++) {
        if (readers != CKPT_READERS_ONCE && r != from &&
            (readers == CKPT_READERS_EACH || m->node[r] != m->node[from]))
            break; /* ranks of a node follow each other */
        rank[n++] = r;
    }
    return n;
}

static int add_or_copy(struct model *m, const struct ckpt_policy *policy, const uint32_t *rank,
                       uint32_t n, uint32_t *group, struct known *known, uint32_t *nknown)
{
    for (uint32_t k = 0; k < n; k++)
        group[k] = m->replicas.of[rank[k]];
    const XXH128_hash_t hash = XXH3_128bits(group, n * sizeof *group);
    for (uint32_t i = *nknown; i-- > 0;)
        if (known[i].n == n && XXH128_isEqual(known[i].groups, hash)) {
            for (uint32_t k = 0; k < n; k++)
                m->share[rank[k]] = m->share[known[i].first + k];
            return 0;
        }
    known[(*nknown)++] = (struct known){hash, rank[0], n};
    return add_domain(m, policy, rank, n);
}

static int add_domains(struct model *m, const struct ckpt_policy_input *in,
                       struct ckpt_policy *policy)
{
    ckpt_cleanup(ckpt_freep) uint32_t *rank = malloc((m->nrank + 1) * sizeof *rank);
    ckpt_cleanup(ckpt_freep) uint32_t *group = malloc((m->nrank + 1) * sizeof *group);
    ckpt_cleanup(ckpt_freep) struct known *known = malloc((m->nrank + 1) * sizeof *known);
    struct ckpt_policy_input of = *in;
    uint32_t nknown = 0, n;

    if (!rank || !group || !known)
        return ckpt_nomem(m->err);
    for (uint32_t r = 0; r < m->nrank; r += n) {
        n = next_domain(m, policy->readers, r, rank);
        if (policy->readers == CKPT_READERS_NODE && n != of.local) {
            of.local = n; /* the last node may have fewer */
            if (ckpt_policy_sizes(&of, policy->readers, policy, m->err) < 0)
                return -1;
        }
        if (add_or_copy(m, policy, rank, n, group, known, &nknown) < 0)
            return -1;
    }
    return 0;
}

/* ---- the report ---- */

static json_t *spread(const struct model *m, size_t member)
{
    uint64_t least = UINT64_MAX, most = 0;
    double sum = 0;

    for (uint32_t r = 0; r < m->nrank; r++) {
        uint64_t v;
        memcpy(&v, (const char *)&m->share[r] + member, sizeof v);
        least = ckpt_min_u64(least, v);
        most = ckpt_max_u64(most, v);
        sum += (double)v;
    }
    return json_pack("{s:I, s:I, s:I}", "least", (json_int_t)least, "mean",
                     (json_int_t)(sum / m->nrank), "most", (json_int_t)most);
}

static int report(const struct model *m, const char *layout, uint32_t per_node,
                  const struct ckpt_policy *policy, const struct ckpt_cost_input *in, char **ret)
{
    const struct ckpt_cost *cost = &policy->cost;
    const struct ckpt_rates *r = &policy->rates;
    static const char *const name[] = {"auto", "once", "node", "each"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:s, s:I, s:I, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:{s:f, s:f, s:f}, "
        "s:{s:f, s:f, s:f, s:f, s:f, s:f}}",
        "layout", layout, "ranks", (json_int_t)m->nrank, "nodes", (json_int_t)m->nnode,
        "ranks_per_node", (json_int_t)per_node, "readers", name[policy->readers], "unique_bytes",
        (json_int_t)in->unique, "needed_bytes", (json_int_t)in->needed, "read_bytes",
        spread(m, offsetof(struct share, read)), "reads", spread(m, offsetof(struct share, reads)),
        "sent_bytes", spread(m, offsetof(struct share, sent)), "received_bytes",
        spread(m, offsetof(struct share, received)), "windows", (json_int_t)m->nwindow,
        "piece_bytes", (json_int_t)m->sizes.piece, "modelled_s", "each", cost->each, "node",
        cost->node, "once", cost->once, "rates", "node_storage", r->node_storage, "shared_storage",
        r->shared_storage, "page_cache", r->page_cache, "copy", r->copy, "local_link",
        r->local_link, "network", r->network);

    if (!j)
        return ckpt_nomem(m->err);
    return ckpt_json_dump(j, CKPT_JSON_PYTHON, false, ret, NULL, m->err);
}

static int model_run(struct model *m, const struct ckpt_view *view, const char *layout,
                     uint32_t per_node, const struct ckpt_load_options *opt, char **ret)
{
    const uint32_t local = per_node < m->nrank ? per_node : m->nrank;
    struct ckpt_policy_input in = {.opt = opt, .local = local, .cpus = CPUS * local};
    struct ckpt_policy policy;
    double hot;
    bool shared;

    if (make_roster(m, view, layout) < 0 ||
        ckpt_replicas_init(&m->replicas, &m->roster, m->err) < 0)
        return -1;
    ckpt_load_residency(view->cat, &hot, &shared);
    /* a job of many nodes starts with cold caches */
    in.cost = (struct ckpt_cost_input){.hot = m->nnode > 1 ? 0 : hot,
                                       .shared = shared || opt->rates.shared_storage > 0};
    if (ckpt_load_weigh(&m->roster, m->node, m->nnode, &in.cost, m->err) < 0 ||
        ckpt_policy_choose(&in, &policy, m->err) < 0 || add_domains(m, &in, &policy) < 0)
        return -1;
    return report(m, layout, per_node, &policy, &in.cost, ret);
}

int ckpt_load_model(struct ckpt_view *view, const char *layout, uint32_t ranks,
                    uint32_t ranks_per_node, const struct ckpt_load_options *opt, char **ret_json,
                    struct ckpt_err *err)
{
    struct model m = {.nrank = ranks, .err = err};
    struct ckpt_load_options own = opt ? *opt : (struct ckpt_load_options){.size = sizeof own};
    int rc;

    if (ranks == 0 || ranks_per_node == 0)
        return ckpt_fail(err, CKPT_USAGE, "a job of no ranks");
    if (own.host_bytes == 0)
        own.host_bytes = HOST_BYTES;
    m.nnode = (ranks + ranks_per_node - 1) / ranks_per_node;
    m.node = malloc(ranks * sizeof *m.node);
    m.share = calloc(ranks, sizeof *m.share);
    rc = m.node && m.share ? 0 : ckpt_nomem(err);
    for (uint32_t r = 0; r < ranks && rc == 0; r++)
        m.node[r] = r / ranks_per_node;
    if (rc == 0)
        rc = model_run(&m, view, layout, ranks_per_node, &own, ret_json);
    if (m.roster.use)
        ckpt_roster_release(&m.roster);
    ckpt_replicas_release(&m.replicas);
    ckpt_vec_release(&m.shapes);
    free(m.node);
    free(m.share);
    return rc;
}
