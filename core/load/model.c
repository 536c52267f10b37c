/* SPDX-License-Identifier: Apache-2.0 */
/* Planning only: what a job would do that need not exist. */
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "load/load_inner.h"

enum { THREADS = 8, HOST_BYTES = 256 << 20 };

/* Of one rank. */
struct share {
    uint64_t read, reads, sent, received;
};

struct model {
    struct ckpt_roster roster;
    uint32_t nrank, nnode, *node;
    struct share *share;
    uint32_t nwindow;
    struct ckpt_plan_sizes sizes;
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

/* The boxes of a tensor that its ranks want: units of one tensor mostly follow each other. */
struct wanted {
    uint32_t tensor;
    size_t n, cap;
    struct {
        uint32_t rank;
        struct ckpt_box box;
    } * at;
};

static int look_up(struct wanted *w, const struct ckpt_plan *p, uint32_t tensor,
                   struct ckpt_err *err)
{
    const struct ckpt_roster *r = p->roster;
    const struct ckpt_tensor *t = &r->cat->tensors.ptr[tensor];

    if (w->n && w->tensor == tensor)
        return 0;
    w->tensor = tensor;
    w->n = 0;
    for (uint64_t i = r->first[tensor]; i < r->first[tensor + 1]; i++)
        for (uint32_t k = 0; k < p->nowner; k++) {
            const struct ckpt_wants *table = &r->table[r->use[i].class];
            if (r->class_of[p->owner[k]] != r->use[i].class)
                continue;
            if (w->n == w->cap) {
                size_t cap = w->cap ? 2 * w->cap : 64;
                void *more = realloc(w->at, cap * sizeof *w->at);
                if (!more)
                    return ckpt_nomem(err);
                w->at = more;
                w->cap = cap;
            }
            w->at[w->n].rank = p->owner[k];
            w->n += ckpt_wants_box(table, &table->entries.ptr[r->use[i].entry], t, p->owner[k],
                                   &w->at[w->n].box);
        }
    return 0;
}

static int add_unit(struct model *m, const struct ckpt_plan *p, uint32_t unit, uint32_t owner,
                    struct wanted *w)
{
    const struct ckpt_tensor *t = ckpt_plan_unit_tensor(p, unit);
    const struct ckpt_catalog *cat;
    const size_t esize = ckpt_dtype_size(t->dtype);
    struct ckpt_box box, part;

    if (look_up(w, p, (uint32_t)(t - p->roster->cat->tensors.ptr), m->err) < 0)
        return -1;
    ckpt_plan_unit_box(p, unit, &box);
    m->share[owner].reads++;
    m->share[owner].read +=
        ckpt_box_numel(&box) * ckpt_dtype_size(ckpt_tensor_stored(p->roster->cat, t, &cat)->dtype);
    for (size_t i = 0; i < w->n; i++)
        if (w->at[i].rank != owner && ckpt_box_intersect(&w->at[i].box, &box, &part)) {
            m->share[owner].sent += ckpt_box_numel(&part) * esize;
            m->share[w->at[i].rank].received += ckpt_box_numel(&part) * esize;
        }
    return 0;
}

static int add_domain(struct model *m, const struct ckpt_load_options *opt, const uint32_t *rank,
                      uint32_t n, uint64_t bytes)
{
    struct wanted w = {0};
    struct ckpt_plan *p = NULL;
    uint32_t slots;
    int rc = ckpt_load_sizes(opt, n, bytes, THREADS, false, ckpt_load_aside(opt), &m->sizes, &slots,
                             m->err);

    if (rc == 0)
        rc = ckpt_plan_new(&m->roster, rank, n, &m->sizes, &p, m->err);
    for (uint32_t o = 0; rc == 0 && o < n; o++)
        for (uint32_t u = p->owner_unit[o]; u < p->owner_unit[o + 1] && rc == 0; u++)
            rc = add_unit(m, p, u, rank[o], &w);
    if (rc == 0 && p->nwindow > m->nwindow)
        m->nwindow = p->nwindow;
    ckpt_plan_free(p);
    free(w.at);
    return rc;
}

static int add_domains(struct model *m, const struct ckpt_load_options *opt,
                       enum ckpt_readers readers, uint64_t bytes)
{
    for (uint32_t r = 0; r < m->nrank; r++) {
        uint32_t *rank, n;
        if (ckpt_load_domain(readers, r, m->node, m->nrank, &rank, &n, m->err) < 0)
            return -1;
        /* once a domain: by its first rank */
        int rc = rank[0] == r ? add_domain(m, opt, rank, n, bytes) : 0;
        free(rank);
        if (rc < 0)
            return -1;
        if (readers == CKPT_READERS_ONCE)
            break;
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
                  enum ckpt_readers readers, const struct ckpt_cost_input *in,
                  const struct ckpt_cost *cost, const struct ckpt_rates *r, char **ret)
{
    static const char *const name[] = {"auto", "once", "node", "each"};
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:s, s:I, s:I, s:I, s:s, s:I, s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:{s:f, s:f, s:f}, "
        "s:{s:f, s:f, s:f, s:f, s:f, s:f}}",
        "layout", layout, "ranks", (json_int_t)m->nrank, "nodes", (json_int_t)m->nnode,
        "ranks_per_node", (json_int_t)per_node, "readers", name[readers], "unique_bytes",
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
    struct ckpt_cost_input in;
    struct ckpt_cost cost;
    struct ckpt_rates rates = opt->rates;
    enum ckpt_readers readers = opt->readers;
    double hot;
    bool shared;

    if (make_roster(m, view, layout) < 0)
        return -1;
    ckpt_load_residency(view->cat, &hot, &shared);
    /* a job of many nodes starts with cold caches */
    if (m->nnode > 1)
        hot = 0;
    shared |= rates.shared_storage > 0;
    in = (struct ckpt_cost_input){.hot = hot, .shared = shared};
    if (ckpt_load_weigh(&m->roster, m->node, m->nnode, &in, m->err) < 0)
        return -1;
    ckpt_rates_assume(&rates, false);
    ckpt_cost_estimate(&in, &rates, &cost);
    if (readers == CKPT_READERS_AUTO)
        readers = ckpt_cost_choose(&cost);
    if (add_domains(m, opt, readers, in.unique) < 0)
        return -1;
    return report(m, layout, per_node, readers, &in, &cost, &rates, ret);
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
    free(m.node);
    free(m.share);
    return rc;
}
