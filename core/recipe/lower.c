/* SPDX-License-Identifier: Apache-2.0 */
/* Solving the sizes of a rule's instance, and converting its terms to boxes of the sources. The
 * work depends on the number of boxes, not of elements. */
#include "recipe/lower.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "recipe/compose.h"

/* The dimensions of "..." are represented by axes whose numbers follow those of the scope. */
enum {
    REST_AXIS = CKPT_SCOPE_AXES,
    ALL_AXES = CKPT_SCOPE_AXES + CKPT_MAX_RANK,
    MAX_PIECES = 1 << 20
};

/* The dimensions of a side for a tensor of a certain rank. */
struct dims {
    struct {
        const struct ckpt_factor *f; /* NULL: of "..." */
        uint32_t rest;
    } d[CKPT_MAX_RANK];
    uint32_t n, nrest;
    struct ckpt_factor lead;
};

static bool dims_of(const struct ckpt_side *side, uint32_t spelling, uint32_t rank,
                    struct dims *out)
{
    const struct ckpt_pattern *p = &side->pattern;
    const int8_t lead = side->name[spelling].lead;
    uint32_t spelt = p->ndim + (lead >= 0), n = 0;

    if (rank < spelt || rank > CKPT_MAX_RANK || (p->rest_at < 0 && rank != spelt))
        return false;
    out->n = rank;
    out->nrest = rank - spelt;
    if (lead >= 0) {
        out->lead = (struct ckpt_factor){.kind = CKPT_FACTOR_AXIS, .axis = (uint8_t)lead};
        out->d[n++].f = &out->lead;
    }
    for (uint32_t i = 0; i <= p->ndim; i++) {
        if (p->rest_at == (int32_t)i)
            for (uint32_t k = 0; k < out->nrest; k++) {
                out->d[n].f = NULL;
                out->d[n++].rest = k;
            }
        if (i < p->ndim)
            out->d[n++].f = &p->dim[i];
    }
    return true;
}

/* ---- sizes ---- */

static int rank_error(const struct ckpt_instance *in, const struct ckpt_source_use *u,
                      struct ckpt_err *err)
{
    char shape[CKPT_SHAPE_TEXT];

    return ckpt_fail(
        err, CKPT_CONFLICT,
        "tensor '%s' has the shape %s, the rule '%s' (%s) speaks of %" PRIu32 " dimensions%s",
        u->tensor->name, ckpt_shape_text(u->tensor->dim, u->tensor->rank, shape, sizeof shape),
        in->rule->from[u->side].text, in->rule->where,
        in->rule->from[u->side].pattern.ndim +
            (in->rule->from[u->side].name[u->spelling].lead >= 0),
        in->rule->from[u->side].pattern.rest_at >= 0 ? " or more" : "");
}

static int solve_rest(struct ckpt_instance *in, const struct dims *d,
                      const struct ckpt_source_use *u, struct ckpt_err *err)
{
    if (!in->has_rest)
        in->nrest = d->nrest;
    if (in->nrest != d->nrest)
        return ckpt_fail(err, CKPT_CONFLICT, "tensors '%s' and '%s' have different ranks",
                         in->use.ptr[0].tensor->name, u->tensor->name);
    for (uint32_t i = 0; i < d->n; i++) {
        if (d->d[i].f)
            continue;
        if (!in->has_rest)
            in->rest[d->d[i].rest] = u->tensor->dim[i];
        else if (in->rest[d->d[i].rest] != u->tensor->dim[i])
            return ckpt_fail(err, CKPT_CONFLICT,
                             "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                             ", of tensor '%s' %" PRIu64,
                             i, u->tensor->name, u->tensor->dim[i], in->use.ptr[0].tensor->name,
                             in->rest[d->d[i].rest]);
    }
    in->has_rest = true;
    return 0;
}

/* Try to solve each dimension once; true if a size was found. */
static bool solve_round(struct ckpt_instance *in)
{
    uint32_t before = in->sizes.known;
    struct dims d;

    for (size_t i = 0; i < in->use.len; i++) {
        const struct ckpt_source_use *u = &in->use.ptr[i];
        if (!dims_of(&in->rule->from[u->side], u->spelling, u->tensor->rank, &d))
            continue;
        for (uint32_t k = 0; k < d.n; k++)
            if (d.d[k].f)
                (void)ckpt_factor_solve(d.d[k].f, &in->sizes, u->tensor->dim[k]);
        if (in->sizes.known == (1ull << in->sizes.scope->nvar) - 1)
            break;
    }
    return in->sizes.known != before;
}

static bool factor_uses(const struct ckpt_scope *sc, const struct ckpt_factor *f, uint32_t var)
{
    if (f->kind == CKPT_FACTOR_AXIS)
        return sc->axis[f->axis].var == (int8_t)var;
    for (uint16_t c = 0; c < f->nchild; c++)
        if (factor_uses(sc, &f->child[c], var))
            return true;
    return false;
}

enum { SIZES_TEXT = 256 };

/* " with vocab=128 (option vocab_size=...), ..." of the known dims in f; "" if there is none. */
static const char *sizes_text(const struct ckpt_instance *in, const struct ckpt_settings *s,
                              const struct ckpt_factor *f, char *buf)
{
    const struct ckpt_scope *sc = in->rule->scope;
    char hint[128];
    size_t len = 0;

    buf[0] = '\0';
    for (uint32_t v = 0; v < sc->nvar && len + 1 < SIZES_TEXT; v++)
        if (sc->var[v].dim && (in->sizes.known >> v & 1) && factor_uses(sc, f, v)) {
            int n = snprintf(buf + len, SIZES_TEXT - len, "%s%s=%" PRIu64 "%s",
                             len ? ", " : " with ", sc->var[v].name, in->sizes.var[v],
                             ckpt_settings_hint(s, sc->var[v].name, hint, sizeof hint));
            len += n > 0 ? (size_t)n : 0;
        }
    return buf;
}

static int size_error(const struct ckpt_instance *in, const struct ckpt_settings *s,
                      const struct ckpt_source_use *u, const struct ckpt_factor *f, uint32_t dim,
                      uint64_t want, struct ckpt_err *err)
{
    char sizes[SIZES_TEXT];

    return ckpt_fail(err, CKPT_CONFLICT,
                     "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                     ", but '%.150s' makes it %" PRIu64 "%s",
                     dim, u->tensor->name, u->tensor->dim[dim], in->rule->from[u->side].text, want,
                     sizes_text(in, s, f, sizes));
}

/* A size that is needed is not known, or no whole number solves the pattern. */
static int unknown_error(const struct ckpt_instance *in, const struct ckpt_settings *s,
                         const struct ckpt_source_use *u, const struct ckpt_factor *f, uint32_t dim,
                         uint32_t var, struct ckpt_err *err)
{
    const struct ckpt_scope_var *v = &in->rule->scope->var[var];
    char hint[128], sizes[SIZES_TEXT];

    (void)sizes_text(in, s, f, sizes);
    if (!v->dim)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "dimension %" PRIu32 " of tensor '%s' is %" PRIu64 ", which does not fit '%.150s'%s",
            dim, u->tensor->name, u->tensor->dim[dim], in->rule->from[u->side].text, sizes);
    return ckpt_fail(err, CKPT_MISSING,
                     "dimension %" PRIu32 " of tensor '%s' is %" PRIu64
                     ", which '%.150s' does not divide: '%s' is unknown or not a whole number%s%s",
                     dim, u->tensor->name, u->tensor->dim[dim], in->rule->from[u->side].text,
                     v->name, ckpt_settings_hint(s, v->name, hint, sizeof hint), sizes);
}

static int check_use(struct ckpt_instance *in, const struct ckpt_settings *s,
                     const struct ckpt_source_use *u, struct ckpt_err *err)
{
    struct dims d;
    uint64_t size;
    uint32_t var;

    if (!dims_of(&in->rule->from[u->side], u->spelling, u->tensor->rank, &d))
        return rank_error(in, u, err);
    if (in->rule->from[u->side].pattern.rest_at >= 0 && solve_rest(in, &d, u, err) < 0)
        return -1;
    for (uint32_t k = 0; k < d.n; k++) {
        if (!d.d[k].f)
            continue;
        switch (ckpt_factor_size(d.d[k].f, &in->sizes, &size, &var)) {
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(err, CKPT_LIMIT, "sizes of the rule '%.200s' overflow",
                             in->rule->from[u->side].text);
        case CKPT_SIZE_UNKNOWN:
            return unknown_error(in, s, u, d.d[k].f, k, var, err);
        case CKPT_SIZE_KNOWN:
            if (size != u->tensor->dim[k])
                return size_error(in, s, u, d.d[k].f, k, size, err);
        }
    }
    return 0;
}

static int check_bound(const struct ckpt_instance *in, uint32_t bound, const uint64_t *at,
                       struct ckpt_err *err)
{
    uint64_t size;

    for (uint32_t a = 0; a < in->rule->scope->naxis; a++)
        if ((bound >> a & 1) && ckpt_axis_size(&in->sizes, a, &size) && at[a] >= size)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': number %" PRIu64 " of '%s' is not below %" PRIu64, in->target,
                             at[a], in->rule->scope->axis[a].name, size);
    return 0;
}

int ckpt_instance_solve(struct ckpt_instance *in, const struct ckpt_settings *s,
                        struct ckpt_err *err)
{
    const uint32_t nvar = in->rule->scope->nvar;

    while (in->sizes.known != (uint32_t)((1ull << nvar) - 1) && solve_round(in))
        ;
    in->has_rest = false;
    in->nrest = 0;
    for (size_t i = 0; i < in->use.len; i++)
        if (check_use(in, s, &in->use.ptr[i], err) < 0 ||
            check_bound(in, in->use.ptr[i].bound, in->use.ptr[i].at, err) < 0)
            return -1;
    return check_bound(in, in->bound, in->at, err);
}

const struct ckpt_factor *ckpt_instance_factor(const struct ckpt_instance *in, uint32_t dim,
                                               uint32_t rank)
{
    const struct ckpt_pattern *p = &in->rule->to[in->side].pattern;

    if (p->rest_at < 0 || dim < (uint32_t)p->rest_at)
        return &p->dim[dim];
    return dim < (uint32_t)p->rest_at + rank - p->ndim ? NULL : &p->dim[dim - (rank - p->ndim)];
}

/* A target's padding, of which its sources know nothing, makes the dimension a multiple. */
static enum ckpt_size_state solve_padding(struct ckpt_instance *in, const struct ckpt_factor *f,
                                          uint32_t var, uint64_t *ret)
{
    struct ckpt_sizes *s = &in->sizes;
    enum ckpt_size_state state;
    uint32_t other;

    s->known |= 1u << var;
    s->var[var] = 0;
    if (!in->pad_to || (state = ckpt_factor_size(f, s, ret, &other)) != CKPT_SIZE_KNOWN)
        return CKPT_SIZE_UNKNOWN;
    s->var[var] = (in->pad_to - *ret % in->pad_to) % in->pad_to;
    return ckpt_factor_size(f, s, ret, &other);
}

static enum ckpt_size_state target_size(struct ckpt_instance *in, const struct ckpt_factor *f,
                                        uint64_t *ret, uint32_t *ret_var)
{
    const enum ckpt_size_state state = ckpt_factor_size(f, &in->sizes, ret, ret_var);

    if (state != CKPT_SIZE_UNKNOWN || in->rule->scope->var[*ret_var].name[0] != '_')
        return state;
    return solve_padding(in, f, *ret_var, ret);
}

int ckpt_instance_shape(struct ckpt_instance *in, uint64_t dim[CKPT_MAX_RANK], uint32_t *ret_rank,
                        struct ckpt_err *err)
{
    const struct ckpt_side *side = &in->rule->to[in->side];
    uint32_t rank = side->pattern.ndim + (side->pattern.rest_at >= 0 ? in->nrest : 0), var;
    struct dims d;

    if (!dims_of(side, 0, rank, &d))
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has more than %d dimensions", in->target,
                         CKPT_MAX_RANK);
    for (uint32_t k = 0; k < rank; k++) {
        if (!d.d[k].f) {
            dim[k] = in->rest[d.d[k].rest];
            continue;
        }
        switch (target_size(in, d.d[k].f, &dim[k], &var)) {
        case CKPT_SIZE_OVERFLOW:
            return ckpt_fail(err, CKPT_LIMIT, "the size of '%s' overflows", in->target);
        case CKPT_SIZE_UNKNOWN:
            return ckpt_fail(err, CKPT_MISSING, "'%s': the size of '%s' is not known", in->target,
                             in->rule->scope->var[var].name);
        case CKPT_SIZE_KNOWN:
            break;
        }
    }
    *ret_rank = rank;
    return 0;
}

/* ---- terms ---- */

/* One dimension of one tensor in one term: offset and free axes, slowest first. */
struct line {
    uint64_t offset;
    uint32_t k;
    uint8_t axis[CKPT_MAX_AXES];
    uint64_t n[CKPT_MAX_AXES], stride[CKPT_MAX_AXES];
};

/* Positions of a term's axes in the source, while boxes are cut. */
struct ckpt_cutter {
    struct ckpt_instance *in;
    const struct ckpt_source_use *use; /* NULL: of no source, zeros */
    const uint64_t *dim;               /* of the target */
    uint32_t rank;
    uint64_t unit[CKPT_MAX_RANK]; /* strides of the target in elements */
    struct line to[CKPT_MAX_RANK], from[CKPT_MAX_RANK];
    struct {
        uint8_t dim, index; /* in `from` */
    } where[ALL_AXES];
    struct ckpt_span span[CKPT_MAX_RANK][CKPT_MAX_SPANS];
    size_t nspan[CKPT_MAX_RANK];
    uint64_t esize;
    ckpt_drafts *out;
    uint64_t numel; /* number of elements so far */
    bool composed;  /* a piece of a source was made by an earlier recipe, not by a reader */
};

static bool fixed_at(const struct ckpt_cutter *c, uint32_t axis, uint64_t *ret)
{
    if (axis >= REST_AXIS)
        return false;
    if (c->in->bound >> axis & 1)
        *ret = c->in->at[axis];
    else if (c->use && c->use->bound >> axis & 1)
        *ret = c->use->at[axis];
    else
        return false;
    return true;
}

static int line_of(const struct ckpt_cutter *c, const struct dims *d, uint32_t k,
                   const struct ckpt_term *term, struct line *out, struct ckpt_err *err)
{
    struct ckpt_layout lay = {.n = 1};
    uint64_t at, size;

    if (d->d[k].f)
        ckpt_factor_layout(d->d[k].f, term, &c->in->sizes, &lay);
    else
        lay.at[0] = (struct ckpt_layout_axis){1, (uint8_t)(REST_AXIS + d->d[k].rest)};
    out->offset = lay.offset;
    out->k = 0;
    for (uint32_t i = 0; i < lay.n; i++) {
        uint32_t axis = lay.at[i].axis;
        if (fixed_at(c, axis, &at)) {
            out->offset += at * lay.at[i].stride;
            continue;
        }
        if (axis >= REST_AXIS)
            size = c->in->rest[axis - REST_AXIS];
        else if (!ckpt_axis_size(&c->in->sizes, axis, &size))
            return ckpt_fail(err, CKPT_MISSING, "'%s': the size of axis '%s' is not known",
                             c->in->target, c->in->rule->scope->axis[axis].name);
        if (out->k == CKPT_MAX_AXES)
            return ckpt_fail(err, CKPT_LIMIT, "'%s': more than %d axes in one dimension",
                             c->in->target, CKPT_MAX_AXES);
        out->axis[out->k] = (uint8_t)axis;
        out->n[out->k] = size;
        out->stride[out->k++] = lay.at[i].stride;
    }
    return 0;
}

/* Add the box that consists of the spans which[] in each source dimension. */
static int emit(struct ckpt_cutter *c, const struct ckpt_piece *piece, const struct ckpt_box *box,
                const size_t *which, struct ckpt_err *err)
{
    struct ckpt_piece_draft *p;
    uint64_t numel = 1;

    if (c->out->len == MAX_PIECES)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d pieces", c->in->target,
                         MAX_PIECES);
    if (ckpt_vec_reserve(c->out, 1) < 0)
        return ckpt_nomem(err);
    p = &c->out->ptr[c->out->len];
    p->source = piece->source;
    p->src = piece->src;
    p->dst = 0;
    p->naxis = 0;
    for (uint32_t d = 0; d < box->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t index = l->offset;
        for (uint32_t i = 0; i < l->k; i++)
            index += c->span[d][which[d]].lo[i] * l->stride[i];
        p->src += (index - box->lo[d]) * piece->axis[d].src;
    }
    for (uint32_t t = 0; t < c->rank; t++) {
        const struct line *l = &c->to[t];
        const uint32_t first = p->naxis;
        uint64_t index = l->offset;
        for (uint32_t i = 0; i < l->k; i++) {
            const uint32_t d = c->where[l->axis[i]].dim, j = c->where[l->axis[i]].index;
            const struct ckpt_span *sp = &c->span[d][which[d]];
            const struct ckpt_axis a = {sp->n[j], l->stride[i] * c->unit[t],
                                        c->from[d].stride[j] * piece->axis[d].src};
            struct ckpt_axis *last = p->naxis > first ? &p->axis[p->naxis - 1] : NULL;
            index += sp->lo[j] * l->stride[i];
            numel *= a.n;
            if (a.n == 1)
                continue;
            if (last && last->dst == a.n * a.dst && last->src == a.n * a.src) {
                *last = (struct ckpt_axis){last->n * a.n, a.dst, a.src};
                continue;
            }
            if (p->naxis == CKPT_MAX_AXES)
                return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d axes",
                                 c->in->target, CKPT_MAX_AXES);
            p->axis[p->naxis++] = a;
        }
        p->dst += index * c->unit[t];
        if (p->naxis > first)
            continue;
        if (p->naxis == CKPT_MAX_AXES)
            return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d axes", c->in->target,
                             CKPT_MAX_AXES);
        p->axis[p->naxis++] = (struct ckpt_axis){1, c->unit[t], c->unit[t] * c->esize};
    }
    c->numel += numel;
    c->out->len++;
    return 0;
}

/* Add all elements of the term that are in one box of the source. */
static int cut_box(void *ctx, const struct ckpt_piece *piece, struct ckpt_err *err)
{
    struct ckpt_cutter *c = ctx;
    const struct ckpt_tensor *t = c->use->tensor;
    struct ckpt_box box;
    size_t which[CKPT_MAX_RANK] = {0};

    if (!ckpt_piece_box(piece, t->dim, t->rank, &box))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "tensor '%s' has a piece that is not a box",
                         t->name);
    for (uint32_t d = 0; d < t->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t lo = box.lo[d] > l->offset ? box.lo[d] - l->offset : 0;
        uint64_t hi = box.lo[d] + box.n[d];
        if (hi <= l->offset)
            return 0;
        c->nspan[d] = ckpt_axes_clip(l->n, l->stride, l->k, lo, hi - l->offset, c->span[d]);
        if (c->nspan[d] == 0)
            return 0;
    }
    for (;;) {
        if (emit(c, piece, &box, which, err) < 0)
            return -1;
        uint32_t d = t->rank;
        while (d > 0 && ++which[d - 1] == c->nspan[d - 1])
            which[--d] = 0;
        if (d == 0)
            return 0;
    }
}

static int cut_piece(struct ckpt_cutter *c, const struct ckpt_piece *piece, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = c->use->tensor;
    struct ckpt_box box;

    if (ckpt_piece_box(piece, t->dim, t->rank, &box))
        return cut_box(c, piece, err);
    c->composed = true;
    return ckpt_compose_boxes(piece, t->name, t->dim, t->rank, cut_box, c, err);
}

/* Find the first piece that may end after element `at`: pieces are ascending by dst, and none is
 * longer than max_span. */
static size_t first_piece(const struct ckpt_tensor *t, uint64_t at)
{
    uint64_t from = at >= t->max_span ? at - t->max_span : 0;
    size_t lo = 0, hi = t->npiece;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (t->piece[mid].dst < from)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static int cut_term(struct ckpt_cutter *c, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = c->use->tensor;
    uint64_t unit[CKPT_MAX_RANK], first = 0, last = 0;

    ckpt_shape_strides(t->dim, t->rank, unit);
    for (uint32_t d = 0; d < t->rank; d++) {
        const struct line *l = &c->from[d];
        uint64_t end = l->offset;
        for (uint32_t i = 0; i < l->k; i++) {
            if (l->n[i] == 0)
                return 0;
            end += (l->n[i] - 1) * l->stride[i];
            c->where[l->axis[i]].dim = (uint8_t)d;
            c->where[l->axis[i]].index = (uint8_t)i;
        }
        first += l->offset * unit[d];
        last += end * unit[d];
    }
    for (size_t i = first_piece(t, first); i < t->npiece && t->piece[i].dst <= last; i++)
        if (cut_piece(c, &t->piece[i], err) < 0)
            return -1;
    return 0;
}

static int cut_use(struct ckpt_cutter *c, const struct ckpt_term *to, struct ckpt_err *err)
{
    const struct ckpt_side *from = &c->in->rule->from[to->side];
    const struct ckpt_term *term = &from->pattern.term[to->partner];
    struct dims d;

    if (!dims_of(&c->in->rule->to[c->in->side], 0, c->rank, &d))
        return ckpt_fail(err, CKPT_CONFLICT, "'%s': rank", c->in->target);
    for (uint32_t k = 0; k < c->rank; k++)
        if (line_of(c, &d, k, to, &c->to[k], err) < 0)
            return -1;
    if (!dims_of(from, c->use->spelling, c->use->tensor->rank, &d))
        return rank_error(c->in, c->use, err);
    for (uint32_t k = 0; k < c->use->tensor->rank; k++)
        if (line_of(c, &d, k, term, &c->from[k], err) < 0)
            return -1;
    return cut_term(c, err);
}

/* Add the elements of a term that no source has: zeros. */
static int fill_term(struct ckpt_cutter *c, const struct ckpt_term *to, struct ckpt_err *err)
{
    struct ckpt_piece_draft *p;
    uint64_t numel = 1;
    struct dims d;

    if (!dims_of(&c->in->rule->to[c->in->side], 0, c->rank, &d))
        return ckpt_fail(err, CKPT_CONFLICT, "'%s': rank", c->in->target);
    if (ckpt_vec_add(c->out, &p) < 0)
        return ckpt_nomem(err);
    *p = (struct ckpt_piece_draft){.source = c->in->zeros};
    for (uint32_t k = 0; k < c->rank; k++) {
        struct line *l = &c->to[k];
        if (line_of(c, &d, k, to, l, err) < 0)
            return -1;
        p->dst += l->offset * c->unit[k];
        for (uint32_t i = 0; i < l->k; i++) {
            if (p->naxis == CKPT_MAX_AXES)
                return ckpt_fail(err, CKPT_LIMIT, "'%s' would need more than %d axes",
                                 c->in->target, CKPT_MAX_AXES);
            p->axis[p->naxis++] = (struct ckpt_axis){l->n[i], l->stride[i] * c->unit[k], 0};
            numel *= l->n[i];
        }
        if (l->k == 0 && p->naxis < CKPT_MAX_AXES)
            p->axis[p->naxis++] = (struct ckpt_axis){1, c->unit[k], 0};
    }
    if (numel == 0)
        c->out->len--;
    c->numel += numel;
    c->in->padded += numel;
    return 0;
}

void ckpt_instance_release(struct ckpt_instance *in)
{
    ckpt_vec_release(&in->use);
    free(in->cutter);
    in->cutter = NULL;
}

int ckpt_instance_lower(struct ckpt_instance *in, const uint64_t *dim, uint32_t rank,
                        ckpt_drafts *out, struct ckpt_err *err)
{
    const struct ckpt_pattern *p = &in->rule->to[in->side].pattern;
    uint64_t numel;

    if (!in->cutter && !(in->cutter = malloc(sizeof *in->cutter)))
        return ckpt_nomem(err);
    struct ckpt_cutter *c = in->cutter;
    if (!ckpt_shape_numel(dim, rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "the size of '%s' overflows", in->target);
    c->in = in;
    c->dim = dim;
    c->rank = rank;
    c->out = out;
    c->numel = 0;
    c->composed = false;
    ckpt_shape_strides(dim, rank, c->unit);
    in->padded = 0;
    for (uint32_t k = 0; k < p->nterm && numel > 0; k++) {
        c->use = NULL;
        if (p->term[k].side == UINT16_MAX && fill_term(c, &p->term[k], err) < 0)
            return -1;
        for (size_t i = 0; i < in->use.len; i++) {
            if (in->use.ptr[i].side != p->term[k].side)
                continue;
            c->use = &in->use.ptr[i];
            c->esize = ckpt_dtype_size(c->use->tensor->dtype);
            if (cut_use(c, &p->term[k], err) < 0)
                return -1;
        }
    }
    if (numel > 0 && c->numel != numel)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has %" PRIu64 " elements; its sources give %" PRIu64 " of them",
                         in->target, numel, c->numel);
    if (c->composed || in->pad_to)
        out->len = ckpt_compose_fold(out->ptr, out->len, dim, rank);
    return 0;
}
