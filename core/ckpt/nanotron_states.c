/* SPDX-License-Identifier: Apache-2.0 */
/* From the ranks' pickles of optimizer states to whole tensors. */
#include "ckpt/nanotron_states.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/torch.h"

#define FOLDER "optimizer"

struct file {
    char *name;
    uint32_t pp, tp, ep;
};

struct part { /* of a state: what one file holds */
    uint32_t tp, ep;
};

struct state {
    const char *name;
    enum ckpt_dtype dtype;
    uint32_t rank;
    const uint64_t *dim; /* the parameter's; NULL: a scalar */
    CKPT_VEC(struct part) parts;
    CKPT_VEC(struct ckpt_piece_draft) draft;
    CKPT_VEC(struct ckpt_box) box;
    bool bad; /* left out */
};

struct load {
    struct ckpt_dir *dir; /* the folder */
    const struct ckpt_reader_options *opt;
    ckpt_nt_find *find;
    void *ctx;
    struct ckpt_catalog *cat;
    struct ckpt_arena names;
    struct ckpt_map index;
    CKPT_VEC(struct file) files;
    CKPT_VEC(struct state) states;
    uint32_t npp, ntp; /* of the save; 0: not known */
    bool zero;         /* there are files of data-parallel ranks */
};

/* One file while it is read. */
struct pickled {
    struct load *l;
    const struct file *file;
    struct ckpt_torch torch;
    struct ckpt_pickle p;
    uint32_t source;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->files.len; i++)
        free(l->files.ptr[i].name);
    for (size_t i = 0; i < l->states.len; i++) {
        ckpt_vec_release(&l->states.ptr[i].parts);
        ckpt_vec_release(&l->states.ptr[i].draft);
        ckpt_vec_release(&l->states.ptr[i].box);
    }
    ckpt_vec_release(&l->files);
    ckpt_vec_release(&l->states);
    ckpt_map_release(&l->index);
    ckpt_arena_release(&l->names);
    ckpt_dir_unref(l->dir);
}

/* ---- files ---- */

/* "_tp-1-of-2" at *s: its rank; false: something else is there. */
static bool take_rank(const char **s, const char *way, uint32_t *ret, uint32_t *ret_size)
{
    unsigned rank, size;
    char form[32];
    int n = 0;

    (void)snprintf(form, sizeof form, "_%s-%%u-of-%%u%%n", way);
    if (sscanf(*s, form, &rank, &size, &n) != 2 || rank >= size)
        return false;
    *ret = rank;
    *ret_size = size;
    *s += n;
    return true;
}

static int see(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct file f = {0}, *own;
    const char *s = e->name;
    uint32_t dp, npp, ntp, size;

    if (!ckpt_has_prefix(s, "optimizer_"))
        return 0;
    s += strlen("optimizer");
    if (!take_rank(&s, "pp", &f.pp, &npp))
        return 0;
    const bool zero = take_rank(&s, "dp", &dp, &size);
    if (!take_rank(&s, "tp", &f.tp, &ntp))
        return 0;
    (void)take_rank(&s, "exp", &f.ep, &size);
    if (strcmp(s, ".pt") != 0 || (l->npp && npp != l->npp) || (l->ntp && ntp != l->ntp))
        return 0; /* no state, or another save's */
    if (zero) {
        l->zero = true;
        return 0;
    }
    if (ckpt_vec_add(&l->files, &own) < 0 || !(f.name = strdup(e->name)))
        return ckpt_nomem(err);
    *own = f;
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct file *p = a, *q = b;

    if (p->pp != q->pp)
        return p->pp < q->pp ? -1 : 1;
    if (p->tp != q->tp)
        return p->tp < q->tp ? -1 : 1;
    return (p->ep > q->ep) - (p->ep < q->ep);
}

/* ---- tensors ---- */

static struct state *find_state(struct load *l, const char *name, struct ckpt_err *err)
{
    uint32_t at;
    bool is_new;
    struct state *s;
    char *own = ckpt_arena_strdup(&l->names, name);

    if (!own ||
        ckpt_map_put(&l->index, own, strlen(own), (uint32_t)l->states.len, &at, &is_new) < 0 ||
        (is_new && ckpt_vec_add(&l->states, &s) < 0))
        return (void)ckpt_nomem(err), NULL;
    s = &l->states.ptr[at];
    if (is_new)
        s->name = own;
    return s;
}

/* Tied parameters are on several stages. */
static bool has_part(const struct state *s, uint32_t tp, uint32_t ep)
{
    for (size_t i = 0; i < s->parts.len; i++)
        if (s->parts.ptr[i].tp == tp && s->parts.ptr[i].ep == ep)
            return true;
    return false;
}

static int add_piece(struct state *s, const struct ckpt_torch_layout *t, uint64_t storage,
                     uint32_t source, const struct ckpt_nt_pair *pair)
{
    const size_t esize = ckpt_dtype_size(t->dtype);
    uint64_t stride[CKPT_MAX_RANK], src = storage + t->first * esize;
    struct ckpt_piece_draft *d;

    if (ckpt_box_numel(&pair->global) == 0)
        return 0;
    if (ckpt_vec_add(&s->draft, &d) < 0 || ckpt_vec_push(&s->box, pair->global) < 0)
        return -1;
    for (uint32_t k = 0; k < t->rank; k++) {
        stride[k] = t->stride[k] * esize;
        src += pair->local.lo[k] * stride[k];
    }
    ckpt_piece_from_box(s->dim, &pair->global, source, src, stride, d);
    return 0;
}

/* A number of a parameter: the same on all ranks. */
static int add_scalar(const struct pickled *f, struct state *s, const struct ckpt_torch_layout *t,
                      uint64_t storage, struct ckpt_err *err)
{
    static const struct ckpt_nt_pair none = {0};

    s->dtype = t->dtype;
    return s->box.len || add_piece(s, t, storage, f->source, &none) == 0 ? 0 : ckpt_nomem(err);
}

static int fail_shape(const struct ckpt_torch_layout *t, const struct ckpt_nt_part *part,
                      struct ckpt_err *err)
{
    char a[CKPT_SHAPE_TEXT], b[CKPT_SHAPE_TEXT];

    return ckpt_fail(err, CKPT_CONFLICT, "it is %s, the parameter's file has %s",
                     ckpt_shape_text(t->dim, t->rank, a, sizeof a),
                     ckpt_shape_text(part->local_dim, part->rank, b, sizeof b));
}

static int add_value(const struct pickled *f, struct state *s, const char *param, ckpt_pv v,
                     struct ckpt_err *err)
{
    uint32_t tp = f->file->tp, ep = f->file->ep;
    struct ckpt_torch_layout t;
    struct ckpt_nt_part part;
    struct part own;
    uint64_t storage = 0;

    if (ckpt_torch_layout_of(&f->p, v, &t, err) < 0 ||
        (t.nbyte && ckpt_torch_storage(&f->torch, &t, &storage, err) < 0))
        return -1;
    if (t.rank == 0)
        return add_scalar(f, s, &t, storage, err);
    if (!f->l->find(f->l->ctx, param, tp, ep, &part))
        return ckpt_fail(err, CKPT_MISSING, "there is no such parameter of tp-rank %u", tp);
    own = (struct part){part.sharded ? tp : 0, part.has_ep ? ep : 0};
    if (own.tp != tp || own.ep != ep || has_part(s, tp, ep))
        return 0;
    if (t.rank != part.rank || memcmp(t.dim, part.local_dim, t.rank * sizeof *t.dim) != 0)
        return fail_shape(&t, &part, err);
    if (s->parts.len && s->dtype != t.dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "it is %s here, %s elsewhere",
                         ckpt_dtype_name(t.dtype), ckpt_dtype_name(s->dtype));
    s->dtype = t.dtype;
    s->rank = part.rank;
    s->dim = part.dim;
    if (ckpt_vec_push(&s->parts, own) < 0)
        return ckpt_nomem(err);
    for (size_t k = 0; k < part.npair; k++)
        if (add_piece(s, &t, storage, f->source, &part.pair[k]) < 0)
            return ckpt_nomem(err);
    return 0;
}

/* Of "PREFIX.PARAMETER[.KEY]". What is no tensor is none of ours. */
static int add_entry(const struct pickled *f, const char *prefix, const char *param,
                     const char *key, ckpt_pv v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = NULL;
    struct ckpt_err e = {0};

    if (!param || ckpt_pv_kind(v) != CKPT_PV_OBJ)
        return 0;
    if (ckpt_has_prefix(param, "module."))
        param += strlen("module.");
    name =
        key ? ckpt_asprintf("%s.%s.%s", prefix, param, key) : ckpt_asprintf("%s.%s", prefix, param);
    if (!name)
        return ckpt_nomem(err);
    struct state *s = find_state(f->l, name, err);
    if (!s)
        return -1;
    if (s->bad || add_value(f, s, param, v, &e) == 0)
        return 0;
    if (e.code == CKPT_NOMEM)
        return ckpt_nomem(err);
    s->bad = true;
    ckpt_catalog_warn(f->l->cat, "left out: '%s' in '%s/%s': %s", name, ckpt_dir_path(f->l->dir),
                      f->file->name, e.text);
    return 0;
}

/* {name: tensor} */
static int add_masters(const struct pickled *f, ckpt_pv dict, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(&f->p, dict); i++)
        if (add_entry(f, "optimizer.gradient_accumulator",
                      ckpt_pv_str(&f->p, ckpt_pv_key(&f->p, dict, i)), NULL,
                      ckpt_pv_value(&f->p, dict, i), err) < 0)
            return -1;
    return 0;
}

/* A parameter's name, from its number; most often both count alike. */
static const char *name_of(const struct pickled *f, ckpt_pv names, ckpt_pv id, size_t guess)
{
    const size_t n = ckpt_pv_npair(&f->p, names);

    if (guess < n && ckpt_pv_key(&f->p, names, guess) == id)
        return ckpt_pv_str(&f->p, ckpt_pv_value(&f->p, names, guess));
    for (size_t i = 0; i < n; i++)
        if (ckpt_pv_key(&f->p, names, i) == id)
            return ckpt_pv_str(&f->p, ckpt_pv_value(&f->p, names, i));
    return ckpt_pv_str(&f->p, id);
}

/* {number: {key: tensor}} */
static int add_numbered(const struct pickled *f, ckpt_pv states, ckpt_pv names,
                        struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(&f->p, states); i++) {
        const char *param = name_of(f, names, ckpt_pv_key(&f->p, states, i), i);
        ckpt_pv state = ckpt_pv_value(&f->p, states, i);
        for (size_t k = 0; k < ckpt_pv_npair(&f->p, state); k++) {
            const char *key = ckpt_pv_str(&f->p, ckpt_pv_key(&f->p, state, k));
            if (key && add_entry(f, "optimizer.state", param, key, ckpt_pv_value(&f->p, state, k),
                                 err) < 0)
                return -1;
        }
    }
    return 0;
}

static int add_pickled(struct pickled *f, struct ckpt_source *s, struct ckpt_err *err)
{
    if (ckpt_torch_open(s, 0, s->size, &f->torch, err) < 0)
        return -1;
    int rc = ckpt_pickle_read(s, f->torch.pickle_off, f->torch.pickle_len, &ckpt_torch_rules, &f->p,
                              err);
    if (rc == 0) {
        const ckpt_pv root = f->p.root;
        f->source = ckpt_catalog_add_source(f->l->cat, s, err);
        rc = f->source == UINT32_MAX ? -1 : 0;
        if (rc == 0)
            rc = add_numbered(f, ckpt_pv_get(&f->p, root, "state"),
                              ckpt_pv_get(&f->p, root, "names"), err);
        if (rc == 0)
            rc = add_masters(f, ckpt_pv_get(&f->p, root, "gradient_accumulator"), err);
        ckpt_pickle_release(&f->p);
    }
    ckpt_torch_release(&f->torch);
    return rc;
}

static int add_file(struct load *l, const struct file *file, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *s = NULL;
    struct pickled f = {.l = l, .file = file};
    struct ckpt_err e = {0};

    if (ckpt_source_file_new(l->dir, file->name, l->opt->pool, &s, &e) == 0 &&
        add_pickled(&f, s, &e) == 0)
        return 0;
    if (e.code == CKPT_NOMEM)
        return ckpt_nomem(err);
    ckpt_catalog_warn(l->cat, "left out: '%s/%s': %s", ckpt_dir_path(l->dir), file->name, e.text);
    return 0;
}

/* ---- the whole ---- */

static int add_state(struct load *l, const struct state *s, struct ckpt_err *err)
{
    struct ckpt_err e = {0};
    size_t index, bad;

    if (s->bad)
        return 0;
    if (s->dim && ckpt_boxes_cover(s->dim, s->rank, s->box.ptr, s->box.len, &bad, &e) < 0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        ckpt_catalog_warn(l->cat, "left out: '%s': %s", s->name, e.text);
        return 0;
    }
    return ckpt_catalog_add(l->cat, s->name, s->dtype, s->dim, s->rank, &index, err) < 0
               ? -1
               : ckpt_catalog_set_pieces(l->cat, index, s->draft.ptr, s->draft.len, err);
}

int ckpt_nt_states_add(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, uint32_t npp,
                       uint32_t ntp, ckpt_nt_find *find, void *ctx, struct ckpt_catalog *cat,
                       struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {
        .opt = opt, .npp = npp, .ntp = ntp, .find = find, .ctx = ctx, .cat = cat};

    if (!ckpt_dir_has_dir(dir, FOLDER))
        return 0;
    if (ckpt_dir_open_below(dir, FOLDER, &l.dir, err) < 0 || ckpt_dir_list(l.dir, see, &l, err) < 0)
        return -1;
    if (l.zero)
        ckpt_catalog_warn(
            cat,
            "left out: optimizer states in '%s' that are cut over data parallel ranks "
            "(ZeRO-1)",
            ckpt_dir_path(l.dir));
    qsort(l.files.ptr, l.files.len, sizeof *l.files.ptr, by_place);
    for (size_t i = 0; i < l.files.len; i++)
        if (add_file(&l, &l.files.ptr[i], err) < 0)
            return -1;
    for (size_t i = 0; i < l.states.len; i++)
        if (add_state(&l, &l.states.ptr[i], err) < 0)
            return -1;
    return 0;
}
