/* SPDX-License-Identifier: Apache-2.0 */
/* Joining the ranks' parts to whole tensors. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

struct join {
    const struct ckpt_ds_zero *rank0;
    const struct ckpt_ds_parts *parts;
    uint64_t n;
    struct ckpt_ds_rules rules;
    /* The tensor that is being joined. */
    const char *name, *param;
    size_t *at; /* its index in each rank's parts */
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    struct ckpt_pieces pieces;
};

static void join_release(struct join *j)
{
    ckpt_ds_rules_release(&j->rules);
    ckpt_pieces_release(&j->pieces);
    free(j->at);
}

static const struct ckpt_ds_part *part_of(const struct join *j, uint64_t t)
{
    return &j->parts[t].part.ptr[j->at[t]];
}

static int fail_shapes(const struct join *j, const char *what, struct ckpt_err *err)
{
    const struct ckpt_ds_part *first = part_of(j, 0), *last = part_of(j, j->n - 1);

    return ckpt_fail(err, CKPT_CONFLICT, "'%s' is %s on the first rank and %s on the last: %s",
                     j->name, ckpt_shape_text(first->dim, first->rank).text,
                     ckpt_shape_text(last->dim, last->rank).text, what);
}

/* Map a box of rank t's part to this box of the whole tensor. */
static int move(struct join *j, uint64_t t, const uint64_t *from, const struct ckpt_box *to,
                struct ckpt_err *err)
{
    struct ckpt_box_pair pair = {*to, *to};

    memcpy(pair.local.lo, from, to->rank * sizeof *from);
    return ckpt_box_numel(to) == 0
               ? 0
               : ckpt_ds_parts_place(&j->parts[t], j->at[t], &pair, j->dim, &j->pieces, err);
}

/* Take a tensor that is the same on all ranks from the first rank. */
static int replicate(struct join *j, struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = part_of(j, 0);
    static const uint64_t origin[CKPT_MAX_RANK];
    const struct ckpt_box box = ckpt_box_whole(part->dim, part->rank);

    for (uint64_t t = 1; t < j->n; t++)
        if (part_of(j, t)->rank != part->rank ||
            memcmp(part_of(j, t)->dim, part->dim, part->rank * sizeof *part->dim) != 0)
            return fail_shapes(j, "the rules say that it is the same on all ranks", err);
    memcpy(j->dim, part->dim, sizeof j->dim);
    if (part->strided)
        return ckpt_ds_parts_place(&j->parts[0], j->at[0], NULL, j->dim, &j->pieces, err);
    return move(j, 0, origin, &box, err);
}

/* Check that the parts have equal sizes except in dimension d, and add those up for the whole
 * tensor. */
static int sum_dim(struct join *j, uint32_t d, struct ckpt_err *err)
{
    const struct ckpt_ds_part *first = part_of(j, 0);

    if (d >= first->rank)
        return fail_shapes(j, "it has no dimension along which the ranks' parts could be joined",
                           err);
    memcpy(j->dim, first->dim, sizeof j->dim);
    j->dim[d] = 0;
    for (uint64_t t = 0; t < j->n; t++) {
        const struct ckpt_ds_part *part = part_of(j, t);
        for (uint32_t k = 0; k < first->rank; k++)
            if (part->rank != first->rank || (k != d && part->dim[k] != first->dim[k]))
                return fail_shapes(j, "they differ in more than one dimension", err);
        if (ckd_add(&j->dim[d], j->dim[d], part->dim[d]))
            return fail_shapes(j, "together they are larger than any file", err);
    }
    return 0;
}

/* Concatenate the parts along d, up to `end`. */
static int concatenate(struct join *j, uint32_t d, const uint64_t *end, struct ckpt_err *err)
{
    static const uint64_t origin[CKPT_MAX_RANK];
    uint64_t lo = 0;

    if (sum_dim(j, d, err) < 0)
        return -1;
    if (end && *end > j->dim[d])
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' has %" PRIu64 " rows, original_vocab_size says %" PRIu64, j->name,
                         j->dim[d], *end);
    if (end)
        j->dim[d] = *end;
    for (uint64_t t = 0; t < j->n; lo += part_of(j, t)->dim[d], t++) {
        struct ckpt_box box = ckpt_box_whole(part_of(j, t)->dim, part_of(j, t)->rank);
        box.lo[d] = lo;
        box.n[d] = lo >= j->dim[d] ? 0 : ckpt_min_u64(box.n[d], j->dim[d] - lo);
        if (move(j, t, origin, &box, err) < 0)
            return -1;
    }
    return 0;
}

/* Join parts of which each has two matrices, one above the other. */
static int join_halves(struct join *j, struct ckpt_err *err)
{
    uint64_t lo = 0;

    if (sum_dim(j, 0, err) < 0)
        return -1;
    for (uint64_t t = 0; t < j->n; t++) {
        const uint64_t half = part_of(j, t)->dim[0] / 2;
        if (part_of(j, t)->dim[0] % 2)
            return fail_shapes(j, "the rules say that it is two parts of equal size", err);
        for (uint64_t k = 0; k < 2; k++) {
            uint64_t from[CKPT_MAX_RANK] = {k * half};
            struct ckpt_box box = ckpt_box_whole(part_of(j, t)->dim, part_of(j, t)->rank);
            box.n[0] = half;
            box.lo[0] = lo + k * (j->dim[0] / 2);
            if (move(j, t, from, &box, err) < 0)
                return -1;
        }
        lo += half;
    }
    return 0;
}

/* ---- affine maps ---- */

/* Read a list or tuple of non-negative integers. */
static int read_numbers(const struct join *j, ckpt_pv v, uint64_t *ret, uint32_t *ret_n,
                        struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    const size_t n = ckpt_pv_len(p, v);

    if (!ckpt_pv_is_seq(v) || n > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_FORMAT, "affine_map of '%s': not a list of at most %d numbers",
                         j->param, CKPT_MAX_RANK);
    for (size_t i = 0; i < n; i++) {
        int64_t number;
        if (!ckpt_pv_int(ckpt_pv_at(p, v, i), &number) || number < 0)
            return ckpt_fail(err, CKPT_FORMAT, "affine_map of '%s': a number is expected",
                             j->param);
        ret[i] = (uint64_t)number;
    }
    *ret_n = (uint32_t)n;
    return 0;
}

/* Read [offset, strides] of a box, whose shape is known, of a tensor with these dimensions, and
 * compute where it begins. */
static int read_place(const struct join *j, ckpt_pv v, const uint64_t *dim, struct ckpt_box *box,
                      struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    uint64_t stride[CKPT_MAX_RANK], dense[CKPT_MAX_RANK];
    uint32_t nstride;
    int64_t off;

    if (!ckpt_pv_int(ckpt_pv_at(p, v, 0), &off) || off < 0)
        return ckpt_fail(err, CKPT_FORMAT, "affine_map of '%s': a piece has no position", j->param);
    if (read_numbers(j, ckpt_pv_at(p, v, 1), stride, &nstride, err) < 0)
        return -1;
    ckpt_shape_strides(dim, box->rank, dense);
    uint64_t rest = (uint64_t)off;
    for (uint32_t d = 0; d < box->rank; d++) {
        if (nstride != box->rank || (box->n[d] > 1 && stride[d] != dense[d]))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "affine_map of '%s': a piece that is not a box of the tensor",
                             j->param);
        box->lo[d] = dense[d] ? rest / dense[d] : 0;
        rest -= box->lo[d] * dense[d];
        if (box->n[d] > dim[d] || box->lo[d] > dim[d] - box->n[d])
            return ckpt_fail(err, CKPT_FORMAT, "affine_map of '%s': a piece outside of the tensor",
                             j->param);
    }
    return 0;
}

/* Is rank t the first one that has this piece? Only the first one's is used. */
static bool is_first(const struct join *j, ckpt_pv piece, uint64_t t)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    const ckpt_pv list = ckpt_pv_get(p, piece, "locations");
    int64_t first = (int64_t)t, rank;

    for (size_t i = 0; i < ckpt_pv_len(p, list); i++)
        if (ckpt_pv_int(ckpt_pv_at(p, list, i), &rank) && rank < first)
            first = rank;
    return first == (int64_t)t;
}

static int is_unscaled(const struct join *j, ckpt_pv piece, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    const ckpt_pv scale = ckpt_pv_get(p, piece, "scale");
    int64_t one;

    if (ckpt_pv_kind(scale) == CKPT_PV_ABSENT || (ckpt_pv_int(scale, &one) && one == 1) ||
        (ckpt_pv_kind(scale) == CKPT_PV_FLOAT && p->floats.ptr[ckpt_pv_id(scale)] == 1.0))
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "affine_map of '%s': scaled pieces are not supported",
                     j->param);
}

static int add_piece(struct join *j, uint64_t t, ckpt_pv piece, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    const struct ckpt_ds_part *part = part_of(j, t);
    struct ckpt_box box = {0}, own;

    if (!is_first(j, piece, t))
        return 0;
    if (is_unscaled(j, piece, err) < 0 ||
        read_numbers(j, ckpt_pv_get(p, piece, "shape"), box.n, &box.rank, err) < 0)
        return -1;
    if (box.rank != j->rank || part->rank != j->rank)
        return ckpt_fail(
            err, CKPT_UNSUPPORTED,
            "affine_map of '%s': a piece and the tensor differ in their number of dimensions",
            j->param);
    own = box;
    if (read_place(j, ckpt_pv_get(p, piece, "source"), j->dim, &box, err) < 0 ||
        read_place(j, ckpt_pv_get(p, piece, "dest"), part->dim, &own, err) < 0)
        return -1;
    return move(j, t, own.lo, &box, err);
}

/* The entry of rank t, whose key is a number or a string with it. */
static ckpt_pv entry_of(const struct join *j, ckpt_pv ranks, uint64_t t)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    unsigned long long number;
    int64_t key;

    for (size_t i = 0; i < ckpt_pv_npair(p, ranks); i++) {
        const char *text = ckpt_pv_str(p, ckpt_pv_key(p, ranks, i));
        if ((ckpt_pv_int(ckpt_pv_key(p, ranks, i), &key) && key == (int64_t)t) ||
            (text && ckpt_parse_u64(text, strlen(text), &number) && number == t))
            return ckpt_pv_value(p, ranks, i);
    }
    return 0;
}

static int add_rank(struct join *j, uint64_t t, ckpt_pv ranks, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    const struct ckpt_ds_part *part = part_of(j, t);
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;

    const ckpt_pv own = entry_of(j, ranks, t), pieces = ckpt_pv_get(p, own, "pieces");
    if (ckpt_pv_kind(own) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_MISSING, "affine_map of '%s' has no rank %" PRIu64, j->param, t);
    if (read_numbers(j, ckpt_pv_get(p, own, "shard_shape"), dim, &rank, err) < 0)
        return -1;
    if (rank != part->rank || memcmp(dim, part->dim, rank * sizeof *dim) != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "affine_map of '%s': the part of rank %" PRIu64
                         " has another shape than it says",
                         j->param, t);
    for (size_t i = 0; i < ckpt_pv_len(p, pieces); i++)
        if (add_piece(j, t, ckpt_pv_at(p, pieces, i), err) < 0)
            return -1;
    return 0;
}

static int join_affine(struct join *j, ckpt_pv map, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &j->rank0->model.p;
    uint64_t numel;

    if (read_numbers(j, ckpt_pv_get(p, map, "logical_shape"), j->dim, &j->rank, err) < 0)
        return -1;
    if (!ckpt_shape_numel(j->dim, j->rank, &numel) || numel > INT64_MAX / 8)
        return ckpt_fail(err, CKPT_FORMAT, "affine_map of '%s': larger than any file", j->param);
    for (uint64_t t = 0; t < j->n; t++)
        if (add_rank(j, t, ckpt_pv_get(p, map, "ranks"), err) < 0)
            return -1;
    return 0;
}

/* ---- one tensor ---- */

static int join_by(struct join *j, const struct ckpt_ds_rule *rule, struct ckpt_err *err)
{
    switch (rule->join) {
    case CKPT_DS_AFFINE:
        return join_affine(j, rule->map, err);
    case CKPT_DS_REPLICATED:
        return replicate(j, err);
    case CKPT_DS_CAT_1:
        return concatenate(j, 1, NULL, err);
    case CKPT_DS_VOCABULARY:
        return concatenate(j, 0, j->rules.has_vocabulary ? &j->rules.vocabulary : NULL, err);
    case CKPT_DS_HALVES:
        return join_halves(j, err);
    case CKPT_DS_CAT_0:
        return ckpt_ds_is_buffer(&j->rank0->model, j->param) ? replicate(j, err)
                                                             : concatenate(j, 0, NULL, err);
    default:
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is to be averaged over the ranks, or is fused of several "
                         "parameters (parameter_with_sub_params): not supported",
                         j->param);
    }
}

/* Find the parts of a tensor; all ranks must have it, with one dtype. */
static int find_parts(struct join *j, size_t i, struct ckpt_err *err)
{
    j->at[0] = i;
    j->name = j->parts[0].part.ptr[i].name;
    j->param = j->parts[0].part.ptr[i].param;
    for (uint64_t t = 1; t < j->n; t++) {
        const uint32_t at = ckpt_ds_parts_find(&j->parts[t], j->name);
        if (at == CKPT_NONE)
            return ckpt_fail(err, CKPT_CONFLICT, "tensor-parallel rank %" PRIu64 " has no '%s'", t,
                             j->name);
        j->at[t] = at;
        if (part_of(j, t)->dtype != part_of(j, 0)->dtype)
            return ckpt_fail(err, CKPT_CONFLICT, "'%s' has different dtypes on different ranks",
                             j->name);
    }
    return 0;
}

/* Find the rule of a tensor. The patterns are of the parameters; a tied one is its owner. */
static int find_rule(struct join *j, struct ckpt_ds_rule *ret, struct ckpt_err *err)
{
    const char *owner = ckpt_ds_owner(&j->rank0->model, j->param);

    if (ckpt_ds_rules_find(&j->rules, j->param, ret, err) < 0)
        return -1;
    if (ret->regex || !owner)
        return 0;
    j->param = owner;
    return ckpt_ds_rules_find(&j->rules, owner, ret, err);
}

static int join_tensor(struct join *j, size_t i, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    struct ckpt_ds_rule rule;
    size_t bad;
    if (find_parts(j, i, err) < 0 || find_rule(j, &rule, err) < 0)
        return -1;
    const struct ckpt_ds_part *part = part_of(j, 0);
    j->rank = part->rank;
    j->pieces.draft.len = j->pieces.box.len = 0;
    if (join_by(j, &rule, err) < 0)
        return -1;
    if (!part->strided &&
        ckpt_boxes_cover(j->dim, j->rank, j->pieces.box.ptr, j->pieces.box.len, &bad, err) < 0)
        return ckpt_err_in(err, "'%s' of %" PRIu64 " tensor-parallel ranks", j->name, j->n);
    if (ckpt_pieces_catalog(&j->pieces, cat, j->name, part->dtype, j->dim, j->rank, err) < 0)
        return -1;
    cat->tensors.ptr[cat->tensors.len - 1].wanted = part->wanted;
    return 0;
}

int ckpt_ds_tp_join(const struct ckpt_ds_zero *rank0, const struct ckpt_ds_parts *parts, uint64_t n,
                    struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(join_release) struct join j = {.rank0 = rank0, .parts = parts, .n = n};

    if (!(j.at = calloc(n, sizeof *j.at)))
        return ckpt_nomem(err);
    if (ckpt_ds_rules_read(&rank0->model, &j.rules, err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(rank0->job->dir), rank0->model_name);
    for (size_t i = 0; i < parts[0].part.len; i++)
        if (join_tensor(&j, i, cat, err) < 0)
            return ckpt_err_in(err, "'%s'", ckpt_dir_path(rank0->job->dir));
    return 0;
}
