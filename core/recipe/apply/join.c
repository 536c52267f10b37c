/* SPDX-License-Identifier: Apache-2.0 */
/* Converting sharding annotations to boxes. A dimension of a rank's part is divided into runs. In
 * the whole tensor, a run has either a different position for each rank, or one position for all.
 */
#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "recipe/apply/resolve.h"
#include "recipe/apply/sharding.h"

enum { MAX_RUNS = 1 << 16 };

/* A part of "(gate=f/tp + up=f/tp)" with f 4 and two ranks has two runs, which lie apart in the
 * whole:
 *
 *      rank 0   g0 g1 u0 u1
 *      rank 1   g2 g3 u2 u3
 *      whole    g0 g1 g2 g3 u0 u1 u2 u3
 *
 * Run 0 is {lo 0, n 2, at 0}, run 1 {lo 2, n 2, at 4}; both are ranked. */
struct run {
    uint64_t lo, n, at; /* first index and length in the part; index in the whole for rank 0 */
    bool ranked;        /* the run of rank t is t * n further */
};

/* How the parts of one tensor are joined. */
struct plan {
    struct {
        CKPT_VEC(struct run) run;
        uint64_t whole; /* the dimension's size */
    } d[CKPT_MAX_RANK];
    uint32_t rank;
};

struct joiner {
    const struct ckpt_tensor *t;
    const struct ckpt_side *side;
    const struct ckpt_sizes *sizes;
    struct plan *plan;
    uint32_t dim; /* the dimension that is being computed */
    struct ckpt_err *err;
};

static void plan_release(struct plan *p)
{
    for (uint32_t d = 0; d < CKPT_MAX_RANK; d++)
        ckpt_vec_release(&p->d[d].run);
}

/* ---- one dimension ---- */

static bool known_size(const struct joiner *j, const struct ckpt_factor *f, uint64_t *ret)
{
    uint32_t var;

    return ckpt_factor_size(f, j->sizes, ret, &var) == CKPT_SIZE_KNOWN;
}

static int no_fit(const struct joiner *j, uint64_t n)
{
    return ckpt_fail(j->err, CKPT_CONFLICT,
                     "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                     " on each of %u ranks, which '%.150s' does not fit",
                     j->dim, j->t->name, n, j->t->ranks, j->side->text);
}

static int add_run(struct joiner *j, uint64_t lo, uint64_t n, uint64_t at, bool ranked)
{
    if (j->plan->d[j->dim].run.len == MAX_RUNS)
        return ckpt_fail(j->err, CKPT_LIMIT, "tensor '%s' would be joined of more than %d runs",
                         j->t->name, MAX_RUNS);
    return ckpt_vec_push(&j->plan->d[j->dim].run, ((struct run){lo, n, at, ranked})) < 0
               ? ckpt_nomem(j->err)
               : 0;
}

/* The elements of a factor: n steps of `unit` elements each, from lo on in a rank's part and from
 * `at` on in the whole. */
struct stretch {
    uint64_t n, unit, lo, at;
};

static int lay(struct joiner *j, const struct ckpt_factor *f, const struct stretch *s,
               uint64_t *ret_whole);

/* An annotated factor: the whole consists of the ranks' parts in order, unless each rank has the
 * whole. */
static int lay_marked(struct joiner *j, const struct ckpt_factor *f, const struct stretch *s,
                      uint64_t *ret_whole)
{
    uint64_t known;
    bool copy = known_size(j, f, &known) && known == s->n;

    if (copy)
        *ret_whole = s->n;
    else if (ckd_mul(ret_whole, s->n, (uint64_t)j->t->ranks))
        return no_fit(j, s->n);
    return add_run(j, s->lo, s->n * s->unit, s->at, !copy);
}

/* The size of a summand's part, if it is known without the others. */
static bool part_size(const struct joiner *j, const struct ckpt_factor *f, uint64_t *ret)
{
    if (!known_size(j, f, ret))
        return false;
    if (!f->rank)
        return !ckpt_factor_is_marked(f);
    if (*ret % j->t->ranks)
        return false;
    *ret /= j->t->ranks;
    return true;
}

/* Summands of unknown size are equal: they divide the rest. */
static int lay_sum(struct joiner *j, const struct ckpt_factor *f, const struct stretch *s,
                   uint64_t *ret_whole)
{
    uint64_t known = 0, open = 0, one, whole;
    struct stretch part = *s;

    for (uint16_t c = 0; c < f->nchild; c++)
        if (!part_size(j, &f->child[c], &one))
            open++;
        else if (ckd_add(&known, known, one))
            return no_fit(j, s->n);
    if (known > s->n || (open ? (s->n - known) % open : s->n != known))
        return no_fit(j, s->n);
    *ret_whole = 0;
    for (uint16_t c = 0; c < f->nchild; c++) {
        if (!part_size(j, &f->child[c], &part.n))
            part.n = (s->n - known) / open;
        if (lay(j, &f->child[c], &part, &whole) < 0)
            return -1;
        part.lo += part.n * s->unit;
        if (ckd_add(ret_whole, *ret_whole, whole))
            return no_fit(j, s->n);
        part.at += whole * s->unit;
    }
    return 0;
}

/* In a product one factor is divided; the factors before it repeat the division. */
static int lay_product(struct joiner *j, const struct ckpt_factor *f, const struct stretch *s,
                       uint64_t *ret_whole)
{
    uint64_t outer = 1, inner = 1, one, whole = 0;
    int cut = -1;

    for (uint16_t c = 0; c < f->nchild; c++) {
        if (ckpt_factor_is_marked(&f->child[c])) {
            if (cut >= 0)
                return no_fit(j, s->n);
            cut = c;
            continue;
        }
        /* the size after an annotated first factor need not be known, because the division is that
         * of the whole */
        if (!known_size(j, &f->child[c], &one)) {
            if (cut == 0 && f->child[0].rank)
                return lay_marked(j, f, s, ret_whole);
            return no_fit(j, s->n);
        }
        if (ckd_mul(cut < 0 ? &outer : &inner, cut < 0 ? outer : inner, one))
            return no_fit(j, s->n);
    }
    if (cut < 0 || outer == 0 || inner == 0 || ckd_mul(&one, outer, inner) || s->n % one)
        return no_fit(j, s->n);
    one = s->n / one;
    const uint64_t unit = inner * s->unit;
    for (uint64_t o = 0; o < outer; o++) {
        const struct stretch part = {one, unit, s->lo + o * one * unit, s->at + o * whole * unit};
        if (lay(j, &f->child[cut], &part, &whole) < 0)
            return -1;
    }
    return ckd_mul(ret_whole, whole, outer * inner) ? no_fit(j, s->n) : 0;
}

/* Compute the runs of factor f, and how many steps the whole has. */
static int lay(struct joiner *j, const struct ckpt_factor *f, const struct stretch *s,
               uint64_t *ret_whole)
{
    if (f->rank)
        return lay_marked(j, f, s, ret_whole);
    if (!ckpt_factor_is_marked(f)) {
        *ret_whole = s->n;
        return add_run(j, s->lo, s->n * s->unit, s->at, false);
    }
    return f->kind == CKPT_FACTOR_SUM ? lay_sum(j, f, s, ret_whole)
                                      : lay_product(j, f, s, ret_whole);
}

/* ---- a tensor ---- */

static int make_plan(struct joiner *j, uint32_t spelling, bool *ret_fits)
{
    struct plan *p = j->plan;
    struct ckpt_dims dims;

    p->rank = (uint32_t)j->t->rank - 1;
    *ret_fits = ckpt_dims_of(j->side, spelling, p->rank, &dims);
    if (!*ret_fits)
        return 0;
    for (j->dim = 0; j->dim < p->rank; j->dim++) {
        const uint64_t n = j->t->dim[j->dim + 1];
        const struct ckpt_factor *f = dims.d[j->dim].f;
        p->d[j->dim].whole = n;
        if ((f ? lay(j, f, &(struct stretch){n, 1, 0, 0}, &p->d[j->dim].whole)
               : add_run(j, 0, n, 0, false)) < 0)
            return -1;
    }
    return 0;
}

static bool same_plan(const struct plan *a, const struct plan *b)
{
    for (uint32_t d = 0; d < a->rank; d++) {
        if (a->d[d].whole != b->d[d].whole || a->d[d].run.len != b->d[d].run.len)
            return false;
        for (size_t i = 0; i < a->d[d].run.len; i++) {
            const struct run *x = &a->d[d].run.ptr[i], *y = &b->d[d].run.ptr[i];
            if (x->lo != y->lo || x->n != y->n || x->at != y->at || x->ranked != y->ranked)
                return false;
        }
    }
    return true;
}

/* ---- pieces ---- */

struct cutter {
    const struct ckpt_tensor *t;
    const struct plan *plan;
    uint64_t dim[CKPT_MAX_RANK]; /* shape of the whole */
    CKPT_VEC(struct ckpt_piece_draft) out;
};

static void cutter_release(struct cutter *c) { ckpt_vec_release(&c->out); }

/* Add the part of box b, of rank t's part, that is in run which[d] of every dimension. */
static int cut_runs(struct cutter *c, const struct ckpt_piece *piece, const struct ckpt_box *b,
                    uint64_t t, const size_t *which, struct ckpt_err *err)
{
    const struct plan *p = c->plan;
    struct ckpt_box box = {.rank = p->rank};
    uint64_t stride[CKPT_MAX_RANK], src = piece->src + (t - b->lo[0]) * piece->axis[0].src;
    struct ckpt_piece_draft *draft;
    bool ranked = false;

    for (uint32_t d = 0; d < p->rank; d++) {
        const struct run *r = &p->d[d].run.ptr[which[d]];
        const uint64_t first = b->lo[d + 1], end = first + b->n[d + 1];
        const uint64_t lo = r->lo > first ? r->lo : first;
        const uint64_t hi = r->lo + r->n < end ? r->lo + r->n : end;
        if (lo >= hi)
            return 0;
        ranked |= r->ranked;
        box.lo[d] = r->at + (r->ranked ? t * r->n : 0) + (lo - r->lo);
        box.n[d] = hi - lo;
        stride[d] = piece->axis[d + 1].src;
        src += (lo - first) * stride[d];
    }
    if (!ranked && t > 0) /* the other ranks have copies */
        return 0;
    if (ckpt_vec_add(&c->out, &draft) < 0)
        return ckpt_nomem(err);
    ckpt_piece_from_box(c->dim, &box, piece->source, src, stride, draft);
    return 0;
}

static int cut_piece(struct cutter *c, const struct ckpt_piece *piece, struct ckpt_err *err)
{
    const struct plan *p = c->plan;
    struct ckpt_box b;

    if (!ckpt_piece_box(piece, c->t->dim, c->t->rank, &b))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "tensor '%s' has a piece that is not a box",
                         c->t->name);
    for (uint64_t t = b.lo[0]; t < b.lo[0] + b.n[0]; t++) {
        size_t which[CKPT_MAX_RANK] = {0};
        for (;;) {
            uint32_t d = p->rank;
            if (cut_runs(c, piece, &b, t, which, err) < 0)
                return -1;
            while (d > 0 && ++which[d - 1] == p->d[d - 1].run.len)
                which[--d] = 0;
            if (d == 0)
                break;
        }
    }
    return 0;
}

static int add_joined(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const struct plan *p,
                      struct ckpt_err *err)
{
    ckpt_cleanup(cutter_release) struct cutter c = {.t = t, .plan = p};
    size_t index;

    for (uint32_t d = 0; d < p->rank; d++)
        c.dim[d] = p->d[d].whole;
    for (size_t i = 0; i < t->npiece; i++)
        if (cut_piece(&c, &t->piece[i], err) < 0)
            return -1;
    if (ckpt_catalog_add(cat, t->name, t->dtype, c.dim, p->rank, &index, err) < 0)
        return -1;
    cat->tensors.ptr[index].wanted = t->wanted;
    return ckpt_catalog_set_pieces(cat, index, c.out.ptr, c.out.len, err);
}

/* ---- the catalogue ---- */

bool ckpt_join_needed(const struct ckpt_catalog *src)
{
    for (size_t i = 0; i < src->tensors.len; i++)
        if (src->tensors.ptr[i].ranks)
            return true;
    return false;
}

/* Copy a tensor, joined if it is ranked. All rules that use it must join it in the same way. */
static int join_tensor(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                       struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(plan_release) struct plan first = {0};
    const struct ckpt_rule *rule = NULL;
    struct ckpt_source_side at = {0};

    while (t->ranks && ckpt_resolver_next_side(rs, t, &at)) {
        ckpt_cleanup(plan_release) struct plan plan = {0};
        struct joiner j = {t, &at.rule->from[at.side], at.sizes, rule ? &plan : &first, 0, err};
        bool fits;
        if (make_plan(&j, at.spelling, &fits) < 0)
            return ckpt_err_in(err, "%s", at.rule->where);
        if (!fits)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "%s: tensor '%s' of each rank has %u dimensions, '%.150s' speaks of "
                             "others",
                             at.rule->where, t->name, t->rank - 1, j.side->text);
        if (rule && !same_plan(&first, &plan))
            return ckpt_fail(err, CKPT_CONFLICT, "'%s' is joined otherwise by %s and by %s",
                             t->name, rule->where, at.rule->where);
        rule = rule ? rule : at.rule;
    }
    return rule ? add_joined(cat, t, &first, err) : ckpt_catalog_copy(cat, t, 0, err);
}

int ckpt_join(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
              struct ckpt_settings *set, struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;
    ckpt_cleanup(ckpt_resolver_release) struct ckpt_resolver rs = {0};

    if (ckpt_resolver_init(&rs, recipe, src, set, err) < 0 ||
        ckpt_catalog_new_like(src, &cat, err) < 0)
        return -1;
    for (size_t i = 0; i < src->tensors.len; i++)
        if (join_tensor(&rs, &src->tensors.ptr[i], cat, err) < 0)
            return -1;
    *ret = ckpt_steal(&cat);
    return 0;
}
