/* SPDX-License-Identifier: Apache-2.0 */
/* Megatron's legacy format: a directory a rank, mp_rank_TT[_PPP][_EEE], each with the local part of
 * every tensor.
 *
 *     names of directories -> pickles, in parallel -> global numbers of layers and experts
 *     -> for each name its parts by tensor rank
 *
 * Pipeline and expert ranks become numbers in names. What a tensor rank holds only a recipe can
 * say: such tensors are ranked (tensor/catalog.h). Of copies that the other ranks hold the first
 * serves. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "base/take.h"
#include "format/megatron/load.h"
#include "format/pieces.h"

enum { MAX_STAGES = 1024 };

/* A tensor in one rank's file. */
struct part {
    const struct ckpt_megatron_rank *rank; /* NULL: not seen yet */
    uint32_t stage;                        /* virtual pipeline stage */
    struct ckpt_torch_tensor at;
};

struct ranked {
    const char *name;
    CKPT_VEC(struct part) parts; /* one per tensor-parallel rank */
};

struct load {
    struct ckpt_megatron_mesh mesh;
    uint64_t nlocal; /* number of experts in a file; 0: there are none */
    uint32_t nvirtual;
    uint64_t *layers; /* first global layer of [virtual stage][stage] */
    CKPT_VEC(struct ranked) tensors;
    struct ckpt_map by_name;
    struct ckpt_arena names;
    const struct ckpt_megatron_rank *rank; /* whose state dict is visited, and its stage */
    uint32_t stage;
    struct ckpt_str name; /* scratch */
    struct ckpt_catalog *cat;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->tensors.len; i++)
        ckpt_vec_release(&l->tensors.ptr[i].parts);
    ckpt_megatron_mesh_release(&l->mesh);
    ckpt_vec_release(&l->tensors);
    ckpt_map_release(&l->by_name);
    ckpt_arena_release(&l->names);
    ckpt_str_release(&l->name);
    free(l->layers);
}

/* ---- state dicts ---- */

/* Call fn for all values of a rank's state dict of a stage. */
static int visit_rank(struct load *l, const struct ckpt_megatron_rank *r, uint32_t stage,
                      ckpt_pickle_value_fn *fn, struct ckpt_err *err)
{
    ckpt_pv model = ckpt_megatron_rank_model(r, stage, l->nvirtual > 1);

    l->rank = r;
    l->stage = stage;
    if (ckpt_pv_kind(model) != CKPT_PV_DICT && l->nvirtual == 1 &&
        ckpt_has_suffix(r->path, ".ckpt"))
        model = r->file.p.root;
    if (ckpt_pv_kind(model) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no state dict of virtual stage %u",
                         ckpt_dir_path(l->mesh.dir), r->path, stage);
    return ckpt_pickle_each(&r->file.p, model, false, r->path, fn, l, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->mesh.dir), r->path)
               : 0;
}

/* ---- numbers ---- */

static uint64_t at_least(uint64_t n, uint64_t rank) { return rank >= n ? rank + 1 : n; }

static uint64_t *stage_of(struct load *l, uint32_t stage, uint64_t pp)
{
    return &l->layers[stage * l->mesh.npp + pp];
}

/* Count the layers of a stage and the experts of a file, by the largest numbers in the names. */
static int count_numbers(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    struct load *l = ctx;
    static const char mark[] = ".experts.experts.";
    static const struct ckpt_megatron_place whole = {0};
    uint64_t layer, expert, *n = stage_of(l, l->stage, l->rank->pp);

    (void)v;
    if (!ckpt_megatron_name(name, &whole, &l->name))
        return 0;
    if (l->name.failed)
        return ckpt_nomem(err);
    const char *own = ckpt_str_get(&l->name), *s = strstr(own, mark);
    if (l->mesh.nep > 1 && s && ckpt_take_text(&s, mark) && ckpt_take_u64(&s, &expert))
        l->nlocal = at_least(l->nlocal, expert);
    if (!ckpt_megatron_layer(own, &layer))
        return 0;
    if (layer >= UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "'%s': layer %" PRIu64, name, layer);
    *n = at_least(*n, layer);
    return 0;
}

static int number_layers(struct load *l, struct ckpt_err *err)
{
    const struct ckpt_megatron_rank *first = &l->mesh.ranks.ptr[0];
    uint64_t next = 0;

    l->nvirtual = 1;
    if (ckpt_pv_kind(ckpt_megatron_rank_model(first, 0, true)) == CKPT_PV_DICT)
        while (l->nvirtual < MAX_STAGES &&
               ckpt_pv_kind(ckpt_megatron_rank_model(first, l->nvirtual, true)) == CKPT_PV_DICT)
            l->nvirtual++;
    if (!(l->layers = calloc((size_t)(l->nvirtual * l->mesh.npp), sizeof *l->layers)))
        return ckpt_nomem(err);
    for (uint64_t p = 0; p < l->mesh.npp; p++) {
        const struct ckpt_megatron_rank *r = l->mesh.ranks.ptr;
        while (r->pp != p)
            r++;
        for (uint32_t v = 0; v < l->nvirtual; v++)
            if (visit_rank(l, r, v, count_numbers, err) < 0)
                return -1;
    }
    for (uint32_t v = 0; v < l->nvirtual; v++)
        for (uint64_t p = 0; p < l->mesh.npp; p++) {
            uint64_t n = *stage_of(l, v, p);
            *stage_of(l, v, p) = next;
            next += n;
        }
    const uint64_t experts = ckpt_megatron_state_size(l->mesh.st, "num_experts");
    if (experts && experts % l->mesh.nep == 0)
        l->nlocal = experts / l->mesh.nep;
    return 0;
}

/* ---- tensors ---- */

static bool is_expert(const char *name) { return strstr(name, ".mlp.experts.") != NULL; }

static int find_ranked(struct load *l, const char *name, struct ranked **ret, struct ckpt_err *err)
{
    uint32_t at = ckpt_map_find(&l->by_name, name);

    if (at == CKPT_NONE) {
        char *own = ckpt_arena_strdup(&l->names, name);
        if (!own || ckpt_vec_add(&l->tensors, ret) < 0 ||
            (at = ckpt_map_add(&l->by_name, own, (uint32_t)l->tensors.len - 1)) == CKPT_NONE)
            return ckpt_nomem(err);
        (*ret)->name = own;
    }
    *ret = &l->tensors.ptr[at];
    return 0;
}

static bool same_place(const struct ckpt_torch_tensor *a, const struct ckpt_torch_tensor *b)
{
    const size_t n = a->rank * sizeof *a->dim;

    return a->dtype == b->dtype && a->rank == b->rank && memcmp(a->dim, b->dim, n) == 0 &&
           (a->numel == 0 || (a->off == b->off && memcmp(a->stride, b->stride, n) == 0));
}

/* Add a rank's part of a tensor. Of the copies in the files of several ranks, and in several
 * virtual stages, only the first counts. */
static int add_part(struct load *l, const char *name, const struct ckpt_torch_tensor *tensor,
                    struct ckpt_err *err)
{
    const struct ckpt_megatron_rank *r = l->rank;
    const uint64_t at = is_expert(name) ? r->tp % l->mesh.netp : r->tp;
    struct ranked *t = NULL;
    struct part *p;

    if (find_ranked(l, name, &t, err) < 0)
        return -1;
    while (t->parts.len <= at)
        if (ckpt_vec_add(&t->parts, &p) < 0)
            return ckpt_nomem(err);
    p = &t->parts.ptr[at];
    if (!p->rank)
        *p = (struct part){r, l->stage, *tensor};
    else if (p->rank == r && p->stage == l->stage && !same_place(&p->at, tensor))
        return ckpt_fail(err, CKPT_CONFLICT, "two different tensors of the file have the name '%s'",
                         name);
    return 0;
}

/* Add grouped experts: the weights of all local experts in one tensor, whose shape is [in, experts
 * x out] or [experts x in, out], depending on the name, but whose data is [experts, in, out]. Each
 * expert becomes the weight [out, in] of a linear layer. */
static int add_grouped(struct load *l, const char *name, bool first,
                       const struct ckpt_torch_tensor *all, struct ckpt_err *err)
{
    const size_t base = strlen(name) - strlen("weight1");
    const uint64_t n = l->nlocal, esize = ckpt_dtype_size(all->dtype);

    if (n == 0)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds the weights of all experts of a rank; how many those are "
                         "(num_experts) is not in the checkpoint",
                         name);
    if (all->rank != 2 || !all->contiguous || all->dim[first ? 1 : 0] % n)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' does not hold the weights of %" PRIu64 " experts", name, n);
    const uint64_t in = first ? all->dim[0] : all->dim[0] / n;
    const uint64_t out = first ? all->dim[1] / n : all->dim[1];
    for (uint64_t j = 0; j < n; j++) {
        struct ckpt_torch_tensor one = *all;
        ckpt_cleanup(ckpt_freep) char *own =
            ckpt_asprintf("%.*sexperts.%" PRIu64 ".%s.weight", (int)base, name, l->rank->ep * n + j,
                          first ? "linear_fc1" : "linear_fc2");
        one.dim[0] = out;
        one.dim[1] = in;
        one.numel = in * out;
        one.stride[0] = esize;
        one.stride[1] = out * esize;
        one.off += j * in * out * esize;
        if (!own)
            return ckpt_nomem(err);
        if (add_part(l, own, &one, err) < 0)
            return -1;
    }
    return 0;
}

static int add_tensor(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct ckpt_megatron_rank *r = l->rank;
    const struct ckpt_megatron_place at = {*stage_of(l, l->stage, r->pp), r->ep * l->nlocal};
    struct ckpt_torch_tensor tensor;

    if (ckpt_torch_is_data(&r->file.p, v) || !ckpt_megatron_name(name, &at, &l->name))
        return 0;
    if (l->name.failed)
        return ckpt_nomem(err);
    const char *own = ckpt_str_get(&l->name);
    if (ckpt_torch_file_tensor(&r->file, v, &tensor, err) < 0)
        return ckpt_err_in(err, "tensor '%s'", name);
    if (ckpt_has_suffix(own, ".mlp.experts.weight1") ||
        ckpt_has_suffix(own, ".mlp.experts.weight2"))
        return add_grouped(l, own, ckpt_has_suffix(own, "1"), &tensor, err);
    return add_part(l, own, &tensor, err);
}

static int collect(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->mesh.ranks.len; i++) {
        struct ckpt_megatron_rank *r = &l->mesh.ranks.ptr[i];
        if ((r->index = ckpt_catalog_add_source(l->cat, r->file.source, err)) == UINT32_MAX)
            return -1;
        for (uint32_t v = 0; v < l->nvirtual; v++)
            if (visit_rank(l, r, v, add_tensor, err) < 0)
                return -1;
    }
    return 0;
}

/* ---- the catalogue ---- */

/* Check that all ranks have a part of the tensor, and that the parts have the same dtype and shape.
 */
static int check_parts(const struct load *l, const struct ranked *t, uint64_t n,
                       struct ckpt_err *err)
{
    const struct part *first = t->parts.ptr;

    for (size_t i = 0; i < n; i++) {
        const struct part *p = &t->parts.ptr[i];
        if (i >= t->parts.len || !p->rank)
            return ckpt_fail(err, CKPT_MISSING,
                             "tensor '%s' is not in the file of tensor rank %zu (of %" PRIu64 ")",
                             t->name, i, l->mesh.ntp);
        if (p->at.dtype != first->at.dtype || p->at.rank != first->at.rank ||
            memcmp(p->at.dim, first->at.dim, p->at.rank * sizeof *p->at.dim) != 0)
            return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' is %s%s in '%s', but %s%s in '%s'",
                             t->name, ckpt_dtype_name(first->at.dtype),
                             ckpt_shape_text(first->at.dim, first->at.rank).text, first->rank->path,
                             ckpt_dtype_name(p->at.dtype),
                             ckpt_shape_text(p->at.dim, p->at.rank).text, p->rank->path);
    }
    return 0;
}

static int add_ranked(struct load *l, const struct ranked *t, struct ckpt_err *err)
{
    const uint64_t n = is_expert(t->name) ? l->mesh.netp : l->mesh.ntp;
    const uint32_t lead = n > 1;
    uint64_t dim[CKPT_MAX_RANK + 1] = {n}, stride[CKPT_MAX_RANK + 1] = {0};
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};

    if (check_parts(l, t, n, err) < 0)
        return -1;
    const struct ckpt_torch_tensor *first = &t->parts.ptr[0].at;
    const uint32_t rank = first->rank + lead;
    if (rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' has %u dimensions", t->name, first->rank);
    memcpy(dim + lead, first->dim, first->rank * sizeof *dim);
    for (uint64_t i = 0; i < n; i++) {
        const struct part *p = &t->parts.ptr[i];
        struct ckpt_box box = ckpt_box_whole(dim, rank);
        if (lead) {
            box.lo[0] = i;
            box.n[0] = 1;
        }
        memcpy(stride + lead, p->at.stride, first->rank * sizeof *stride);
        if (ckpt_pieces_add(&pieces, dim, &box, p->rank->index, p->at.off, stride, err) < 0)
            return -1;
    }
    if (ckpt_pieces_catalog(&pieces, l->cat, t->name, first->dtype, dim, rank, err) < 0)
        return -1;
    l->cat->tensors.ptr[l->cat->tensors.len - 1].ranks = lead ? (uint16_t)n : 0;
    return 0;
}

int ckpt_megatron_load_ranks(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                             struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                             struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.mesh = {.dir = dir, .opt = opt, .st = st},
                                                .cat = cat};

    if (ckpt_megatron_mesh_read(&l.mesh, err) < 0 ||
        ckpt_megatron_mesh_place(&l.mesh, cat, err) < 0 || number_layers(&l, err) < 0 ||
        collect(&l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.tensors.len; i++)
        if (add_ranked(&l, &l.tensors.ptr[i], err) < 0)
            return ckpt_err_in(err, "'%s'", ckpt_dir_path(dir));
    return 0;
}
