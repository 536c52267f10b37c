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

#include "base/ckd.h"
#include "base/par.h"
#include "ckpt/megatron_load.h"
#include "ckpt/megatron_name.h"
#include "container/torch.h"

enum { MAX_STAGES = 1024, MAX_RANKS = 1024, MAX_NESTING = 8 };

const char *const ckpt_megatron_rank_files[] = {"model_optim_rng.pt", "model_rng.pt",
                                                "model_weights.ckpt", NULL};

/* One rank's file. */
struct rank {
    char *folder, *path;
    uint64_t field[2]; /* the numbers behind mp_rank_TT */
    uint32_t nfield;
    uint64_t tp, pp, ep;
    struct ckpt_source *source;
    struct ckpt_torch torch;
    struct ckpt_pickle p;
    bool opened, parsed;
    uint32_t index; /* in the catalogue */
};

/* A tensor in one rank's file. */
struct part {
    const struct rank *rank; /* NULL: not seen yet */
    struct ckpt_torch_layout layout;
    uint64_t off;
};

struct ranked {
    const char *name;
    CKPT_VEC(struct part) parts; /* by tensor rank */
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_megatron_state *st;
    CKPT_VEC(struct rank) ranks; /* ascending by pp, ep, tp */
    uint64_t ntp, npp, nep, netp;
    uint64_t nlocal; /* experts in a file; 0: there are none */
    uint32_t nvirtual;
    uint64_t *layers; /* first global layer of [virtual stage][stage] */
    CKPT_VEC(struct ranked) tensors;
    struct ckpt_map by_name;
    struct ckpt_arena names;
    struct ckpt_str path, name; /* scratch */
    struct ckpt_catalog *cat;
};

static void rank_release(struct rank *r)
{
    if (r->parsed)
        ckpt_pickle_release(&r->p);
    if (r->opened)
        ckpt_torch_release(&r->torch);
    ckpt_source_unref(r->source);
    free(r->folder);
    free(r->path);
}

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->ranks.len; i++)
        rank_release(&l->ranks.ptr[i]);
    for (size_t i = 0; i < l->tensors.len; i++)
        ckpt_vec_release(&l->tensors.ptr[i].parts);
    ckpt_vec_release(&l->ranks);
    ckpt_vec_release(&l->tensors);
    ckpt_map_release(&l->by_name);
    ckpt_arena_release(&l->names);
    ckpt_str_release(&l->path);
    ckpt_str_release(&l->name);
    ckpt_catalog_free(l->cat);
    free(l->layers);
}

/* ---- the files ---- */

/* NeMo's tp_rank_TT_pp_rank_PPP. */
static bool parse_nemo_folder(const char *name, struct rank *r)
{
    static const char tp[] = "tp_rank_", pp[] = "_pp_rank_";
    unsigned long long v[2];
    size_t n;

    if (!ckpt_has_prefix(name, tp))
        return false;
    name += sizeof tp - 1;
    n = strspn(name, "0123456789");
    if (!ckpt_parse_u64(name, n, &v[0]) || !ckpt_has_prefix(name + n, pp))
        return false;
    name += n + sizeof pp - 1;
    if (!ckpt_parse_u64(name, strlen(name), &v[1]) || v[0] >= MAX_RANKS || v[1] >= MAX_RANKS)
        return false;
    r->tp = v[0];
    r->field[r->nfield++] = v[1];
    return true;
}

/* mp_rank_TT, and up to two numbers more. */
static bool parse_folder(const char *name, struct rank *r)
{
    unsigned long long v;

    if (parse_nemo_folder(name, r))
        return true;
    if (!ckpt_has_prefix(name, "mp_rank_"))
        return false;
    name += strlen("mp_rank_");
    for (uint32_t i = 0; i < 3; i++) {
        size_t n = strspn(name, "0123456789");
        if (n == 0 || !ckpt_parse_u64(name, n, &v) || v >= MAX_RANKS)
            return false;
        if (i == 0)
            r->tp = v;
        else
            r->field[r->nfield++] = v;
        name += n;
        if (*name == '\0')
            return true;
        if (*name++ != '_')
            return false;
    }
    return false;
}

static int see(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct rank r = {0}, *own;

    if (e->kind != CKPT_ENTRY_DIR || !parse_folder(e->name, &r))
        return 0;
    if (ckpt_vec_add(&l->ranks, &own) < 0)
        return ckpt_nomem(err);
    *own = r;
    own->folder = strdup(e->name);
    for (size_t i = 0; own->folder && ckpt_megatron_rank_files[i]; i++) {
        own->path = ckpt_asprintf("%s/%s", own->folder, ckpt_megatron_rank_files[i]);
        if (!own->path || ckpt_dir_has_file(l->dir, own->path))
            break;
        free(ckpt_steal(&own->path));
    }
    if (!own->folder)
        return ckpt_nomem(err);
    return own->path ? 0
                     : ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no %s", ckpt_dir_path(l->dir),
                                 own->folder, ckpt_megatron_rank_files[0]);
}

static int read_rank(struct load *l, struct rank *r, struct ckpt_err *err)
{
    char name[CKPT_PV_TEXT];

    if (ckpt_source_file_new(l->dir, r->path, l->opt->pool, &r->source, err) < 0 ||
        ckpt_torch_open(r->source, 0, r->source->size, &r->torch, err) < 0)
        return -1;
    r->opened = true;
    if (ckpt_torch_pickle(&r->torch, &r->p, err) < 0)
        return -1;
    r->parsed = true;
    return ckpt_pv_kind(r->p.root) == CKPT_PV_DICT
               ? 0
               : ckpt_fail(err, CKPT_FORMAT, "it holds no dict but %s",
                           ckpt_pv_text(&r->p, r->p.root, name, sizeof name));
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct rank *r = &l->ranks.ptr[i];

    return read_rank(l, r, err) < 0 ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), r->path)
                                    : 0;
}

/* ---- the mesh ---- */

/* A size that the run's arguments say, or 0. */
static uint64_t arg(const struct load *l, const char *key)
{
    uint64_t n = 0;

    return l->st->args && ckpt_json_u64(l->st->args, key, &n) ? n : 0;
}

static ckpt_pv model_of(const struct rank *r, uint32_t stage, bool numbered)
{
    char key[24] = "model";

    if (numbered)
        (void)snprintf(key, sizeof key, "model%u", stage);
    ckpt_pv v = ckpt_pv_get(&r->p, r->p.root, key);
    if (!numbered && ckpt_pv_kind(v) != CKPT_PV_DICT)
        v = ckpt_pv_get(&r->p, r->p.root, "state_dict");
    return v;
}

static bool has_embedding(const struct rank *r)
{
    ckpt_pv model = model_of(r, 0, false);

    if (ckpt_pv_kind(model) != CKPT_PV_DICT)
        model = model_of(r, 0, true);
    for (size_t i = 0; i < ckpt_pv_npair(&r->p, model); i++) {
        const char *key = ckpt_pv_str(&r->p, ckpt_pv_key(&r->p, model, i));
        if (key && strstr(key, "word_embeddings.weight"))
            return true;
    }
    return false;
}

/* A single number behind TT is a pipeline's rank or an expert's: the run's arguments tell, or else
 * that experts' ranks all hold the embedding. */
static bool is_pipeline(const struct load *l)
{
    if (arg(l, "pipeline_model_parallel_size") > 1)
        return true;
    if (arg(l, "expert_model_parallel_size") > 1)
        return false;
    for (size_t i = 0; i < l->ranks.len; i++)
        if (l->ranks.ptr[i].field[0] > 0)
            return !has_embedding(&l->ranks.ptr[i]);
    return true;
}

static uint64_t at_least(uint64_t n, uint64_t rank) { return rank >= n ? rank + 1 : n; }

static int by_place(const void *a, const void *b)
{
    const struct rank *p = a, *q = b;

    if (p->pp != q->pp)
        return p->pp < q->pp ? -1 : 1;
    if (p->ep != q->ep)
        return p->ep < q->ep ? -1 : 1;
    return (p->tp > q->tp) - (p->tp < q->tp);
}

static const struct rank *find_rank(const struct load *l, uint64_t tp, uint64_t pp, uint64_t ep)
{
    const struct rank key = {.tp = tp, .pp = pp, .ep = ep};

    return bsearch(&key, l->ranks.ptr, l->ranks.len, sizeof key, by_place);
}

static int fail_missing(const struct load *l, uint64_t tp, uint64_t pp, uint64_t ep,
                        struct ckpt_err *err)
{
    const struct rank *first = &l->ranks.ptr[0];
    char tail[64] = "";

    if (first->nfield == 2)
        (void)snprintf(tail, sizeof tail, "_%03" PRIu64 "_%03" PRIu64, pp, ep);
    else if (first->nfield == 1)
        (void)snprintf(tail, sizeof tail, "_%03" PRIu64, l->npp > 1 ? pp : ep);
    return ckpt_fail(err, CKPT_MISSING,
                     "'%s': rank 'mp_rank_%02" PRIu64 "%s' is missing: the run had tensor parallel "
                     "%" PRIu64 ", pipeline parallel %" PRIu64 ", expert parallel %" PRIu64,
                     ckpt_dir_path(l->dir), tp, tail, l->ntp, l->npp, l->nep);
}

/* Ranks whose experts are cut as everything else is all wrote; with another cut of experts
 * (expert tensor parallel N), the first N x experts' ranks of each stage did. */
static int check_stage(const struct load *l, uint64_t pp, struct ckpt_err *err)
{
    if (l->netp == l->ntp) {
        for (uint64_t e = 0; e < l->nep; e++)
            for (uint64_t t = 0; t < l->ntp; t++)
                if (!find_rank(l, t, pp, e))
                    return fail_missing(l, t, pp, e, err);
        return 0;
    }
    for (uint64_t r = 0; r < l->netp * l->nep; r++)
        if (!find_rank(l, r % l->ntp, pp, r / l->netp))
            return fail_missing(l, r % l->ntp, pp, r / l->netp, err);
    for (uint64_t t = 0; t < l->ntp; t++) {
        bool found = false;
        for (uint64_t e = 0; e < l->nep; e++)
            found |= find_rank(l, t, pp, e) != NULL;
        if (!found)
            return fail_missing(l, t, pp, t / l->netp % l->nep, err);
    }
    return 0;
}

/* Ranks that the run did not have, of an earlier and larger one. */
static void drop_stale(struct load *l)
{
    size_t kept = 0;

    for (size_t i = 0; i < l->ranks.len; i++) {
        struct rank *r = &l->ranks.ptr[i];
        if ((l->ntp && r->tp >= l->ntp) || (l->npp && r->pp >= l->npp) ||
            (l->nep && r->ep >= l->nep)) {
            ckpt_catalog_warn(l->cat,
                              "left out: '%s', a rank that this run did not have (tensor parallel "
                              "%" PRIu64 ", pipeline parallel %" PRIu64 ", expert parallel %" PRIu64
                              ")",
                              r->folder, l->ntp, l->npp, l->nep);
            rank_release(r);
        } else {
            l->ranks.ptr[kept++] = *r;
        }
    }
    l->ranks.len = kept;
}

static int place_ranks(struct load *l, struct ckpt_err *err)
{
    const uint32_t nfield = l->ranks.ptr[0].nfield;
    const bool pipeline = nfield == 2 || is_pipeline(l);

    l->ntp = arg(l, "tensor_model_parallel_size");
    l->npp = arg(l, "pipeline_model_parallel_size");
    l->nep = arg(l, "expert_model_parallel_size");
    for (size_t i = 0; i < l->ranks.len; i++) {
        struct rank *r = &l->ranks.ptr[i];
        if (nfield)
            *(pipeline ? &r->pp : &r->ep) = r->field[0];
        if (nfield == 2)
            r->ep = r->field[1];
    }
    drop_stale(l);
    if (l->ranks.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no rank of the run", ckpt_dir_path(l->dir));
    for (size_t i = 0; i < l->ranks.len; i++) {
        struct rank *r = &l->ranks.ptr[i];
        if (r->nfield != nfield)
            return ckpt_fail(
                err, CKPT_CONFLICT,
                "'%s' holds ranks of several saves ('%s', '%s'): remove the stale ones",
                ckpt_dir_path(l->dir), l->ranks.ptr[0].folder, r->folder);
        l->ntp = at_least(l->ntp, r->tp);
        l->npp = at_least(l->npp, r->pp);
        l->nep = at_least(l->nep, r->ep);
    }
    if (l->ntp > MAX_RANKS || l->npp > MAX_RANKS || l->nep > MAX_RANKS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d ranks", MAX_RANKS);
    l->netp = arg(l, "expert_tensor_parallel_size");
    if (l->netp == 0 || l->nep == 1)
        l->netp = l->netp && arg(l, "num_experts") ? l->netp : l->ntp;
    if (l->netp > l->ntp || l->ntp % l->netp)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "expert tensor parallel %" PRIu64 " with tensor parallel %" PRIu64
                         " is not supported in legacy checkpoints",
                         l->netp, l->ntp);
    qsort(l->ranks.ptr, l->ranks.len, sizeof *l->ranks.ptr, by_place);
    for (uint64_t p = 0; p < l->npp; p++)
        if (check_stage(l, p, err) < 0)
            return -1;
    return 0;
}

/* ---- state dicts ---- */

typedef int (*visit_fn)(struct load *l, const struct rank *r, uint32_t stage, const char *name,
                        ckpt_pv v, struct ckpt_err *err);

/* Call fn for what a nested dict holds, under names joined by dots; l->path is the prefix. */
static int visit(struct load *l, const struct rank *r, uint32_t stage, ckpt_pv dict, unsigned depth,
                 visit_fn fn, struct ckpt_err *err)
{
    const size_t len = l->path.len;

    for (size_t i = 0; i < ckpt_pv_npair(&r->p, dict); i++) {
        const char *key = ckpt_pv_str(&r->p, ckpt_pv_key(&r->p, dict, i));
        ckpt_pv v = ckpt_pv_value(&r->p, dict, i);
        int result = 0;
        if (!key)
            continue;
        if (!ckpt_utf8_ok(key))
            return ckpt_fail(err, CKPT_FORMAT, "a tensor's name is not UTF-8");
        ckpt_str_puts(&l->path, key);
        if (l->path.failed)
            return ckpt_nomem(err);
        if (ckpt_pv_kind(v) != CKPT_PV_DICT) {
            result = fn(l, r, stage, ckpt_str_get(&l->path), v, err);
        } else if (depth < MAX_NESTING) {
            ckpt_str_putc(&l->path, '.');
            result = visit(l, r, stage, v, depth + 1, fn, err);
        }
        if (result < 0)
            return -1;
        l->path.len = len;
        if (l->path.ptr)
            l->path.ptr[len] = '\0';
    }
    return 0;
}

static int visit_rank(struct load *l, const struct rank *r, uint32_t stage, visit_fn fn,
                      struct ckpt_err *err)
{
    ckpt_pv model = model_of(r, stage, l->nvirtual > 1);

    ckpt_str_clear(&l->path);
    if (ckpt_pv_kind(model) != CKPT_PV_DICT && l->nvirtual == 1 &&
        ckpt_has_suffix(r->path, ".ckpt"))
        model = r->p.root;
    if (ckpt_pv_kind(model) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_MISSING, "'%s/%s' has no state dict of virtual stage %u",
                         ckpt_dir_path(l->dir), r->path, stage);
    return visit(l, r, stage, model, 0, fn, err) < 0
               ? ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), r->path)
               : 0;
}

/* ---- numbers ---- */

static uint64_t *stage_of(struct load *l, uint32_t stage, uint64_t pp)
{
    return &l->layers[stage * l->npp + pp];
}

/* How many layers a stage has: the greatest number in its names. */
static int count_layer(struct load *l, const struct rank *r, uint32_t stage, const char *name,
                       ckpt_pv v, struct ckpt_err *err)
{
    static const struct ckpt_megatron_place whole = {0};
    uint64_t layer, *n = stage_of(l, stage, r->pp);

    (void)v;
    if (!ckpt_megatron_name(name, &whole, &l->name))
        return 0;
    if (l->name.failed)
        return ckpt_nomem(err);
    if (!ckpt_megatron_layer(ckpt_str_get(&l->name), &layer))
        return 0;
    if (layer >= UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "'%s': layer %" PRIu64, name, layer);
    *n = at_least(*n, layer);
    return 0;
}

/* The experts of a file: the run's arguments, or the greatest number in its names. */
static int count_expert(struct load *l, const struct rank *r, uint32_t stage, const char *name,
                        ckpt_pv v, struct ckpt_err *err)
{
    static const char mark[] = ".experts.experts.";
    static const struct ckpt_megatron_place whole = {0};
    unsigned long long expert;

    (void)r;
    (void)stage;
    (void)v;
    if (!ckpt_megatron_name(name, &whole, &l->name))
        return 0;
    if (l->name.failed)
        return ckpt_nomem(err);
    const char *s = strstr(ckpt_str_get(&l->name), mark);
    if (s &&
        ckpt_parse_u64(s + sizeof mark - 1, strspn(s + sizeof mark - 1, "0123456789"), &expert))
        l->nlocal = at_least(l->nlocal, expert);
    return 0;
}

static int number_layers(struct load *l, struct ckpt_err *err)
{
    const struct rank *first = &l->ranks.ptr[0];
    uint64_t next = 0;

    l->nvirtual = 1;
    if (ckpt_pv_kind(model_of(first, 0, true)) == CKPT_PV_DICT)
        while (l->nvirtual < MAX_STAGES &&
               ckpt_pv_kind(model_of(first, l->nvirtual, true)) == CKPT_PV_DICT)
            l->nvirtual++;
    if (!(l->layers = calloc((size_t)(l->nvirtual * l->npp), sizeof *l->layers)))
        return ckpt_nomem(err);
    for (uint64_t p = 0; p < l->npp; p++) {
        const struct rank *r = l->ranks.ptr;
        while (r->pp != p)
            r++;
        for (uint32_t v = 0; v < l->nvirtual; v++)
            if (visit_rank(l, r, v, count_layer, err) < 0 ||
                (l->nep > 1 && visit_rank(l, r, v, count_expert, err) < 0))
                return -1;
    }
    for (uint32_t v = 0; v < l->nvirtual; v++)
        for (uint64_t p = 0; p < l->npp; p++) {
            uint64_t n = *stage_of(l, v, p);
            *stage_of(l, v, p) = next;
            next += n;
        }
    if (arg(l, "num_experts") && arg(l, "num_experts") % l->nep == 0)
        l->nlocal = arg(l, "num_experts") / l->nep;
    return 0;
}

/* ---- tensors ---- */

static bool is_expert(const char *name) { return strstr(name, ".mlp.experts.") != NULL; }

static int find_ranked(struct load *l, const char *name, struct ranked **ret, struct ckpt_err *err)
{
    uint32_t at;
    bool is_new;

    if (!ckpt_map_get(&l->by_name, name, strlen(name), &at)) {
        char *own = ckpt_arena_strdup(&l->names, name);
        if (!own || ckpt_vec_add(&l->tensors, ret) < 0 ||
            ckpt_map_put(&l->by_name, own, strlen(own), (uint32_t)l->tensors.len - 1, &at,
                         &is_new) < 0)
            return ckpt_nomem(err);
        (*ret)->name = own;
    }
    *ret = &l->tensors.ptr[at];
    return 0;
}

/* Only the first copy of a rank's part counts. */
static int add_part(struct load *l, const struct rank *r, const char *name,
                    const struct ckpt_torch_layout *layout, uint64_t off, struct ckpt_err *err)
{
    uint64_t at = is_expert(name) ? r->tp % l->netp : r->tp;
    struct ranked *t = NULL;
    struct part *p;

    if (find_ranked(l, name, &t, err) < 0)
        return -1;
    while (t->parts.len <= at)
        if (ckpt_vec_add(&t->parts, &p) < 0)
            return ckpt_nomem(err);
    p = &t->parts.ptr[at];
    if (!p->rank)
        *p = (struct part){r, *layout, off};
    return 0;
}

/* The weights of all local experts side by side, [in, experts x out] or [experts x in, out] by
 * name, but laid out as [experts, in, out]: each becomes a linear layer's, [out, in]. */
static int add_grouped(struct load *l, const struct rank *r, const char *name, bool first,
                       const struct ckpt_torch_layout *all, uint64_t off, struct ckpt_err *err)
{
    const size_t base = strlen(name) - strlen("weight1");
    const uint64_t n = l->nlocal, esize = ckpt_dtype_size(all->dtype);

    if (n == 0)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds the weights of all experts of a rank; how many those are "
                         "(num_experts) is not in the checkpoint",
                         name);
    if (all->rank != 2 || all->stride[1] != 1 || all->stride[0] != all->dim[1] ||
        all->dim[first ? 1 : 0] % n)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' does not hold the weights of %" PRIu64 " experts", name, n);
    const uint64_t in = first ? all->dim[0] : all->dim[0] / n;
    const uint64_t out = first ? all->dim[1] / n : all->dim[1];
    for (uint64_t j = 0; j < n; j++) {
        struct ckpt_torch_layout one = *all;
        ckpt_cleanup(ckpt_freep) char *own =
            ckpt_asprintf("%.*sexperts.%" PRIu64 ".%s.weight", (int)base, name, r->ep * n + j,
                          first ? "linear_fc1" : "linear_fc2");
        one.dim[0] = out;
        one.dim[1] = in;
        one.stride[0] = 1;
        one.stride[1] = out;
        if (!own)
            return ckpt_nomem(err);
        if (add_part(l, r, own, &one, off + j * in * out * esize, err) < 0)
            return -1;
    }
    return 0;
}

static int add_tensor(struct load *l, const struct rank *r, uint32_t stage, const char *name,
                      ckpt_pv v, struct ckpt_err *err)
{
    const struct ckpt_megatron_place at = {*stage_of(l, stage, r->pp), r->ep * l->nlocal};
    struct ckpt_torch_layout layout;
    uint64_t off = 0;

    if (ckpt_torch_is_data(&r->p, v) || !ckpt_megatron_name(name, &at, &l->name))
        return 0;
    if (l->name.failed)
        return ckpt_nomem(err);
    const char *own = ckpt_str_get(&l->name);
    if (ckpt_torch_layout_of(&r->p, v, &layout, err) < 0 ||
        (layout.nbyte && ckpt_torch_storage(&r->torch, &layout, &off, err) < 0))
        return ckpt_err_in(err, "tensor '%s'", name);
    off += layout.first * ckpt_dtype_size(layout.dtype);
    if (ckpt_has_suffix(own, ".mlp.experts.weight1") ||
        ckpt_has_suffix(own, ".mlp.experts.weight2"))
        return add_grouped(l, r, own, ckpt_has_suffix(own, "1"), &layout, off, err);
    return add_part(l, r, own, &layout, off, err);
}

static int collect(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->ranks.len; i++) {
        struct rank *r = &l->ranks.ptr[i];
        if ((r->index = ckpt_catalog_add_source(l->cat, r->source, err)) == UINT32_MAX)
            return -1;
        for (uint32_t v = 0; v < l->nvirtual; v++)
            if (visit_rank(l, r, v, add_tensor, err) < 0)
                return -1;
    }
    return 0;
}

/* ---- the catalogue ---- */

/* All ranks have their part, and all parts are alike. */
static int check_parts(const struct load *l, const struct ranked *t, uint64_t n,
                       struct ckpt_err *err)
{
    const struct part *first = t->parts.ptr;
    char a[CKPT_SHAPE_TEXT], b[CKPT_SHAPE_TEXT];

    for (size_t i = 0; i < n; i++) {
        const struct part *p = &t->parts.ptr[i];
        if (i >= t->parts.len || !p->rank)
            return ckpt_fail(err, CKPT_MISSING,
                             "tensor '%s' is not in the file of tensor rank %zu (of %" PRIu64 ")",
                             t->name, i, l->ntp);
        if (p->layout.dtype != first->layout.dtype || p->layout.rank != first->layout.rank ||
            memcmp(p->layout.dim, first->layout.dim, p->layout.rank * sizeof *p->layout.dim) != 0)
            return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' is %s%s in '%s', but %s%s in '%s'",
                             t->name, ckpt_dtype_name(first->layout.dtype),
                             ckpt_shape_text(first->layout.dim, first->layout.rank, a, sizeof a),
                             first->rank->path, ckpt_dtype_name(p->layout.dtype),
                             ckpt_shape_text(p->layout.dim, p->layout.rank, b, sizeof b),
                             p->rank->path);
    }
    return 0;
}

static int add_ranked(struct load *l, const struct ranked *t, struct ckpt_err *err)
{
    const uint64_t n = is_expert(t->name) ? l->netp : l->ntp;
    const uint32_t lead = n > 1;
    uint64_t dim[CKPT_MAX_RANK + 1] = {n}, stride[CKPT_MAX_RANK + 1] = {0}, numel;
    ckpt_cleanup(ckpt_freep) struct ckpt_piece_draft *draft = NULL;
    size_t index, npiece = 0;

    if (check_parts(l, t, n, err) < 0)
        return -1;
    const struct ckpt_torch_layout *first = &t->parts.ptr[0].layout;
    const uint32_t rank = first->rank + lead;
    if (rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' has %u dimensions", t->name, first->rank);
    memcpy(dim + lead, first->dim, first->rank * sizeof *dim);
    if (!(draft = malloc((size_t)n * sizeof *draft)))
        return ckpt_nomem(err);
    bool any = ckpt_shape_numel(dim, rank, &numel) && numel > 0;
    for (uint64_t i = 0; any && i < n; i++) {
        const struct part *p = &t->parts.ptr[i];
        struct ckpt_box box = {.rank = rank};
        memcpy(box.n, dim, rank * sizeof *dim);
        if (lead) {
            box.lo[0] = i;
            box.n[0] = 1;
        }
        for (uint32_t d = lead; d < rank; d++)
            stride[d] = p->layout.stride[d - lead] * ckpt_dtype_size(first->dtype);
        ckpt_piece_from_box(dim, &box, p->rank->index, p->off, stride, &draft[npiece++]);
    }
    if (ckpt_catalog_add(l->cat, t->name, first->dtype, dim, rank, &index, err) < 0 ||
        ckpt_catalog_set_pieces(l->cat, index, draft, npiece, err) < 0)
        return -1;
    l->cat->tensors.ptr[index].ranks = lead ? (uint16_t)n : 0;
    return 0;
}

static int load(struct load *l, struct ckpt_err *err)
{
    if (ckpt_catalog_new(&l->cat, err) < 0 || ckpt_dir_list(l->dir, see, l, err) < 0)
        return -1;
    if (l->ranks.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no mp_rank_* directory",
                         ckpt_dir_path(l->dir));
    if (ckpt_parallel(l->ranks.len, l->opt->nthread, read_one, l, err) < 0)
        return -1;
    for (size_t i = 0; i < l->ranks.len; i++)
        if (ckpt_megatron_state_take(l->st, &l->ranks.ptr[i].p, l->ranks.ptr[i].p.root, err) < 0)
            return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(l->dir), l->ranks.ptr[i].path);
    if (place_ranks(l, err) < 0 || number_layers(l, err) < 0 || collect(l, err) < 0)
        return -1;
    for (size_t i = 0; i < l->tensors.len; i++)
        if (add_ranked(l, &l->tensors.ptr[i], err) < 0)
            return ckpt_err_in(err, "'%s'", ckpt_dir_path(l->dir));
    return 0;
}

int ckpt_megatron_load_ranks(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                             struct ckpt_megatron_state *st, struct ckpt_catalog **ret,
                             struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .st = st};

    if (load(&l, err) < 0)
        return -1;
    *ret = ckpt_steal(&l.cat);
    return 0;
}
