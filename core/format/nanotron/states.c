/* SPDX-License-Identifier: Apache-2.0 */
/* Combining the ranks' pickles of optimizer states to whole tensors. */
#include "format/nanotron/states.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "container/config.h"
#include "format/nanotron/state_file.h"
#include "format/nanotron/zero.h"

#define FOLDER "optimizer"

enum {
    MAX_CONFIG_BYTES = 256 * 1024 * 1024, /* it has an entry for each parameter and rank */
    AT_ONCE = 32,                         /* number of files that are read at a time */
};

struct file {
    char *name;
    uint32_t pp, dp, tp, ep;
    uint32_t ndp; /* 0: not divided over data-parallel ranks */
};

struct part { /* The part of a state in one file. */
    uint32_t tp, ep, dp;
    uint32_t source;
    struct ckpt_nt_interval in;
    uint64_t src;           /* offset that element 0 of the whole part would have, modulo 2^64 */
    const uint64_t *stride; /* bytes */
    const uint64_t *local_dim;
    const struct ckpt_nt_pair *pair;
    size_t npair;
};

struct state {
    const char *name;
    enum ckpt_dtype dtype;
    uint32_t rank;
    const uint64_t *dim; /* shape of the parameter; NULL: a scalar */
    CKPT_VEC(struct part) parts;
    bool bad; /* left out */
};

struct load {
    struct ckpt_dir *dir; /* the folder */
    const struct ckpt_nt_save *save;
    struct ckpt_catalog *cat;
    struct ckpt_arena names;
    struct ckpt_map index;
    CKPT_VEC(struct file) files;
    CKPT_VEC(struct state) states;
    uint32_t ndp;   /* number of data-parallel ranks; 0: not divided over them */
    json_t *config; /* the optimizer's config, or NULL */
};

/* One file that is being read. */
struct reading {
    struct load *l;
    const struct file *file;
    struct ckpt_nt_state_file held;
    struct ckpt_err err; /* why it could not be read */
    uint32_t source;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->files.len; i++)
        free(l->files.ptr[i].name);
    for (size_t i = 0; i < l->states.len; i++)
        ckpt_vec_release(&l->states.ptr[i].parts);
    ckpt_vec_release(&l->files);
    ckpt_vec_release(&l->states);
    ckpt_map_release(&l->index);
    ckpt_arena_release(&l->names);
    json_decref(l->config);
    ckpt_dir_unref(l->dir);
}

/* ---- files ---- */

/* Parse "_tp-1-of-2" at *s; false: the text is different. */
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
    uint32_t npp, ntp, size;

    if (!ckpt_has_prefix(s, "optimizer_"))
        return 0;
    s += strlen("optimizer");
    if (!take_rank(&s, "pp", &f.pp, &npp))
        return 0;
    (void)take_rank(&s, "dp", &f.dp, &f.ndp);
    if (!take_rank(&s, "tp", &f.tp, &ntp))
        return 0;
    (void)take_rank(&s, "exp", &f.ep, &size);
    if (strcmp(s, ".pt") != 0 || (l->save->npp && npp != l->save->npp) ||
        (l->save->ntp && ntp != l->save->ntp))
        return 0; /* not a state, or a state of another save */
    if (ckpt_vec_add(&l->files, &own) < 0 || !(f.name = strdup(e->name)))
        return ckpt_nomem(err);
    *own = f;
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct file *p = a, *q = b;
    int c = ckpt_u64_cmp(p->pp, q->pp);

    c = c ? c : ckpt_u64_cmp(p->tp, q->tp);
    c = c ? c : ckpt_u64_cmp(p->ep, q->ep);
    return c ? c : ckpt_u64_cmp(p->dp, q->dp);
}

/* Read the number of data-parallel ranks from the last save's own file; false: it does not say. */
static bool recorded_ndp(const json_t *config, uint32_t *ret)
{
    const char *type = ckpt_json_str(config, "type");
    const char *size = ckpt_json_str(ckpt_json_at(config, "parallelism"), "dp_size");
    unsigned long long n = 0;

    if (!type)
        return false;
    if (strcmp(type, "ZeroDistributedOptimizer") == 0 &&
        (!size || !ckpt_parse_u64(size, strlen(size), &n) || n == 0 || n > UINT32_MAX))
        return false;
    *ret = (uint32_t)n;
    return true;
}

static bool has_files(const struct load *l, uint32_t ndp)
{
    for (size_t i = 0; i < l->files.len; i++)
        if (l->files.ptr[i].ndp == ndp)
            return true;
    return false;
}

/* Keep the files of one save: the directory can have files of several saves with different
 * divisions. */
static void choose_save(struct load *l)
{
    size_t kept = 0;
    bool mixed = false;

    for (size_t i = 0; i < l->files.len; i++) {
        l->ndp = l->files.ptr[0].ndp;
        mixed |= l->files.ptr[i].ndp != l->ndp;
    }
    const bool known = !mixed || (recorded_ndp(l->config, &l->ndp) && has_files(l, l->ndp));
    if (!known)
        ckpt_catalog_warn(l->cat,
                          "left out: optimizer states in '%s': the files of several saves lie "
                          "there, and optimizer_config.json does not say which to use",
                          ckpt_dir_path(l->dir));
    for (size_t i = 0; i < l->files.len; i++)
        if (known && l->files.ptr[i].ndp == l->ndp)
            l->files.ptr[kept++] = l->files.ptr[i];
        else
            free(l->files.ptr[i].name);
    l->files.len = kept;
}

static int find_files(struct load *l, struct ckpt_err *err)
{
    struct ckpt_err e = {0};

    if (ckpt_dir_list(l->dir, see, l, err) < 0)
        return -1;
    if (ckpt_config_read_if(l->dir, "optimizer_config.json", MAX_CONFIG_BYTES, &l->config, &e) <
        0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        ckpt_catalog_warn(l->cat, "not used: %s", e.text);
    }
    choose_save(l);
    if (l->files.len)
        qsort(l->files.ptr, l->files.len, sizeof *l->files.ptr, by_place);
    return 0;
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

/* A state of a parameter in the file that is read. */
struct value {
    const char *param;
    struct ckpt_torch_layout layout;
    uint64_t storage; /* its offset in the file */
};

/* Add a scalar of a parameter, which is the same on all ranks. */
static int add_scalar(const struct reading *f, struct state *s, const struct value *v,
                      struct ckpt_err *err)
{
    const struct ckpt_torch_layout *t = &v->layout;
    static const struct ckpt_nt_pair all = {0};
    const struct part part = {.source = f->source,
                              .in = {0, 1},
                              .src = v->storage + t->first * ckpt_dtype_size(t->dtype),
                              .pair = &all,
                              .npair = 1};

    if (s->dim)
        return ckpt_fail(err, CKPT_CONFLICT, "it is a number in this file and a tensor in others");
    s->dtype = t->dtype;
    return s->parts.len || ckpt_vec_push(&s->parts, part) == 0 ? 0 : ckpt_nomem(err);
}

static int fail_shape(const struct ckpt_torch_layout *t, const struct ckpt_nt_part *of,
                      struct ckpt_err *err)
{
    char a[CKPT_SHAPE_TEXT], b[CKPT_SHAPE_TEXT];

    return ckpt_fail(err, CKPT_CONFLICT, "it is %s, the parameter's file has %s",
                     ckpt_shape_text(t->dim, t->rank, a, sizeof a),
                     ckpt_shape_text(of->local_dim, of->rank, b, sizeof b));
}

static int fail_interval(const struct ckpt_torch_layout *t, const struct ckpt_nt_interval *in,
                         const struct file *file, struct ckpt_err *err)
{
    char a[CKPT_SHAPE_TEXT];

    return ckpt_fail(
        err, CKPT_CONFLICT,
        "it is %s, dp-rank %u of %u has elements %" PRIu64 "..%" PRIu64 " of the parameter's file",
        ckpt_shape_text(t->dim, t->rank, a, sizeof a), file->dp, file->ndp, in->lo, in->hi);
}

/* Place a tensor that is a rank's whole part. */
static int lay_whole(const struct ckpt_nt_part *of, const struct ckpt_torch_layout *t,
                     uint64_t *stride, struct part *p, struct ckpt_err *err)
{
    if (t->rank != of->rank || memcmp(t->dim, of->local_dim, t->rank * sizeof *t->dim) != 0)
        return fail_shape(t, of, err);
    for (uint32_t k = 0; k < t->rank; k++)
        stride[k] = t->stride[k] * ckpt_dtype_size(t->dtype);
    p->in = (struct ckpt_nt_interval){0, UINT64_MAX};
    return 0;
}

/* Place a tensor that is an interval of a rank's part, relative to where the whole part would
 * begin. */
static int lay_interval(const struct reading *f, const struct ckpt_nt_part *of,
                        const struct value *v, uint64_t *stride, struct part *p,
                        struct ckpt_err *err)
{
    const struct ckpt_torch_layout *t = &v->layout;
    const json_t *offsets = ckpt_json_at(f->l->config, "configs.param_name_to_dp_rank_offsets");
    const uint64_t step = t->stride[0] * ckpt_dtype_size(t->dtype);
    uint64_t numel = 0;

    (void)ckpt_shape_numel(of->local_dim, of->rank, &numel);
    if (ckpt_nt_zero_interval(offsets, v->param, numel, f->file->dp, f->file->ndp, &p->in, err) < 0)
        return -1;
    if (t->rank != 1 || t->dim[0] != p->in.hi - p->in.lo)
        return fail_interval(t, &p->in, f->file, err);
    ckpt_shape_strides(of->local_dim, of->rank, stride);
    for (uint32_t k = 0; k < of->rank; k++)
        stride[k] *= step;
    p->src -= p->in.lo * step;
    return 0;
}

static int add_part(const struct reading *f, struct state *s, const struct ckpt_nt_part *of,
                    const struct value *v, struct ckpt_err *err)
{
    const struct ckpt_torch_layout *t = &v->layout;
    uint64_t *stride = ckpt_arena_alloc(&f->l->names, (of->rank + 1) * sizeof *stride);
    struct part p = {.tp = of->sharded ? f->file->tp : 0,
                     .ep = of->has_ep ? f->file->ep : 0,
                     .dp = f->file->dp,
                     .source = f->source,
                     .src = v->storage + t->first * ckpt_dtype_size(t->dtype),
                     .stride = stride,
                     .local_dim = of->local_dim,
                     .pair = of->pair,
                     .npair = of->npair};

    if (!stride)
        return ckpt_nomem(err);
    if ((f->file->ndp ? lay_interval(f, of, v, stride, &p, err)
                      : lay_whole(of, t, stride, &p, err)) < 0)
        return -1;
    if (s->parts.len && !s->dim)
        return ckpt_fail(err, CKPT_CONFLICT, "it is a tensor in this file and a number in others");
    if (s->parts.len && s->dtype != t->dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "it is %s in this file and %s in others",
                         ckpt_dtype_name(t->dtype), ckpt_dtype_name(s->dtype));
    s->dtype = t->dtype;
    s->rank = of->rank;
    s->dim = of->dim;
    return ckpt_vec_push(&s->parts, p) < 0 ? ckpt_nomem(err) : 0;
}

static int add_value(const struct reading *f, struct state *s, const char *param,
                     const struct ckpt_nt_state *value, struct ckpt_err *err)
{
    struct value v = {.param = param};
    struct ckpt_nt_part of;

    if (ckpt_nt_state_layout(&f->held, value, &v.layout, &v.storage, err) < 0)
        return -1;
    if (v.layout.rank == 0)
        return add_scalar(f, s, &v, err);
    if (!f->l->save->find(f->l->save->ctx, param, f->file->tp, f->file->ep, &of))
        return ckpt_fail(err, CKPT_MISSING, "there is no such parameter of tp-rank %u",
                         f->file->tp);
    return !of.sharded && f->file->tp != 0 ? 0 : add_part(f, s, &of, &v, err);
}

static int add_entry(void *ctx, const struct ckpt_nt_state *value, struct ckpt_err *err)
{
    const struct reading *f = ctx;
    const char *param =
        value->param + (ckpt_has_prefix(value->param, "module.") ? strlen("module.") : 0);
    ckpt_cleanup(ckpt_freep) char *name =
        value->key ? ckpt_asprintf("optimizer.state.%s.%s", param, value->key)
                   : ckpt_asprintf("optimizer.gradient_accumulator.%s", param);
    struct ckpt_err e = {0};

    if (!name)
        return ckpt_nomem(err);
    struct state *s = find_state(f->l, name, err);
    if (!s)
        return -1;
    if (s->bad || add_value(f, s, param, value, &e) == 0)
        return 0;
    if (e.code == CKPT_NOMEM)
        return ckpt_nomem(err);
    s->bad = true;
    ckpt_catalog_warn(f->l->cat, "left out: '%s' in '%s/%s': %s", name, ckpt_dir_path(f->l->dir),
                      f->file->name, e.text);
    return 0;
}

static int read_file(void *ctx, size_t i, struct ckpt_err *err)
{
    struct reading *f = (struct reading *)ctx + i;

    (void)err; /* if a file cannot be read, only its own tensors are left out */
    (void)ckpt_nt_state_file_read(f->l->dir, f->file->name, f->l->save->opt->pool, &f->held,
                                  &f->err);
    return 0;
}

static int add_file(struct reading *f, struct ckpt_err *err)
{
    if (f->err.code == CKPT_NOMEM)
        return ckpt_nomem(err);
    if (f->err.code != CKPT_OK) {
        ckpt_catalog_warn(f->l->cat, "left out: '%s/%s': %s", ckpt_dir_path(f->l->dir),
                          f->file->name, f->err.text);
        return 0;
    }
    f->source = ckpt_catalog_add_source(f->l->cat, f->held.source, err);
    return f->source == UINT32_MAX ? -1 : ckpt_nt_state_file_each(&f->held, add_entry, f, err);
}

/* Read several files at a time, and then add them in order. */
static int add_files(struct load *l, size_t begin, size_t n, struct ckpt_err *err)
{
    struct reading f[AT_ONCE] = {0};

    for (size_t i = 0; i < n; i++)
        f[i] = (struct reading){.l = l, .file = &l->files.ptr[begin + i]};
    int rc = ckpt_parallel(n, l->save->opt->nthread, read_file, f, err);
    for (size_t i = 0; i < n; i++) {
        if (rc == 0)
            rc = add_file(&f[i], err);
        ckpt_nt_state_file_release(&f[i].held);
    }
    return rc;
}

/* ---- the whole ---- */

/* Order the copies of parameters that several ranks or stages (tied parameters) have; the first one
 * counts. */
static int part_cmp(const void *a, const void *b)
{
    const struct part *p = a, *q = b;
    int c = ckpt_u64_cmp(p->tp, q->tp);

    c = c ? c : ckpt_u64_cmp(p->ep, q->ep);
    c = c ? c : ckpt_u64_cmp(p->dp, q->dp);
    return c ? c : ckpt_u64_cmp(p->source, q->source);
}

static bool same_group(const struct part *p, const struct part *q)
{
    return p->tp == q->tp && p->ep == q->ep;
}

static void sort_parts(struct state *s)
{
    size_t kept = 0;

    qsort(s->parts.ptr, s->parts.len, sizeof *s->parts.ptr, part_cmp);
    for (size_t i = 0; i < s->parts.len; i++)
        if (i == 0 || !same_group(&s->parts.ptr[i], &s->parts.ptr[kept - 1]) ||
            s->parts.ptr[i].dp != s->parts.ptr[kept - 1].dp)
            s->parts.ptr[kept++] = s->parts.ptr[i];
    s->parts.len = kept;
}

struct pieces {
    CKPT_VEC(struct ckpt_piece_draft) draft;
    CKPT_VEC(struct ckpt_box) box;
};

static void pieces_release(struct pieces *p)
{
    ckpt_vec_release(&p->draft);
    ckpt_vec_release(&p->box);
}

static int add_pieces(const struct state *s, const struct part *p, struct pieces *out)
{
    struct ckpt_nt_pair clip[CKPT_MAX_SPANS];
    struct ckpt_piece_draft *d;

    for (size_t k = 0; k < p->npair; k++) {
        const size_t n = ckpt_nt_pair_clip(&p->pair[k], p->local_dim, &p->in, clip);
        for (size_t i = 0; i < n; i++) {
            uint64_t src = p->src;
            if (ckpt_vec_add(&out->draft, &d) < 0 || ckpt_vec_push(&out->box, clip[i].global) < 0)
                return -1;
            for (uint32_t r = 0; r < clip[i].local.rank; r++)
                src += clip[i].local.lo[r] * p->stride[r];
            ckpt_piece_from_box(s->dim, &clip[i].global, p->source, src, p->stride, d);
        }
    }
    return 0;
}

/* Find a group of data-parallel ranks in which a part is missing: its tensor-parallel rank, and the
 * first such rank. Ranks beyond the last element have no part. */
static bool missing_dp(const struct load *l, const struct state *s, uint32_t *ret_tp,
                       uint32_t *ret_dp)
{
    const struct part *p = s->parts.ptr;
    uint64_t numel = 0;

    for (size_t i = 0; i < s->parts.len; i++) {
        const bool first = i == 0 || !same_group(&p[i], &p[i - 1]);
        const bool last = i + 1 == s->parts.len || !same_group(&p[i], &p[i + 1]);
        const uint32_t want = first ? 0 : p[i - 1].dp + 1;
        (void)ckpt_shape_numel(p[i].local_dim, s->rank, &numel);
        *ret_tp = p[i].tp;
        *ret_dp = p[i].dp == want ? want + 1 : want;
        if (p[i].dp != want || (last && *ret_dp < ckpt_min_u64(l->ndp, numel)))
            return true;
    }
    return false;
}

static int check_state(const struct load *l, const struct state *s, const struct pieces *pieces,
                       struct ckpt_err *err)
{
    uint32_t tp, dp;
    size_t bad;

    if (s->parts.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "no file of tp-rank 0 has it");
    if (!s->dim ||
        ckpt_boxes_cover(s->dim, s->rank, pieces->box.ptr, pieces->box.len, &bad, err) == 0)
        return 0;
    if (bad != SIZE_MAX) {
        const uint32_t source = pieces->draft.ptr[bad].source;
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(l->cat->sources.ptr[source]);
        return ckpt_err_in(err, "'%s' overlaps another file", name ? name : "?");
    }
    return l->ndp && missing_dp(l, s, &tp, &dp)
               ? ckpt_err_in(err, "no file has the part of dp-rank %u of %u (tp-rank %u)", dp,
                             l->ndp, tp)
               : -1;
}

static int add_state(struct load *l, struct state *s, struct ckpt_err *err)
{
    ckpt_cleanup(pieces_release) struct pieces pieces = {0};
    struct ckpt_err e = {0};
    size_t index;

    if (s->bad)
        return 0;
    if (s->parts.len)
        sort_parts(s);
    for (size_t i = 0; i < s->parts.len; i++)
        if (add_pieces(s, &s->parts.ptr[i], &pieces) < 0)
            return ckpt_nomem(err);
    if (check_state(l, s, &pieces, &e) < 0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        ckpt_catalog_warn(l->cat, "left out: '%s': %s", s->name, e.text);
        return 0;
    }
    return ckpt_catalog_add(l->cat, s->name, s->dtype, s->dim, s->rank, &index, err) < 0
               ? -1
               : ckpt_catalog_set_pieces(l->cat, index, pieces.draft.ptr, pieces.draft.len, err);
}

int ckpt_nt_states_add(const struct ckpt_nt_save *save, struct ckpt_catalog *cat,
                       struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.save = save, .cat = cat};

    if (!ckpt_dir_has_dir(save->dir, FOLDER))
        return 0;
    if (ckpt_dir_open_below(save->dir, FOLDER, &l.dir, err) < 0 || find_files(&l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.files.len; i += AT_ONCE)
        if (add_files(&l, i, ckpt_min_u64(AT_ONCE, l.files.len - i), err) < 0)
            return -1;
    for (size_t i = 0; i < l.states.len; i++)
        if (add_state(&l, &l.states.ptr[i], err) < 0)
            return -1;
    return 0;
}
