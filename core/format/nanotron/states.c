/* SPDX-License-Identifier: Apache-2.0 */
/* Combining the ranks' pickles of optimizer states to whole tensors. */
#include "format/nanotron/shards.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/take.h"
#include "container/config.h"
#include "container/torch_file.h"
#include "format/pieces.h"
#include "format/states.h"

#define FOLDER "optimizer"

enum {
    MAX_CONFIG_BYTES = 256 * 1024 * 1024, /* it has an entry for each parameter and rank */
    AT_ONCE = 32,                         /* number of files that are read at a time */
};

/* ---- one file ----
 *
 *     {"state": {NUMBER: {KEY: tensor}}, "names": {NUMBER: PARAMETER},
 *      "gradient_accumulator": {PARAMETER: tensor}, ...}
 *
 * Every tensor is located when the file is read, because that costs one read per tensor and files
 * are read in parallel. */

/* One tensor of the file; names are borrowed from its pickle. */
struct value {
    const char *param;
    const char *key; /* NULL: the tensor is the parameter in F32 */
    ckpt_pv value;
    struct ckpt_torch_tensor at;
    bool found; /* false: `at` is not set, and ckpt_torch_file_tensor says why */
};

struct state_file {
    struct ckpt_torch_file file;
    CKPT_VEC(struct value) states; /* values that are no tensors, or have no name, are left out */
};

static int keep_value(struct state_file *f, const char *param, const char *key, ckpt_pv v,
                      struct ckpt_err *err)
{
    struct value *s;

    if (!param || ckpt_torch_is_data(&f->file.p, v))
        return 0;
    if (ckpt_vec_add(&f->states, &s) < 0)
        return ckpt_nomem(err);
    *s = (struct value){.param = param, .key = key, .value = v};
    s->found = ckpt_torch_file_tensor(&f->file, v, &s->at, NULL) == 0;
    return 0;
}

/* The name of a parameter from its number. In most files both have the same order, which is tried
 * first. */
static const char *name_of(const struct ckpt_pickle *p, ckpt_pv names, ckpt_pv id, size_t guess)
{
    const size_t n = ckpt_pv_npair(p, names);

    if (guess < n && ckpt_pv_key(p, names, guess) == id)
        return ckpt_pv_str(p, ckpt_pv_value(p, names, guess));
    for (size_t i = 0; i < n; i++)
        if (ckpt_pv_key(p, names, i) == id)
            return ckpt_pv_str(p, ckpt_pv_value(p, names, i));
    return ckpt_pv_str(p, id);
}

/* {number: {key: tensor}} */
static int add_numbered(struct state_file *f, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->file.p;
    const ckpt_pv states = ckpt_pv_get(p, p->root, "state"),
                  names = ckpt_pv_get(p, p->root, "names");

    for (size_t i = 0; i < ckpt_pv_npair(p, states); i++) {
        const char *param = name_of(p, names, ckpt_pv_key(p, states, i), i);
        const ckpt_pv state = ckpt_pv_value(p, states, i);
        for (size_t k = 0; k < ckpt_pv_npair(p, state); k++) {
            const char *key = ckpt_pv_str(p, ckpt_pv_key(p, state, k));
            if (key && keep_value(f, param, key, ckpt_pv_value(p, state, k), err) < 0)
                return -1;
        }
    }
    return 0;
}

/* {name: tensor} */
static int add_masters(struct state_file *f, struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->file.p;
    const ckpt_pv dict = ckpt_pv_get(p, p->root, "gradient_accumulator");

    for (size_t i = 0; i < ckpt_pv_npair(p, dict); i++)
        if (keep_value(f, ckpt_pv_str(p, ckpt_pv_key(p, dict, i)), NULL, ckpt_pv_value(p, dict, i),
                       err) < 0)
            return -1;
    return 0;
}

/* ---- all files ---- */

struct file {
    const char *name;
    struct ckpt_nt_rank pp, dp, tp, ep; /* dp.size 0: not divided over data-parallel ranks */
};

struct part { /* The part of a state in one file. */
    uint32_t tp, ep, dp;
    uint32_t source;
    struct ckpt_nt_interval in;
    uint64_t src;           /* offset that element 0 of the whole part would have, modulo 2^64 */
    const uint64_t *stride; /* bytes */
    const struct ckpt_nt_shard *of; /* the same part of the parameter; NULL: a scalar */
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
    const struct ckpt_nt_shards *set;
    const struct ckpt_nt_topology *topology;
    struct ckpt_catalog *cat;
    struct ckpt_arena names;
    struct ckpt_map params; /* by name */
    struct ckpt_map index;  /* states by name */
    CKPT_VEC(struct file) files;
    CKPT_VEC(struct state) states;
    uint32_t ndp;   /* number of data-parallel ranks; 0: not divided over them */
    json_t *config; /* the optimizer's config, or NULL */
};

/* One file that is being read. */
struct reading {
    struct load *l;
    const struct file *file;
    struct state_file held;
    struct ckpt_err err; /* why it could not be read */
    uint32_t source;
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->states.len; i++)
        ckpt_vec_release(&l->states.ptr[i].parts);
    ckpt_vec_release(&l->files);
    ckpt_vec_release(&l->states);
    ckpt_map_release(&l->params);
    ckpt_map_release(&l->index);
    ckpt_arena_release(&l->names);
    json_decref(l->config);
    ckpt_dir_unref(l->dir);
}

/* ---- files ---- */

/* Parse a name; false: it is not a state's, or that of another save. */
static bool parse_file(const struct load *l, const char *name, struct file *ret)
{
    const char *s = name;

    if (!ckpt_take_text(&s, "optimizer") || !ckpt_nt_take_rank(&s, "pp", "-", &ret->pp))
        return false;
    (void)ckpt_nt_take_rank(&s, "dp", "-", &ret->dp);
    if (!ckpt_nt_take_rank(&s, "tp", "-", &ret->tp))
        return false;
    (void)ckpt_nt_take_rank(&s, "exp", "-", &ret->ep);
    const struct ckpt_nt_topology of = {ret->pp.size, ret->tp.size, 0};
    return strcmp(s, ".pt") == 0 && ckpt_nt_topology_fits(&of, l->topology);
}

static int by_place(const void *a, const void *b)
{
    const struct file *p = a, *q = b;
    int c = ckpt_u64_cmp(p->pp.rank, q->pp.rank);

    c = c ? c : ckpt_u64_cmp(p->tp.rank, q->tp.rank);
    c = c ? c : ckpt_u64_cmp(p->ep.rank, q->ep.rank);
    return c ? c : ckpt_u64_cmp(p->dp.rank, q->dp.rank);
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
        if (l->files.ptr[i].dp.size == ndp)
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
        l->ndp = l->files.ptr[0].dp.size;
        mixed |= l->files.ptr[i].dp.size != l->ndp;
    }
    const bool known = !mixed || (recorded_ndp(l->config, &l->ndp) && has_files(l, l->ndp));
    if (!known)
        ckpt_catalog_warn(l->cat,
                          "left out: optimizer states in '%s': the files of several saves lie "
                          "there, and optimizer_config.json does not say which to use",
                          ckpt_dir_path(l->dir));
    for (size_t i = 0; i < l->files.len; i++)
        if (known && l->files.ptr[i].dp.size == l->ndp)
            l->files.ptr[kept++] = l->files.ptr[i];
    l->files.len = kept;
}

static int find_files(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry entry;
    struct ckpt_err e = {0};

    if (ckpt_entries_read(l->dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &entry)) {
        struct file f = {0};
        if (!parse_file(l, entry.name, &f))
            continue;
        if (!(f.name = ckpt_dir_intern(l->dir, entry.name)) || ckpt_vec_push(&l->files, f) < 0)
            return ckpt_nomem(err);
    }
    if (ckpt_config_read_if(l->dir, "optimizer_config.json", MAX_CONFIG_BYTES, &l->config, &e) <
        0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        ckpt_catalog_warn(l->cat, "not used: %s", e.text);
    }
    choose_save(l);
    ckpt_sort(l->files.ptr, l->files.len, by_place);
    return 0;
}

/* ---- tensors ---- */

/* Find the shard of a parameter that these ranks wrote; of a parameter that is not sharded, the
 * only one. NULL: there is none. */
static const struct ckpt_nt_shard *find_shard(const struct load *l, const char *param,
                                              const struct file *by)
{
    const uint32_t at = ckpt_map_find(&l->params, param);

    if (at == CKPT_NONE)
        return NULL;
    const struct ckpt_nt_param *p = &l->set->params.ptr[at];
    for (size_t i = p->first; i < p->first + p->n; i++) {
        const struct ckpt_nt_name *n = &l->set->shards.ptr[i].name;
        if (!n->sharded || (n->tp.rank == by->tp.rank && (!n->has_ep || n->ep.rank == by->ep.rank)))
            return &l->set->shards.ptr[i];
    }
    return NULL;
}

static struct state *find_state(struct load *l, const char *name, struct ckpt_err *err)
{
    char *own = ckpt_arena_strdup(&l->names, name);
    const uint32_t at = own ? ckpt_map_add(&l->index, own, (uint32_t)l->states.len) : CKPT_NONE;
    struct state *s;

    if (at == CKPT_NONE || (at == l->states.len && ckpt_vec_add(&l->states, &s) < 0))
        return (void)ckpt_nomem(err), NULL;
    s = &l->states.ptr[at];
    s->name = s->name ? s->name : own;
    return s;
}

/* Add a scalar of a parameter, which is the same on all ranks. */
static int add_scalar(const struct reading *f, struct state *s, const struct ckpt_torch_tensor *t,
                      struct ckpt_err *err)
{
    const struct part part = {.source = f->source, .src = t->off};

    if (s->dim)
        return ckpt_fail(err, CKPT_CONFLICT, "it is a number in this file and a tensor in others");
    s->dtype = t->dtype;
    return s->parts.len || ckpt_vec_push(&s->parts, part) == 0 ? 0 : ckpt_nomem(err);
}

/* Place a tensor that is an interval of a rank's part, relative to where the whole part would
 * begin. */
static int lay_interval(const struct reading *f, const struct ckpt_nt_shard *of, const char *param,
                        const struct ckpt_torch_tensor *t, uint64_t *stride, struct part *p,
                        struct ckpt_err *err)
{
    const json_t *offsets = ckpt_json_at(f->l->config, "configs.param_name_to_dp_rank_offsets");
    const struct ckpt_nt_rank *dp = &f->file->dp;
    uint64_t numel = 0;

    (void)ckpt_shape_numel(of->local_dim, of->rank, &numel);
    if (ckpt_nt_zero_interval(offsets, param, numel, dp->rank, dp->size, &p->in, err) < 0)
        return -1;
    if (t->rank != 1 || t->dim[0] != p->in.hi - p->in.lo)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "it is %s, dp-rank %u of %u has elements %" PRIu64 "..%" PRIu64
                         " of the parameter's file",
                         ckpt_shape_text(t->dim, t->rank).text, dp->rank, dp->size, p->in.lo,
                         p->in.hi);
    ckpt_shape_strides(of->local_dim, of->rank, stride);
    for (uint32_t k = 0; k < of->rank; k++)
        stride[k] *= t->stride[0];
    p->src -= p->in.lo * t->stride[0];
    return 0;
}

static int add_part(const struct reading *f, struct state *s, const struct ckpt_nt_shard *of,
                    const char *param, const struct ckpt_torch_tensor *t, struct ckpt_err *err)
{
    uint64_t *stride = ckpt_arena_alloc(&f->l->names, (of->rank + 1) * sizeof *stride);
    struct part p = {.tp = of->name.sharded ? f->file->tp.rank : 0,
                     .ep = of->name.has_ep ? f->file->ep.rank : 0,
                     .dp = f->file->dp.rank,
                     .source = f->source,
                     .in = {0, UINT64_MAX},
                     .src = t->off,
                     .stride = stride,
                     .of = of};

    if (!stride)
        return ckpt_nomem(err);
    if (f->file->dp.size) {
        if (lay_interval(f, of, param, t, stride, &p, err) < 0)
            return -1;
    } else {
        if (t->rank != of->rank || memcmp(t->dim, of->local_dim, t->rank * sizeof *t->dim) != 0)
            return ckpt_fail(err, CKPT_CONFLICT, "it is %s, the parameter's file has %s",
                             ckpt_shape_text(t->dim, t->rank).text,
                             ckpt_shape_text(of->local_dim, of->rank).text);
        memcpy(stride, t->stride, t->rank * sizeof *stride);
    }
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
                     const struct value *value, struct ckpt_err *err)
{
    const uint32_t tp = f->file->tp.rank;
    struct ckpt_torch_tensor t = value->at;

    if (!value->found && ckpt_torch_file_tensor(&f->held.file, value->value, &t, err) < 0)
        return -1;
    if (t.rank == 0)
        return add_scalar(f, s, &t, err);
    const struct ckpt_nt_shard *of = find_shard(f->l, param, f->file);
    if (!of)
        return ckpt_fail(err, CKPT_MISSING, "there is no such parameter of tp-rank %u", tp);
    return !of->name.sharded && tp != 0 ? 0 : add_part(f, s, of, param, &t, err);
}

static int add_entry(const struct reading *f, const struct value *value, struct ckpt_err *err)
{
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
    if (ckpt_torch_file_open(f->l->dir, f->file->name, f->l->set->opt->pool, &f->held.file,
                             &f->err) == 0 &&
        add_numbered(&f->held, &f->err) == 0)
        (void)add_masters(&f->held, &f->err);
    return 0;
}

static int add_file(struct reading *f, struct ckpt_err *err)
{
    if (f->err.code == CKPT_NOMEM)
        return ckpt_nomem(err);
    if (f->err.code != CKPT_OK) {
        ckpt_catalog_warn(f->l->cat, "left out: %s", f->err.text);
        return 0;
    }
    f->source = ckpt_catalog_add_source(f->l->cat, f->held.file.source, err);
    if (f->source == UINT32_MAX)
        return -1;
    for (size_t i = 0; i < f->held.states.len; i++)
        if (add_entry(f, &f->held.states.ptr[i], err) < 0)
            return -1;
    return 0;
}

/* Read several files at a time, and then add them in order. */
static int add_files(struct load *l, size_t begin, size_t n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct reading *f = calloc(n, sizeof *f);

    if (!f)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        f[i].l = l;
        f[i].file = &l->files.ptr[begin + i];
    }
    int rc = ckpt_parallel(n, 0, read_file, f, err);
    for (size_t i = 0; i < n; i++) {
        if (rc == 0)
            rc = add_file(&f[i], err);
        ckpt_vec_release(&f[i].held.states);
        ckpt_torch_file_release(&f[i].held.file);
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

static int add_pieces(const struct state *s, const struct part *p, struct ckpt_pieces *out,
                      struct ckpt_err *err)
{
    static const struct ckpt_box scalar;

    if (!p->of)
        return ckpt_pieces_add(out, NULL, &scalar, p->source, p->src, NULL, err);
    for (size_t k = 0; k < p->of->npair; k++)
        if (ckpt_pieces_add_part(out, s->dim, &p->of->pair[k], p->of->local_dim, p->in.lo, p->in.hi,
                                 p->source, p->src, p->stride, err) < 0)
            return -1;
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
        (void)ckpt_shape_numel(p[i].of->local_dim, s->rank, &numel);
        *ret_tp = p[i].tp;
        *ret_dp = p[i].dp == want ? want + 1 : want;
        if (p[i].dp != want || (last && *ret_dp < ckpt_min_u64(l->ndp, numel)))
            return true;
    }
    return false;
}

static int check_state(const struct load *l, const struct state *s,
                       const struct ckpt_pieces *pieces, struct ckpt_err *err)
{
    uint32_t tp, dp;
    bool gap;

    if (s->parts.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "no file of tp-rank 0 has it");
    if (!s->dim || ckpt_pieces_cover(pieces, l->cat, s->dim, s->rank, &gap, err) == 0)
        return 0;
    return gap && l->ndp && missing_dp(l, s, &tp, &dp)
               ? ckpt_err_in(err, "no file has the part of dp-rank %u of %u (tp-rank %u)", dp,
                             l->ndp, tp)
               : -1;
}

static int add_state(struct load *l, struct state *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};
    struct ckpt_err e = {0};

    if (s->bad)
        return 0;
    if (s->parts.len)
        sort_parts(s);
    for (size_t i = 0; i < s->parts.len; i++)
        if (add_pieces(s, &s->parts.ptr[i], &pieces, err) < 0)
            return -1;
    if (check_state(l, s, &pieces, &e) < 0) {
        if (e.code == CKPT_NOMEM)
            return ckpt_nomem(err);
        ckpt_catalog_warn(l->cat, "left out: '%s': %s", s->name, e.text);
        return 0;
    }
    return ckpt_pieces_catalog(&pieces, l->cat, s->name, s->dtype, s->dim, s->rank, err);
}

/* optimizer.gradient_accumulator.PARAMETER is the parameter in F32, the master. */
static bool parse_name(const char *name, struct ckpt_state_name *ret)
{
    const char *parameter = name;

    if (!ckpt_take_text(&parameter, "optimizer.gradient_accumulator."))
        return ckpt_state_parse_torch(name, ret);
    *ret = (struct ckpt_state_name){.root = name,
                                    .parameter = parameter,
                                    .parameter_len = strlen(parameter),
                                    .kind = "master",
                                    .kind_len = strlen("master")};
    return true;
}

int ckpt_nt_states_add(const struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                       struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.set = set, .topology = t, .cat = cat};

    if (!ckpt_dir_has_dir(set->dir, FOLDER))
        return 0;
    if (ckpt_dir_open_below(set->dir, FOLDER, &l.dir, err) < 0 || find_files(&l, err) < 0)
        return -1;
    for (size_t i = 0; i < set->params.len; i++)
        if (ckpt_map_add(&l.params, set->params.ptr[i].name, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    for (size_t i = 0; i < l.files.len; i += AT_ONCE)
        if (add_files(&l, i, ckpt_min_u64(AT_ONCE, l.files.len - i), err) < 0)
            return -1;
    for (size_t i = 0; i < l.states.len; i++)
        if (add_state(&l, &l.states.ptr[i], err) < 0)
            return -1;
    return ckpt_states_label(cat, parse_name, err);
}
