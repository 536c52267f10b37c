/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing the copies of tensors in ranks' files. */
#include "format/torch/piece.h"

#include <string.h>

#include "base/ckd.h"
#include "base/par.h"
#include "base/str.h"
#include "format/pieces.h"

/* The places that are compared in all copies of a step. Each is read from two files. */
enum { ALL_PLACES = 4096 };

struct check {
    struct ckpt_rank_copy *copy;
    size_t step;     /* each step-th copy is compared */
    uint64_t nplace; /* in each of them */
};

/* ---- one copy ---- */

/* The number of elements that lie one behind the other in both pieces, in each row of the box. */
static uint64_t row_of(const struct ckpt_rank_piece *a, const struct ckpt_rank_piece *b)
{
    const uint64_t esize = ckpt_dtype_size(a->dtype);
    uint64_t row = 1;

    for (uint32_t d = a->rank; d-- > 0;) {
        if (a->box.n[d] == 1)
            continue;
        if (a->stride[d] != row * esize || b->stride[d] != row * esize)
            break;
        row *= a->box.n[d];
    }
    return row;
}

/* Where an element of the box lies in the source. */
static uint64_t offset_of(const struct ckpt_rank_piece *p, uint64_t element)
{
    uint64_t off = p->off;

    for (uint32_t d = p->rank; d-- > 0; element /= p->box.n[d])
        off += element % p->box.n[d] * p->stride[d];
    return off;
}

/* Compare up to n elements from number `at` on, which lie in one row. */
static int compare_place(struct ckpt_rank_copy *c, uint64_t at, uint64_t n, struct ckpt_err *err)
{
    const struct ckpt_rank_piece *p = c->first.piece, *q = c->other.piece;
    const struct ckpt_spot a = {c->first.source, p->dtype, offset_of(p, at)};
    const struct ckpt_spot b = {c->other.source, q->dtype, offset_of(q, at)};
    size_t same;

    if (ckpt_spot_compare(&a, &b, (size_t)n, &same, err) < 0)
        return -1;
    c->differs = same < n;
    c->element = at + same;
    return 0;
}

/* The first element of the i-th of n places, of which the last begins at `last`. */
static uint64_t place_at(uint64_t i, uint64_t n, uint64_t last)
{
    return n == 1 ? last / 2 : i + 1 == n ? last : last / (n - 1) * i;
}

static int compare_copy(void *ctx, size_t i, struct ckpt_err *err)
{
    const struct check *k = ctx;
    struct ckpt_rank_copy *c = &k->copy[i * k->step];
    const struct ckpt_rank_piece *p = c->first.piece;
    const uint64_t numel = ckpt_box_numel(&p->box), row = row_of(p, c->other.piece);
    const uint64_t most = ckpt_min_u64(row, CKPT_SPOT_BYTES / ckpt_dtype_size(p->dtype));
    const bool sampled = numel / row > k->nplace / (row / most + (row % most != 0));

    if (sampled && c->part) { /* no sample proves that they are equal, which no framework writes */
        c->differs = true;
        c->element = numel;
        return 0;
    }
    for (uint64_t place = 0, at = 0; at < numel && place < k->nplace && !c->differs; place++) {
        if (sampled)
            at = place_at(place, k->nplace, numel - most);
        const uint64_t n = ckpt_min_u64(most, row - at % row);
        if (compare_place(c, at, n, err) < 0)
            return -1;
        at += n;
    }
    return 0;
}

/* ---- all copies ---- */

/* Is it a value of which each rank has its own: a running mean, a counter, a state of a generator
 * of random numbers? */
static bool may_drift(const struct ckpt_rank_piece *p)
{
    const char *dot = strrchr(p->name, '.'), *key = dot ? dot + 1 : p->name;
    const bool whole = !ckpt_dtype_is_float(p->dtype) && p->dtype != CKPT_C64;

    return (whole && p->rank <= 1) || ckpt_has_prefix(key, "running_") ||
           ckpt_has_prefix(key, "rng") || strcmp(key, "step") == 0;
}

/* "element [0, 3]", of the whole tensor; "" if it is not known. */
static char *element_text(const struct ckpt_rank_copy *c)
{
    const struct ckpt_box *box = &c->first.piece->box;
    uint64_t at[CKPT_MAX_RANK], element = c->element;

    if (element >= ckpt_box_numel(box))
        return strdup("");
    for (uint32_t d = box->rank; d-- > 0; element /= box->n[d])
        at[d] = box->lo[d] + element % box->n[d];
    return ckpt_asprintf(" (element %s)", ckpt_shape_text(at, box->rank).text);
}

static int fail_copy(const struct ckpt_rank_copy *c, const char *dir, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *element = element_text(c);

    if (!element)
        return ckpt_nomem(err);
    if (c->part)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s': tensor '%s' is in '%s' and another one is in '%s'%s, but parts of "
                         "one model have no tensor in common: remove the part of another save, or "
                         "take the first with -o allow_mixed",
                         dir, c->first.piece->name, c->first.name, c->other.name, element);
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s': tensor '%s' in '%s' is not the one in '%s'%s: the files are of two "
                     "saves, or hold slices and do not say so; open the files of one save, or "
                     "take the lowest rank's with -o allow_mixed",
                     dir, c->first.piece->name, c->first.name, c->other.name, element);
}

/* Find the first copy that differs and must not. Of those that may differ, *ret_drifted is the
 * first and *ret_n the number. */
static const struct ckpt_rank_copy *first_conflict(const struct ckpt_rank_copy *copy, size_t n,
                                                   const struct ckpt_rank_copy **ret_drifted,
                                                   size_t *ret_n)
{
    const struct ckpt_rank_copy *bad = NULL;

    *ret_drifted = NULL;
    *ret_n = 0;
    for (size_t i = 0; i < n; i++) {
        if (!copy[i].differs)
            continue;
        const bool drifts = !copy[i].part && may_drift(copy[i].first.piece);
        if (!drifts && !bad)
            bad = &copy[i];
        if (drifts && (*ret_n)++ == 0)
            *ret_drifted = &copy[i];
    }
    return bad;
}

int ckpt_rank_copies_check(struct ckpt_rank_copy *copy, size_t n,
                           const struct ckpt_reader_options *opt, const char *dir,
                           struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_rank_copy *bad, *drifted;
    struct check k = {.copy = copy, .step = n / ALL_PLACES + 1};
    struct ckpt_err mixed = {0};
    const size_t compared = n / k.step + (n % k.step != 0);
    size_t ndrifted;

    k.nplace = compared ? ALL_PLACES / compared : 0;
    if (ckpt_parallel(compared, 0, compare_copy, &k, err) < 0)
        return ckpt_err_in(err, "'%s'", dir);
    if ((bad = first_conflict(copy, n, &drifted, &ndrifted))) {
        (void)fail_copy(bad, dir, &mixed);
        if (!opt->allow_mixed || mixed.code != CKPT_CONFLICT)
            return ckpt_err_move(err, &mixed);
        ckpt_catalog_warn(cat, "%s", mixed.text);
    }
    if (!drifted)
        return 0;
    ckpt_cleanup(ckpt_freep) char *more =
        ndrifted > 1 ? ckpt_asprintf(", and %zu more,", ndrifted - 1) : NULL;
    ckpt_catalog_warn(cat,
                      "'%s' in '%s'%s is not the one in '%s': of buffers and counters, of which "
                      "each rank has its own, the lowest rank's are shown",
                      drifted->first.piece->name, drifted->other.name, more ? more : "",
                      drifted->first.name);
    return 0;
}
