/* SPDX-License-Identifier: Apache-2.0 */
/* DTensors (torch/distributed/tensor) and ShardedTensors (torch/distributed/_shard) as they are
 * pickled, and the box that a rank holds of them. */
#include "format/torch/piece.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/map.h"
#include "base/str.h"
#include "container/torch_file.h"

enum { MAX_MESH = 8, MAX_NAME = 4096, MAX_MESH_BYTES = 1 << 24, MAX_DEPTH = 16 };

enum { SPEC_MESH, SPEC_PLACEMENTS, SPEC_META, SPEC_ORDER };
enum { MESH_COORDINATE, MESH_RANK, MESH_TENSOR, MESH_RANKS, MESH_LAYOUT };

struct file {
    struct ckpt_torch_file t;
    uint64_t rank;
    bool nested; /* the checkpoint has several state dicts */
    struct ckpt_rank_pieces *out;
    struct ckpt_map by_name; /* the first piece of each tensor */
};

static void file_release(struct file *f)
{
    ckpt_torch_file_release(&f->t);
    ckpt_map_release(&f->by_name);
}

static int fail_value(const struct file *f, ckpt_pv v, const char *what, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED, "%s is %s", what, ckpt_pv_text(&f->t.p, v).text);
}

/* A sequence of sizes. */
static int read_sizes(const struct file *f, ckpt_pv v, uint64_t *ret, uint32_t cap, uint32_t *ret_n,
                      struct ckpt_err *err)
{
    size_t n = ckpt_pv_len(&f->t.p, v);

    if (!ckpt_pv_is_seq(v) || n > cap)
        return fail_value(f, v, "a shape", err);
    for (size_t i = 0; i < n; i++) {
        int64_t k;
        if (!ckpt_pv_int(ckpt_pv_at(&f->t.p, v, i), &k) || k < 0)
            return fail_value(f, ckpt_pv_at(&f->t.p, v, i), "a size", err);
        ret[i] = (uint64_t)k;
    }
    *ret_n = (uint32_t)n;
    return 0;
}

/* ---- a local tensor ---- */

/* Find the elements of the box. The storage may be longer than needed (padding). */
static int add_local(const struct file *f, ckpt_pv tensor, const struct ckpt_rank_piece *proto,
                     struct ckpt_err *err)
{
    struct ckpt_rank_piece p = *proto;
    struct ckpt_torch_tensor l;

    if (ckpt_torch_file_tensor(&f->t, tensor, &l, err) < 0)
        return -1;
    bool empty = ckpt_box_numel(&p.box) == 0 && l.numel == 0;
    if (!empty && (l.rank != p.box.rank || memcmp(l.dim, p.box.n, l.rank * sizeof *l.dim) != 0))
        return ckpt_fail(err, CKPT_CONFLICT, "the local tensor has shape %s, its place %s",
                         ckpt_shape_text(l.dim, l.rank).text,
                         ckpt_shape_text(p.box.n, p.box.rank).text);
    if (l.dtype != p.dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "the local tensor is %s, the whole %s",
                         ckpt_dtype_name(l.dtype), ckpt_dtype_name(p.dtype));
    p.off = l.off;
    memcpy(p.stride, l.stride, l.rank * sizeof *l.stride);
    return ckpt_vec_push(&f->out->piece, p) < 0 ? ckpt_nomem(err) : 0;
}

static int add_plain(const struct file *f, ckpt_pv v, struct ckpt_rank_piece *p,
                     struct ckpt_err *err)
{
    struct ckpt_torch_layout l;

    if (ckpt_torch_layout_of(&f->t.p, v, &l, err) < 0)
        return -1;
    p->dtype = l.dtype;
    p->rank = l.rank;
    p->box = ckpt_box_whole(l.dim, l.rank);
    memcpy(p->dim, l.dim, l.rank * sizeof *l.dim);
    return add_local(f, v, p, err);
}

/* ---- DTensor ---- */

struct mesh {
    uint32_t naxis;
    uint64_t size[MAX_MESH], at[MAX_MESH];
};

/* Read the sizes of the mesh's axes, from its layout or, in older versions, from its tensor of
 * ranks. */
static int read_mesh_shape(const struct file *f, ckpt_pv mesh, struct mesh *m, struct ckpt_err *err)
{
    ckpt_pv layout = ckpt_pv_slot(&f->t.p, mesh, MESH_LAYOUT), axes, ranks;
    struct ckpt_torch_layout l;

    if (ckpt_pv_is_seq(axes = ckpt_pv_slot(&f->t.p, layout, 0))) {
        m->naxis = (uint32_t)ckpt_pv_len(&f->t.p, axes);
        if (ckpt_pv_len(&f->t.p, axes) > MAX_MESH)
            return ckpt_fail(err, CKPT_LIMIT, "the mesh has %u axes, which is not supported",
                             m->naxis);
        for (uint32_t i = 0; i < m->naxis; i++) {
            uint64_t part[MAX_MESH];
            uint32_t n;
            if (read_sizes(f, ckpt_pv_slot(&f->t.p, ckpt_pv_at(&f->t.p, axes, i), 0), part,
                           MAX_MESH, &n, err) < 0)
                return -1;
            if (!ckpt_shape_numel(part, n, &m->size[i]))
                return ckpt_fail(err, CKPT_FORMAT, "the mesh is larger than any cluster");
        }
        return 0;
    }
    if (ckpt_pv_is_seq(axes = ckpt_pv_slot(&f->t.p, layout, 1)))
        return read_sizes(f, axes, m->size, MAX_MESH, &m->naxis, err);
    ranks = ckpt_pv_slot(&f->t.p, mesh, MESH_TENSOR);
    if (ckpt_pv_kind(ranks) != CKPT_PV_OBJ)
        ranks = ckpt_pv_slot(&f->t.p, mesh, MESH_RANKS);
    if (ckpt_torch_layout_of(&f->t.p, ranks, &l, err) < 0)
        return ckpt_err_in(err, "the mesh");
    if (l.rank > MAX_MESH)
        return ckpt_fail(err, CKPT_LIMIT, "the mesh has %u axes, which is not supported", l.rank);
    m->naxis = l.rank;
    memcpy(m->size, l.dim, l.rank * sizeof *l.dim);
    return 0;
}

/* Element i of a tensor of integers, in row-major order, whose bytes were read. */
static int64_t element_of(const struct ckpt_torch_tensor *t, const unsigned char *bytes, uint64_t i)
{
    int32_t narrow;
    int64_t wide;

    for (uint32_t d = t->rank; d-- > 0; i /= t->dim[d])
        bytes += i % t->dim[d] * t->stride[d];
    if (t->dtype == CKPT_I64) {
        memcpy(&wide, bytes, sizeof wide);
        return wide;
    }
    memcpy(&narrow, bytes, sizeof narrow);
    return narrow;
}

/* Find the coordinates of this rank in the mesh by its number. */
static int find_rank(const struct file *f, ckpt_pv mesh, struct mesh *m, struct ckpt_err *err)
{
    ckpt_pv tensor = ckpt_pv_slot(&f->t.p, mesh, MESH_TENSOR);
    ckpt_cleanup(ckpt_freep) unsigned char *bytes = NULL;
    struct ckpt_torch_tensor t;
    uint64_t at = 0, len, numel;
    int64_t own;

    if (ckpt_pv_kind(tensor) != CKPT_PV_OBJ)
        tensor = ckpt_pv_slot(&f->t.p, mesh, MESH_RANKS);
    if (!ckpt_pv_int(ckpt_pv_slot(&f->t.p, mesh, MESH_RANK), &own))
        own = (int64_t)f->rank;
    if (ckpt_torch_file_tensor(&f->t, tensor, &t, err) < 0)
        return ckpt_err_in(err, "the mesh");
    len = ckpt_dtype_size(t.dtype);
    for (uint32_t d = 0; d < t.rank && t.numel; d++)
        len += (t.dim[d] - 1) * t.stride[d];
    if ((t.dtype != CKPT_I32 && t.dtype != CKPT_I64) || len > MAX_MESH_BYTES || t.numel == 0 ||
        !ckpt_shape_numel(m->size, m->naxis, &numel) || t.numel != numel)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "the mesh is not a tensor of rank numbers");
    if (!(bytes = malloc(len)))
        return ckpt_nomem(err);
    if (ckpt_source_pread(f->t.source, bytes, len, t.off, err) < 0)
        return -1;
    while (at < t.numel && element_of(&t, bytes, at) != own)
        at++;
    if (at == t.numel)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "rank %" PRId64 " is not in the mesh", own);
    for (uint32_t i = m->naxis; i-- > 0; at /= m->size[i])
        m->at[i] = at % m->size[i];
    return 0;
}

static int read_mesh(const struct file *f, ckpt_pv v, struct mesh *m, struct ckpt_err *err)
{
    ckpt_pv at = ckpt_pv_slot(&f->t.p, v, MESH_COORDINATE);
    uint32_t n = 0;

    if (ckpt_pv_rule(&f->t.p, v) != CKPT_TORCH_DEVICE_MESH)
        return fail_value(f, v, "the mesh of a DTensor", err);
    if (read_mesh_shape(f, v, m, err) < 0)
        return -1;
    if (!ckpt_pv_is_seq(at))
        return find_rank(f, v, m, err);
    if (read_sizes(f, at, m->at, MAX_MESH, &n, err) < 0)
        return -1;
    for (uint32_t i = 0; i < m->naxis; i++)
        if (n != m->naxis || m->at[i] >= m->size[i])
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "the mesh does not say where this rank stands in it");
    return 0;
}

/* Replace an interval of a dimension by the i-th of k parts, divided as by torch.chunk. */
static void cut(struct ckpt_box *box, uint64_t d, uint64_t k, uint64_t i)
{
    uint64_t n = box->n[d], c = n / k + (n % k != 0);
    uint64_t lo = c && i > n / c ? n : ckpt_min_u64(i * c, n), hi = ckpt_min_u64(n - lo, c);

    box->lo[d] += lo;
    box->n[d] = hi;
}

struct placement {
    bool sharded, strided;
    uint64_t dim;
    uint64_t factor;
};

static int read_placement(const struct file *f, ckpt_pv v, uint32_t rank, struct placement *ret,
                          struct ckpt_err *err)
{
    const char *name = ckpt_pv_kind(v) == CKPT_PV_OBJ ? ckpt_pv_name(&f->t.p, v) : "";
    int64_t dim, factor;

    *ret = (struct placement){0};
    if (strcmp(name, "Replicate") == 0)
        return 0;
    ret->strided = strcmp(name, "_StridedShard") == 0;
    if ((strcmp(name, "Shard") != 0 && !ret->strided) ||
        !ckpt_pv_int(ckpt_pv_slot(&f->t.p, v, 0), &dim))
        return fail_value(f, v, "a placement", err);
    if (dim < 0)
        dim += rank;
    if (dim < 0 || dim >= (int64_t)rank)
        return ckpt_fail(err, CKPT_FORMAT, "sharded on dimension %" PRId64 " of %u", dim, rank);
    if (ret->strided && (!ckpt_pv_int(ckpt_pv_slot(&f->t.p, v, 1), &factor) || factor < 1))
        return ckpt_fail(err, CKPT_FORMAT, "a strided shard lacks its split factor");
    ret->sharded = true;
    ret->dim = (uint64_t)dim;
    ret->factor = ret->strided ? (uint64_t)factor : 1;
    return 0;
}

/* Check a strided shard, which is divided after the later axes that divide the same dimension. */
static int check_factor(const struct mesh *m, const struct placement *p, uint32_t i,
                        struct ckpt_err *err)
{
    uint64_t later = 1;

    for (uint32_t k = i + 1; k < m->naxis; k++)
        if (p[k].sharded && p[k].dim == p[i].dim)
            later *= m->size[k];
    return later == p[i].factor
               ? 0
               : ckpt_fail(err, CKPT_UNSUPPORTED,
                           "a shard strided by %" PRIu64 ", the later axes cut into %" PRIu64,
                           p[i].factor, later);
}

/* Check that the axes divide a dimension from left to right, as torch records it. */
static int check_order(const struct file *f, ckpt_pv order, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_len(&f->t.p, order); i++) {
        ckpt_pv entry = ckpt_pv_slot(&f->t.p, ckpt_pv_at(&f->t.p, order, i), 0);
        ckpt_pv axes = ckpt_pv_at(&f->t.p, entry, 1);
        int64_t last = -1, axis;
        if (ckpt_pv_len(&f->t.p, entry) != 2 || !ckpt_pv_is_seq(axes))
            return fail_value(f, ckpt_pv_at(&f->t.p, order, i), "a shard order", err);
        for (size_t k = 0; k < ckpt_pv_len(&f->t.p, axes); k++) {
            if (!ckpt_pv_int(ckpt_pv_at(&f->t.p, axes, k), &axis) || axis <= last)
                return ckpt_fail(err, CKPT_UNSUPPORTED,
                                 "a shard order other than from left to right");
            last = axis;
        }
    }
    return 0;
}

static int place(const struct file *f, ckpt_pv spec, struct ckpt_rank_piece *piece,
                 struct ckpt_err *err)
{
    ckpt_pv placements = ckpt_pv_slot(&f->t.p, spec, SPEC_PLACEMENTS);
    struct placement p[MAX_MESH];
    struct mesh m = {0};
    bool strided = false;

    if (ckpt_pv_rule(&f->t.p, spec) != CKPT_TORCH_DTENSOR_SPEC)
        return fail_value(f, spec, "the spec of a DTensor", err);
    if (read_mesh(f, ckpt_pv_slot(&f->t.p, spec, SPEC_MESH), &m, err) < 0)
        return -1;
    if (!ckpt_pv_is_seq(placements) || ckpt_pv_len(&f->t.p, placements) != m.naxis)
        return fail_value(f, placements, "the placements of a DTensor", err);
    for (uint32_t i = 0; i < m.naxis; i++) {
        if (read_placement(f, ckpt_pv_at(&f->t.p, placements, i), piece->rank, &p[i], err) < 0)
            return -1;
        strided |= p[i].strided;
    }
    if (!strided && check_order(f, ckpt_pv_slot(&f->t.p, spec, SPEC_ORDER), err) < 0)
        return -1;
    for (uint32_t i = 0; i < m.naxis; i++)
        if (p[i].sharded && !p[i].strided)
            cut(&piece->box, p[i].dim, m.size[i], m.at[i]);
    for (uint32_t i = m.naxis; i-- > 0;)
        if (p[i].strided) {
            if (check_factor(&m, p, i, err) < 0)
                return -1;
            cut(&piece->box, p[i].dim, m.size[i], m.at[i]);
        }
    return 0;
}

/* ---- ShardedTensor ---- */

static int add_sharded(const struct file *f, ckpt_pv state, struct ckpt_rank_piece *p,
                       struct ckpt_err *err)
{
    ckpt_pv shards = ckpt_pv_at(&f->t.p, state, 0);

    /* a rank without rows: the tensor exists, but its box is empty */
    if (ckpt_pv_len(&f->t.p, shards) == 0) {
        struct ckpt_rank_piece none = *p;
        memset(none.box.n, 0, sizeof none.box.n);
        return p->rank == 0 ? 0 : ckpt_vec_push(&f->out->piece, none) < 0 ? ckpt_nomem(err) : 0;
    }
    for (size_t i = 0; i < ckpt_pv_len(&f->t.p, shards); i++) {
        ckpt_pv shard = ckpt_pv_at(&f->t.p, shards, i), meta = ckpt_pv_slot(&f->t.p, shard, 1);
        uint32_t nlo, n;
        if (ckpt_pv_rule(&f->t.p, shard) != CKPT_TORCH_LOCAL_SHARD ||
            ckpt_pv_rule(&f->t.p, meta) != CKPT_TORCH_SHARD_METADATA)
            return fail_value(f, shard, "a shard", err);
        if (read_sizes(f, ckpt_pv_slot(&f->t.p, meta, 0), p->box.lo, CKPT_MAX_RANK, &nlo, err) <
                0 ||
            read_sizes(f, ckpt_pv_slot(&f->t.p, meta, 1), p->box.n, CKPT_MAX_RANK, &n, err) < 0)
            return -1;
        if (nlo != p->rank || n != p->rank || !ckpt_box_within(&p->box, p->dim, p->rank))
            return ckpt_fail(err, CKPT_FORMAT, "a shard lies outside of the tensor");
        if (add_local(f, ckpt_pv_slot(&f->t.p, shard, 0), p, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- the file ---- */

/* _rebuild_from_type_v2(_rebuild_wrapper_subclass, class, (class, dtype, size, ...), state) */
static int add_wrapped(const struct file *f, ckpt_pv v, struct ckpt_rank_piece *p,
                       struct ckpt_err *err)
{
    ckpt_pv call = ckpt_pv_slot(&f->t.p, v, 0), args = ckpt_pv_at(&f->t.p, call, 2);
    ckpt_pv state = ckpt_pv_at(&f->t.p, call, 3), class = ckpt_pv_at(&f->t.p, call, 1);
    const char *name = ckpt_pv_name(&f->t.p, class);

    if (ckpt_pv_rule(&f->t.p, ckpt_pv_at(&f->t.p, call, 0)) != CKPT_TORCH_WRAPPER)
        return fail_value(f, class, "its class", err);
    if (!ckpt_torch_dtype(&f->t.p, ckpt_pv_at(&f->t.p, args, 1), &p->dtype))
        return fail_value(f, ckpt_pv_at(&f->t.p, args, 1), "its dtype", err);
    if (read_sizes(f, ckpt_pv_at(&f->t.p, args, 2), p->dim, CKPT_MAX_RANK, &p->rank, err) < 0)
        return -1;
    p->box = ckpt_box_whole(p->dim, p->rank);
    if (strcmp(name, "DTensor") == 0) {
        const ckpt_pv members = ckpt_pv_at(&f->t.p, state, 1);
        return place(f, ckpt_pv_get(&f->t.p, members, "_spec"), p, err) < 0
                   ? -1
                   : add_local(f, ckpt_pv_get(&f->t.p, members, "_local_tensor"), p, err);
    }
    if (strcmp(name, "ShardedTensor") == 0)
        return add_sharded(f, state, p, err);
    return fail_value(f, class, "its class", err);
}

/* Is it a tensor of a kind that has no plain storage: sparse, quantized, nested, or without values?
 */
static bool is_special(const struct file *f, ckpt_pv v)
{
    return ckpt_pv_kind(v) == CKPT_PV_OPAQUE &&
           strcmp(ckpt_pv_module(&f->t.p, v), "torch._utils") == 0 &&
           ckpt_has_prefix(ckpt_pv_name(&f->t.p, v), "_rebuild_");
}

/* Is it a DTensor or a ShardedTensor? A plain tensor with attributes is made by the same call. */
static bool is_wrapped(const struct file *f, ckpt_pv v)
{
    const ckpt_pv call = ckpt_pv_slot(&f->t.p, v, 0);

    return ckpt_pv_rule(&f->t.p, v) == CKPT_TORCH_SUBCLASS_V2 &&
           strcmp(ckpt_pv_name(&f->t.p, ckpt_pv_at(&f->t.p, call, 1)), "Tensor") != 0;
}

/* Can there be tensors inside a value that is not a tensor: an object, a list of tensors or dicts?
 */
static bool may_have_tensors(const struct file *f, ckpt_pv v)
{
    if (ckpt_pv_kind(v) == CKPT_PV_OPAQUE)
        return true;
    for (size_t i = 0; ckpt_pv_is_seq(v) && i < ckpt_pv_len(&f->t.p, v); i++) {
        const ckpt_pv e = ckpt_pv_at(&f->t.p, v, i);
        if (ckpt_torch_is_tensor(&f->t.p, e) || ckpt_pv_kind(e) == CKPT_PV_OPAQUE ||
            ckpt_pv_kind(e) == CKPT_PV_DICT)
            return true;
    }
    return false;
}

/* Note the first value that is left out although tensors may be in it. */
static int leave_out(struct file *f, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    if (f->out->other || !may_have_tensors(f, v) || !ckpt_utf8_ok(name))
        return 0;
    return (f->out->other = ckpt_arena_strdup(&f->out->names, name)) ? 0 : ckpt_nomem(err);
}

static bool same_place(const struct ckpt_rank_piece *a, const struct ckpt_rank_piece *b)
{
    const size_t n = a->rank * sizeof *a->dim;

    return a->dtype == b->dtype && a->rank == b->rank && memcmp(a->dim, b->dim, n) == 0 &&
           ckpt_box_eq(&a->box, &b->box) &&
           (ckpt_box_numel(&a->box) == 0 ||
            (a->off == b->off && memcmp(a->stride, b->stride, n) == 0));
}

/* The pieces of a tensor, from number `first` on, were added. CONFLICT if the file has another
 * tensor of that name: {"a": {"b": x}, "a.b": y}. If it is the same one, the new pieces are
 * removed. */
static int check_name(struct file *f, size_t first, struct ckpt_err *err)
{
    const struct ckpt_rank_piece *p = f->out->piece.ptr;
    const size_t n = f->out->piece.len - first;
    const uint32_t old =
        n ? ckpt_map_add(&f->by_name, p[first].name, (uint32_t)first) : (uint32_t)first;

    if (old == CKPT_NONE)
        return ckpt_nomem(err);
    if (old == first)
        return 0;
    for (size_t i = 0; i < n; i++)
        if (old + i >= first || p[old + i].name != p[old].name ||
            !same_place(&p[old + i], &p[first + i]))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "two different tensors of the file have this name, as 'a.b' and the "
                             "'b' in a dict 'a' would: save the state dict of one model");
    f->out->piece.len = first;
    return 0;
}

static int add_entry(struct file *f, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    const size_t first = f->out->piece.len;
    struct ckpt_rank_piece p = {0};

    while (ckpt_pv_kind(v) == CKPT_PV_OBJ &&
           (ckpt_pv_rule(&f->t.p, v) == CKPT_TORCH_PARAMETER ||
            ckpt_pv_rule(&f->t.p, v) == CKPT_TORCH_PARAMETER_STATE))
        v = ckpt_pv_at(&f->t.p, ckpt_pv_slot(&f->t.p, v, 0), 0);
    if (ckpt_torch_is_data(&f->t.p, v) && !is_special(f, v)) /* a number, such as a step */
        return leave_out(f, name, v, err);
    if (!(p.name = ckpt_arena_strdup(&f->out->names, name)))
        return ckpt_nomem(err);
    if ((is_wrapped(f, v) ? add_wrapped(f, v, &p, err) : add_plain(f, v, &p, err)) < 0)
        return -1;
    return check_name(f, first, err);
}

/* Does the key belong to an optimizer's state or a step counter, which is not part of the model? */
static bool is_state(const char *key)
{
    return ckpt_has_prefix(key, "optim") || ckpt_has_prefix(key, "lr_sched") ||
           ckpt_has_prefix(key, "sched") || ckpt_has_prefix(key, "rng");
}

/* Add the entries of several state dicts; other values beside them are ignored. */
static int add_entries(struct file *f, ckpt_pv dict, const char *prefix, int depth,
                       struct ckpt_err *err)
{
    if (depth > MAX_DEPTH)
        return ckpt_fail(err, CKPT_LIMIT, "'%s': state dicts nest deeper than %d", prefix,
                         MAX_DEPTH);
    for (size_t i = 0; i < ckpt_pv_npair(&f->t.p, dict); i++) {
        const char *key = ckpt_pv_str(&f->t.p, ckpt_pv_key(&f->t.p, dict, i));
        ckpt_pv v = ckpt_pv_value(&f->t.p, dict, i);
        const bool other = ckpt_pv_kind(v) != CKPT_PV_DICT && !ckpt_torch_is_tensor(&f->t.p, v);
        if (f->nested && depth == 0 && (!key || is_state(key) || other)) {
            if (key && !f->out->states && ckpt_has_prefix(key, "optim") && ckpt_utf8_ok(key) &&
                !(f->out->states = ckpt_arena_strdup(&f->out->names, key)))
                return ckpt_nomem(err);
            if (key && !is_state(key) && leave_out(f, key, v, err) < 0)
                return -1;
            continue;
        }
        if (!key || strlen(prefix) + strlen(key) > MAX_NAME || !ckpt_utf8_ok(key))
            return ckpt_fail(err, CKPT_FORMAT,
                             "a key of the state dict%s%s%s is not a valid name of a tensor%s",
                             *prefix ? " '" : "", prefix, *prefix ? "'" : "",
                             key ? "" : ": it is no text, as in an optimizer's states");
        ckpt_cleanup(ckpt_freep) char *name =
            ckpt_asprintf("%s%s%s", prefix, *prefix ? "." : "", key);
        if (!name)
            return ckpt_nomem(err);
        if (ckpt_pv_kind(v) == CKPT_PV_DICT) {
            if (add_entries(f, v, name, depth + 1, err) < 0)
                return -1;
        } else if (ckpt_foreign_tensor(name, err) < 0) {
            return -1;
        } else if (add_entry(f, name, v, err) < 0) {
            return ckpt_err_in(err, "tensor '%s'", name);
        }
    }
    return 0;
}

int ckpt_rank_pieces_read(struct ckpt_source *s, uint64_t rank, struct ckpt_rank_pieces *ret,
                          struct ckpt_err *err)
{
    ckpt_cleanup(file_release) struct file f = {.rank = rank, .out = ret};

    if (ckpt_torch_file_read(s, &f.t, err) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_pv_npair(&f.t.p, f.t.p.root); i++)
        f.nested |= ckpt_pv_kind(ckpt_pv_value(&f.t.p, f.t.p.root, i)) == CKPT_PV_DICT;
    return ckpt_pv_kind(f.t.p.root) == CKPT_PV_DICT
               ? add_entries(&f, f.t.p.root, "", 0, err)
               : fail_value(&f, f.t.p.root, "what was saved", err);
}

void ckpt_rank_pieces_release(struct ckpt_rank_pieces *p)
{
    ckpt_arena_release(&p->names);
    ckpt_vec_release(&p->piece);
}
