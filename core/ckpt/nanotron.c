/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron: one safetensors file per parameter and shard, below model/; no manifest, so the tree is
 * scanned and coverage decides.
 *
 *     scan the directories -> shards, grouped by parameter -> one topology -> headers, in parallel
 * -> pieces -> coverage
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/par.h"
#include "base/str.h"
#include "ckpt/nanotron_name.h"
#include "ckpt/nanotron_objects.h"
#include "ckpt/nanotron_slices.h"
#include "ckpt/nanotron_states.h"
#include "ckpt/readers.h"
#include "container/config.h"
#include "container/safetensors.h"

enum {
    MAX_DEPTH = 32,
    MAX_LINKED = 65536, /* folders reached by links, which make many of few */
    MAX_FOLDERS = 2 * 1000 * 1000,
    MAX_SHARDS = 8 * 1000 * 1000,
    MAX_LATEST_BYTES = 64,
    MAX_VERSION = 16,
};

/* ---- the scan ---- */

struct shard {
    const char *file; /* name in its directory */
    struct ckpt_nt_name name;
    uint32_t folder;
    uint32_t param;
    /* from its header */
    struct ckpt_source *source;
    uint64_t *dim; /* of the whole parameter */
    uint64_t *local_dim;
    struct ckpt_nt_pair *pair;
    size_t npair;
    uint64_t off; /* of the data */
    uint32_t rank;
    enum ckpt_dtype dtype;
    char version[MAX_VERSION]; /* of the writer; "" where the file does not say (plain ones never
                                  do) */
};

struct subdir {
    char *name;
    bool linked;
};

struct folder {
    struct ckpt_dir *dir;
    const char *path; /* dotted, below model/ */
    uint32_t parent;
    unsigned depth;
    bool linked; /* it, or one that it lies in, was reached by a link */
    /* what listing it found */
    CKPT_VEC(struct subdir) subdirs;
    CKPT_VEC(char *) files;
};

struct param {
    const char *name; /* dotted */
    size_t first, n;  /* shards, once sorted */
};

struct topology {
    uint32_t pp, tp, ep; /* ep 0: none of its files names one */
};

struct load {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_arena names; /* of files, folders and parameters */
    CKPT_VEC(struct folder) folders;
    size_t nlinked; /* of them */
    CKPT_VEC(struct shard) shards;
    CKPT_VEC(struct param) params;
    json_t *meta;   /* checkpoint_metadata.json, or NULL */
    json_t *config; /* config.yaml, or NULL */
    struct ckpt_catalog *cat;
};

static void folder_release(struct folder *f)
{
    for (size_t i = 0; i < f->subdirs.len; i++)
        free(f->subdirs.ptr[i].name);
    for (size_t i = 0; i < f->files.len; i++)
        free(f->files.ptr[i]);
    ckpt_vec_release(&f->subdirs);
    ckpt_vec_release(&f->files);
}

static void shard_release(struct shard *s)
{
    free(s->dim);
    free(s->local_dim);
    free(s->pair);
    ckpt_source_unref(s->source);
}

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->folders.len; i++) {
        folder_release(&l->folders.ptr[i]);
        ckpt_dir_unref(l->folders.ptr[i].dir);
    }
    for (size_t i = 0; i < l->shards.len; i++)
        shard_release(&l->shards.ptr[i]);
    ckpt_vec_release(&l->folders);
    ckpt_vec_release(&l->shards);
    ckpt_vec_release(&l->params);
    ckpt_arena_release(&l->names);
    json_decref(l->meta);
    json_decref(l->config);
    ckpt_catalog_free(l->cat);
}

static int see_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct folder *f = ctx;
    struct ckpt_nt_name parsed;
    bool weight = e->kind == CKPT_ENTRY_DIR ? ckpt_nt_name_parse(e->name, &parsed)
                                            : ckpt_has_prefix(e->name, "model_");
    char *name;

    if (weight && ckpt_has_suffix(e->name, "_metadata.pkl"))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s': FP8 parameters with pickled metadata are not supported",
                         ckpt_dir_path(f->dir), e->name);
    /* a FIFO under a weight's name is an error when it is opened, not a file to overlook */
    if (e->kind != CKPT_ENTRY_DIR && !weight)
        return 0;
    if (!(name = strdup(e->name)))
        return ckpt_nomem(err);
    struct subdir subdir = {name, e->is_link};
    if ((weight ? ckpt_vec_push(&f->files, name) : ckpt_vec_push(&f->subdirs, subdir)) < 0) {
        free(name);
        return ckpt_nomem(err);
    }
    return 0;
}

static int list_folder(void *ctx, size_t i, struct ckpt_err *err)
{
    struct folder *f = (struct folder *)ctx + i;
    return ckpt_dir_list(f->dir, see_entry, f, err);
}

/* "prefix.name", or the name alone if the prefix is empty; NULL: no memory. */
static const char *join_names(struct load *l, const char *prefix, const char *name, size_t len)
{
    size_t plen = strlen(prefix), dot = plen > 0;
    char *joined = ckpt_arena_alloc(&l->names, plen + dot + len + 1);

    if (joined) {
        memcpy(joined, prefix, plen);
        memcpy(joined + plen, ".", dot);
        memcpy(joined + plen + dot, name, len);
        joined[plen + dot + len] = '\0';
    }
    return joined;
}

/* Is the folder one of those that it lies in? Two links to "." would make 2^32 of them. */
static bool leads_back(const struct load *l, const struct folder *f)
{
    struct ckpt_file_id id, above;

    if (!ckpt_dir_stat(f->dir, ".", &id))
        return false;
    while (f->depth > 0) {
        f = &l->folders.ptr[f->parent];
        if (ckpt_dir_stat(f->dir, ".", &above) && above.inode == id.inode)
            return true;
    }
    return false;
}

static int add_folder(struct load *l, uint32_t parent, const struct subdir *sub,
                      struct ckpt_err *err)
{
    const struct folder up = l->folders.ptr[parent]; /* the array moves */
    struct folder *f;

    if (up.depth == MAX_DEPTH || l->folders.len >= MAX_FOLDERS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "'%s': directories nest deeper than %d, or are more than %d",
                         ckpt_dir_path(up.dir), MAX_DEPTH, MAX_FOLDERS);
    if (ckpt_vec_add(&l->folders, &f) < 0)
        return ckpt_nomem(err);
    f->parent = parent;
    f->depth = up.depth + 1;
    f->linked = up.linked || sub->linked;
    if (ckpt_dir_open_below(up.dir, sub->name, &f->dir, err) < 0)
        return -1;
    if (sub->linked && leads_back(l, f))
        return ckpt_fail(err, CKPT_FORMAT, "'%s' is a link to a directory that it lies in",
                         ckpt_dir_path(f->dir));
    if (f->linked && ++l->nlinked > MAX_LINKED)
        return ckpt_fail(err, CKPT_LIMIT, "'%s': more than %d directories are reached by links",
                         ckpt_dir_path(f->dir), MAX_LINKED);
    f->path = join_names(l, up.path, sub->name, strlen(sub->name));
    return f->path ? 0 : ckpt_nomem(err);
}

static int add_top(struct load *l, struct ckpt_err *err)
{
    struct folder *f;

    if (ckpt_vec_add(&l->folders, &f) < 0)
        return ckpt_nomem(err);
    f->path = "";
    return ckpt_dir_open_below(l->dir, "model", &f->dir, err);
}

static int add_shard(struct load *l, uint32_t folder, const char *file, struct ckpt_err *err)
{
    struct ckpt_nt_name name;
    struct shard *s;

    if (!ckpt_nt_name_parse(file, &name))
        return 0;
    if (l->shards.len >= MAX_SHARDS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d shard files", MAX_SHARDS);
    if (ckpt_vec_add(&l->shards, &s) < 0)
        return ckpt_nomem(err);
    s->folder = folder;
    s->file = ckpt_arena_strdup(&l->names, file);
    return s->file && ckpt_nt_name_parse(s->file, &s->name) ? 0 : ckpt_nomem(err);
}

/* Level by level, so that the directories of one level are listed in parallel (a network file
 * system answers slowly, but many at once). */
static int scan(struct load *l, struct ckpt_err *err)
{
    if (add_top(l, err) < 0)
        return -1;
    for (size_t begin = 0, end; begin < l->folders.len; begin = end) {
        end = l->folders.len;
        if (ckpt_parallel(end - begin, l->opt->nthread, list_folder, l->folders.ptr + begin, err) <
            0)
            return -1;
        for (size_t i = begin; i < end; i++) {
            for (size_t k = 0; k < l->folders.ptr[i].files.len; k++)
                if (add_shard(l, (uint32_t)i, l->folders.ptr[i].files.ptr[k], err) < 0)
                    return -1;
            for (size_t k = 0; k < l->folders.ptr[i].subdirs.len; k++)
                if (add_folder(l, (uint32_t)i, &l->folders.ptr[i].subdirs.ptr[k], err) < 0)
                    return -1;
            folder_release(&l->folders.ptr[i]);
        }
    }
    if (l->shards.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s/model' holds no weights", ckpt_dir_path(l->dir));
    return 0;
}

/* ---- parameters ---- */

static int shard_cmp(const void *a, const void *b)
{
    const struct shard *p = a, *q = b;

    if (p->param != q->param)
        return p->param < q->param ? -1 : 1;
    if (p->name.ep.rank != q->name.ep.rank)
        return p->name.ep.rank < q->name.ep.rank ? -1 : 1;
    if (p->name.tp.rank != q->name.tp.rank)
        return p->name.tp.rank < q->name.tp.rank ? -1 : 1;
    return strcmp(p->file, q->file);
}

/* Models saved inside DistributedDataParallel have "module." before every name. */
static const char *unwrapped(const char *path)
{
    return ckpt_has_prefix(path, "module.") ? path + strlen("module.") : path;
}

static int find_param(struct load *l, struct ckpt_map *seen, const struct shard *s, uint32_t *ret,
                      struct ckpt_err *err)
{
    const char *path = unwrapped(l->folders.ptr[s->folder].path);
    const char *name = join_names(l, path, s->name.leaf, s->name.leaf_len);
    bool is_new;

    if (!name ||
        ckpt_map_put(seen, name, strlen(name), (uint32_t)l->params.len, ret, &is_new) < 0 ||
        (is_new && ckpt_vec_push(&l->params, ((struct param){.name = name})) < 0))
        return ckpt_nomem(err);
    return 0;
}

/* Give every shard its parameter, and every parameter its run of shards. */
static int group(struct load *l, struct ckpt_err *err)
{
    struct ckpt_map seen = {0};
    int result = 0;

    for (size_t i = 0; i < l->shards.len && result == 0; i++)
        result = find_param(l, &seen, &l->shards.ptr[i], &l->shards.ptr[i].param, err);
    ckpt_map_release(&seen);
    if (result < 0)
        return -1;
    qsort(l->shards.ptr, l->shards.len, sizeof *l->shards.ptr, shard_cmp);
    for (size_t i = 0; i < l->shards.len; i++) {
        struct param *p = &l->params.ptr[l->shards.ptr[i].param];
        if (p->n++ == 0)
            p->first = i;
    }
    return 0;
}

/* ---- topology ---- */

static struct topology topology_of(const struct shard *s)
{
    return (struct topology){s->name.pp.size, s->name.tp.size,
                             s->name.has_ep ? s->name.ep.size : 0};
}

/* Does a shard belong to a save of this topology? Files without an expert part go with any EP. */
static bool fits(const struct shard *s, const struct topology *t)
{
    struct topology own = topology_of(s);
    return !s->name.sharded ||
           (own.pp == t->pp && own.tp == t->tp && (own.ep == 0 || t->ep == 0 || own.ep == t->ep));
}

/* What a save in this directory was last made with, as far as its JSON and YAML say: 0 where they
 * do not. checkpoint_metadata.json is the authority; PP and EP are only in config.yaml. */
static struct topology recorded(const struct load *l)
{
    const json_t *par = ckpt_json_at(l->config, "parallelism");
    struct topology t = {0};
    uint64_t v;

    if (ckpt_json_u64(l->meta, "tp", &v) || ckpt_json_u64(par, "tp", &v))
        t.tp = (uint32_t)v;
    if (ckpt_json_u64(par, "pp", &v))
        t.pp = (uint32_t)v;
    if (ckpt_json_u64(par, "expert_parallel_size", &v))
        t.ep = (uint32_t)v;
    return t;
}

static bool agrees(const struct topology *t, const struct topology *want)
{
    return (want->tp == 0 || t->tp == want->tp) && (want->pp == 0 || t->pp == want->pp) &&
           (want->ep == 0 || t->ep == 0 || t->ep == want->ep);
}

static bool same_save(const struct topology *a, const struct topology *b)
{
    return a->pp == b->pp && a->tp == b->tp && (a->ep == b->ep || a->ep == 0 || b->ep == 0);
}

/* All topologies that occur, those without an expert part joined to those with one. */
static int find_topologies(const struct load *l, struct topology *out, size_t cap, size_t *ret_n,
                           struct ckpt_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < l->shards.len; i++) {
        struct topology t = topology_of(&l->shards.ptr[i]);
        size_t k = 0;
        if (!l->shards.ptr[i].name.sharded)
            continue;
        while (k < n && !same_save(&out[k], &t))
            k++;
        if (k == cap)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s/model' holds shards of more than %zu topologies",
                             ckpt_dir_path(l->dir), cap);
        if (k == n)
            out[n++] = t;
        else if (out[k].ep == 0)
            out[k].ep = t.ep;
    }
    *ret_n = n;
    return 0;
}

/* Several saves of different topology lie in one directory: nothing but the metadata tells which is
 * the newer. */
static int choose_topology(const struct load *l, struct topology *ret, struct ckpt_err *err)
{
    struct topology all[16], want = recorded(l);
    size_t n = 0, at = SIZE_MAX;

    if (find_topologies(l, all, sizeof all / sizeof all[0], &n, err) < 0)
        return -1;
    if (n == 0)
        return 0;
    if (n == 1) {
        *ret = all[0];
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        if (agrees(&all[i], &want)) {
            if (at != SIZE_MAX)
                at = n;
            else
                at = i;
        }
    if (at >= n)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "'%s/model' holds shards of %zu saves (TP %u PP %u, TP %u PP %u ...) and its "
            "metadata does not say which one to use: remove the stale files",
            ckpt_dir_path(l->dir), n, all[0].tp, all[0].pp, all[1].tp, all[1].pp);
    *ret = all[at];
    ckpt_catalog_warn(l->cat,
                      "shards of %zu saves lie in '%s/model': those of TP %u PP %u are used, as "
                      "its metadata says",
                      n, ckpt_dir_path(l->dir), ret->tp, ret->pp);
    return 0;
}

/* Leave out the shards of other topologies. A parameter that then has none, or plain and sharded
 * files, is refused: never mixed. */
static int select_shards(struct load *l, const struct topology *t, struct ckpt_err *err)
{
    size_t kept = 0;

    for (size_t i = 0; i < l->params.len; i++) {
        struct param *p = &l->params.ptr[i];
        size_t first = kept, plain = 0;
        for (size_t k = p->first; k < p->first + p->n; k++) {
            struct shard s = l->shards.ptr[k];
            if (!fits(&s, t)) {
                shard_release(&s);
                continue;
            }
            plain += !s.name.sharded;
            l->shards.ptr[kept++] = s;
        }
        size_t n = kept - first;
        if (n == 0 || (plain && n > 1)) {
            /* the rest has moved or gone */
            for (size_t k = p->first + p->n; k < l->shards.len; k++)
                shard_release(&l->shards.ptr[k]);
            l->shards.len = kept;
            return n == 0
                       ? ckpt_fail(
                             err, CKPT_CONFLICT,
                             "parameter '%s' has only shards of another save than TP %u PP %u",
                             p->name, t->tp, t->pp)
                       : ckpt_fail(err, CKPT_CONFLICT,
                                   "parameter '%s' has a plain file and sharded ones, of two saves",
                                   p->name);
        }
        p->first = first;
        p->n = n;
    }
    l->shards.len = kept;
    return 0;
}

/* ---- headers ---- */

static uint64_t *copy_dim(const uint64_t *dim, uint32_t rank)
{
    uint64_t *own = malloc((rank + 1) * sizeof *own);
    if (own && rank)
        memcpy(own, dim, rank * sizeof *own);
    return own;
}

static int read_plain(struct shard *s, struct ckpt_err *err)
{
    if (!(s->dim = copy_dim(s->local_dim, s->rank)) || !(s->pair = calloc(1, sizeof *s->pair)))
        return ckpt_nomem(err);
    s->npair = 1;
    s->pair->local.rank = s->rank;
    memcpy(s->pair->local.n, s->dim, s->rank * sizeof *s->dim);
    s->pair->global = s->pair->local;
    return 0;
}

static int read_slices(struct shard *s, const json_t *metadata, struct ckpt_err *err)
{
    const char *version = ckpt_json_str(metadata, "version");
    const char *pairs = ckpt_json_str(metadata, "local_global_slices_pairs");
    const char *shape = ckpt_json_str(metadata, "unsharded_shape");
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;

    if (version && strlen(version) >= MAX_VERSION)
        return ckpt_fail(err, CKPT_FORMAT, "version '%s' is not dotted integers", version);
    if (version && ckpt_nt_version_check(version, err) < 0)
        return -1;
    (void)strcpy(s->version, version ? version : "");
    if (!pairs && ckpt_json_str(metadata, "concat_dim"))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "metadata of version 1.0 (concat_dim), which no public release wrote");
    if (!pairs || !shape)
        return ckpt_fail(err, CKPT_FORMAT, "a sharded file needs metadata '%s', which is not there",
                         pairs ? "unsharded_shape" : "local_global_slices_pairs");
    if (ckpt_nt_shape_parse(shape, dim, &rank, err) < 0)
        return -1;
    if (rank != s->rank)
        return ckpt_fail(err, CKPT_FORMAT, "data has %u dimensions, unsharded_shape %s", s->rank,
                         shape);
    if (!(s->dim = copy_dim(dim, rank)))
        return ckpt_nomem(err);
    return ckpt_nt_pairs_parse(pairs, s->local_dim, dim, rank, &s->pair, &s->npair, err);
}

static int read_header(struct load *l, struct shard *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_st_release) struct ckpt_st st = {0};
    struct ckpt_dir *dir = l->folders.ptr[s->folder].dir;

    if (ckpt_source_file_open(s->source, err) < 0 || ckpt_st_read(s->source, &st, err) < 0)
        return -1;
    const struct ckpt_st_tensor *t = ckpt_st_find(&st, "data");
    if (!t)
        return ckpt_fail(err, CKPT_FORMAT, "'%s/%s' has no tensor 'data'", ckpt_dir_path(dir),
                         s->file);
    s->dtype = t->dtype;
    s->rank = t->rank;
    s->off = t->off;
    if (!(s->local_dim = copy_dim(t->dim, t->rank)))
        return ckpt_nomem(err);
    if ((s->name.sharded ? read_slices(s, st.metadata, err) : read_plain(s, err)) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), s->file);
    return 0;
}

static int prepare_sources(struct load *l, struct ckpt_err *err)
{
    for (size_t i = 0; i < l->shards.len; i++) {
        struct shard *s = &l->shards.ptr[i];
        if (ckpt_source_file_prepare(l->folders.ptr[s->folder].dir, s->file, l->opt->pool,
                                     &s->source, err) < 0)
            return -1;
    }
    return 0;
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    return read_header(l, &l->shards.ptr[i], err);
}

/* ---- tensors ---- */

/* The TP rank whose file is not there, or the size of the group if all are. Only names without an
 * expert part form a full set of ranks. */
static uint32_t missing_rank(const struct shard *s, size_t n)
{
    uint32_t rank = 0;

    for (size_t i = 0; i < n; i++) {
        if (s[i].name.has_ep || !s[i].name.sharded)
            return s[i].name.tp.size;
        if (s[i].name.tp.rank == rank)
            rank++;
    }
    return rank;
}

static int fail_gap(const struct load *l, const struct param *p, struct ckpt_err *err)
{
    const struct shard *s = &l->shards.ptr[p->first];
    const char *dir = ckpt_dir_path(l->folders.ptr[s->folder].dir);
    uint32_t rank = missing_rank(s, p->n);

    if (rank < s->name.tp.size)
        return ckpt_err_in(
            err, "'%s': the shard of tp-rank-%u-of-%u, beside '%s', is missing: parameter '%s'",
            dir, rank, s->name.tp.size, s->file, p->name);
    return ckpt_err_in(err, "'%s': parameter '%s' (%zu files)", dir, p->name, p->n);
}

static int check_agreement(const struct load *l, const struct param *p, struct ckpt_err *err)
{
    const struct shard *a = &l->shards.ptr[p->first];
    char ta[CKPT_SHAPE_TEXT], tb[CKPT_SHAPE_TEXT];

    for (size_t i = 1; i < p->n; i++) {
        const struct shard *b = &a[i];
        if (strcmp(a->version, b->version) != 0)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "parameter '%s': '%s' was written by version '%s', '%s' by '%s'",
                             p->name, a->file, a->version, b->file, b->version);
        if (a->dtype == b->dtype && a->rank == b->rank &&
            memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0)
            continue;
        return ckpt_fail(
            err, CKPT_CONFLICT, "parameter '%s': '%s' says %s %s, '%s' says %s %s", p->name,
            a->file, ckpt_dtype_name(a->dtype), ckpt_shape_text(a->dim, a->rank, ta, sizeof ta),
            b->file, ckpt_dtype_name(b->dtype), ckpt_shape_text(b->dim, b->rank, tb, sizeof tb));
    }
    return 0;
}

static int check_coverage(const struct load *l, const struct param *p, const struct ckpt_box *box,
                          const uint32_t *owner, size_t n, struct ckpt_err *err)
{
    const struct shard *s = &l->shards.ptr[p->first];
    size_t bad;

    if (ckpt_boxes_cover(s->dim, s->rank, box, n, &bad, err) == 0)
        return 0;
    if (bad != SIZE_MAX)
        return ckpt_err_in(err, "parameter '%s': '%s' overlaps another shard", p->name,
                           s[owner[bad]].file);
    return fail_gap(l, p, err);
}

static void make_piece(const struct shard *s, const struct ckpt_nt_pair *pair, uint32_t source,
                       struct ckpt_piece_draft *out)
{
    uint64_t stride[CKPT_MAX_RANK], src = s->off;

    ckpt_shape_strides(s->local_dim, s->rank, stride);
    for (uint32_t d = 0; d < s->rank; d++) {
        stride[d] *= ckpt_dtype_size(s->dtype);
        src += pair->local.lo[d] * stride[d];
    }
    ckpt_piece_from_box(s->dim, &pair->global, source, src, stride, out);
}

struct pieces {
    CKPT_VEC(struct ckpt_piece_draft) draft;
    CKPT_VEC(struct ckpt_box) box;
    CKPT_VEC(uint32_t) owner; /* shard of the parameter */
};

static void pieces_release(struct pieces *p)
{
    ckpt_vec_release(&p->draft);
    ckpt_vec_release(&p->box);
    ckpt_vec_release(&p->owner);
}

static int collect_pieces(struct load *l, const struct param *p, struct pieces *out,
                          struct ckpt_err *err)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct shard *s = &l->shards.ptr[p->first + i];
        uint32_t source = ckpt_catalog_add_source(l->cat, s->source, err);
        if (source == UINT32_MAX)
            return -1;
        for (size_t k = 0; k < s->npair; k++) {
            struct ckpt_piece_draft *d;
            if (ckpt_box_numel(&s->pair[k].global) == 0)
                continue;
            if (ckpt_vec_add(&out->draft, &d) < 0 ||
                ckpt_vec_push(&out->box, s->pair[k].global) < 0 ||
                ckpt_vec_push(&out->owner, (uint32_t)i) < 0)
                return ckpt_nomem(err);
            make_piece(s, &s->pair[k], source, d);
        }
    }
    return 0;
}

static int add_tensor(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct param *p = &l->params.ptr[i];
    ckpt_cleanup(pieces_release) struct pieces pieces = {0};
    const struct shard *s = &l->shards.ptr[p->first];
    size_t index;

    if (check_agreement(l, p, err) < 0 || collect_pieces(l, p, &pieces, err) < 0 ||
        check_coverage(l, p, pieces.box.ptr, pieces.owner.ptr, pieces.box.len, err) < 0)
        return -1;
    return ckpt_catalog_add(l->cat, p->name, s->dtype, s->dim, s->rank, &index, err) < 0
               ? -1
               : ckpt_catalog_set_pieces(l->cat, index, pieces.draft.ptr, pieces.draft.len, err);
}

/* ---- optimizers' states ---- */

struct parts {
    const struct load *load;
    struct ckpt_map index; /* of parameters, by name */
};

/* The file of a parameter that these ranks wrote: for what is not sharded, the only one. */
static bool find_part(void *ctx, const char *param, uint32_t tp, uint32_t ep,
                      struct ckpt_nt_part *ret)
{
    const struct parts *parts = ctx;
    uint32_t i;

    if (!ckpt_map_get(&parts->index, param, strlen(param), &i))
        return false;
    const struct param *p = &parts->load->params.ptr[i];
    for (size_t k = p->first; k < p->first + p->n; k++) {
        const struct shard *s = &parts->load->shards.ptr[k];
        const bool own =
            s->name.sharded && (s->name.tp.rank != tp || (s->name.has_ep && s->name.ep.rank != ep));
        if (own)
            continue;
        *ret = (struct ckpt_nt_part){s->dim,   s->local_dim,    s->rank,       s->pair,
                                     s->npair, s->name.sharded, s->name.has_ep};
        return true;
    }
    return false;
}

static int add_states(struct load *l, const struct topology *t, struct ckpt_err *err)
{
    struct parts parts = {.load = l};
    int rc = 0;

    for (size_t i = 0; i < l->params.len && rc == 0; i++) {
        const char *name = l->params.ptr[i].name;
        uint32_t at;
        bool is_new;
        if (ckpt_map_put(&parts.index, name, strlen(name), (uint32_t)i, &at, &is_new) < 0)
            rc = ckpt_nomem(err);
    }
    if (rc == 0)
        rc = ckpt_nt_states_add(l->dir, l->opt, t->pp, t->tp, find_part, &parts, l->cat, err);
    ckpt_map_release(&parts.index);
    return rc;
}

/* ---- config ---- */

static int read_configs(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *model = NULL;

    if (ckpt_config_read_if(l->dir, "checkpoint_metadata.json", CKPT_CONFIG_MAX_BYTES, &l->meta,
                            err) < 0 ||
        ckpt_config_read_if(l->dir, "config.yaml", CKPT_CONFIG_MAX_BYTES, &l->config, err) < 0 ||
        ckpt_config_read_if(l->dir, "model_config.json", CKPT_CONFIG_MAX_BYTES, &model, err) < 0)
        return -1;
    if (!model)
        model = json_incref(ckpt_json_at(l->config, "model.model_config"));
    if (!json_is_object(model))
        return ckpt_fail(
            err, model ? CKPT_FORMAT : CKPT_MISSING,
            "'%s': neither model_config.json nor model.model_config in config.yaml is an object",
            ckpt_dir_path(l->dir));
    l->cat->config = ckpt_steal(&model);
    const char *version = ckpt_json_str(l->meta, "version");
    return version ? ckpt_nt_version_check(version, err) < 0
                         ? ckpt_err_in(err, "'%s/checkpoint_metadata.json'", ckpt_dir_path(l->dir))
                         : 0
                   : 0;
}

static int set(json_t *obj, const char *key, json_t *value)
{
    return value ? json_object_set(obj, key, value) : 0;
}

/* Facts for people and for the conditions of recipes. */
static int describe(const struct load *l, const struct topology *t, struct ckpt_err *err)
{
    json_t *a = l->cat->about, *mup = ckpt_json_at(l->config, "model.init_method.use_mup");
    json_t *facts =
        json_pack("{s:s, s:b, s:b, s:b, s:i, s:i}", "format", "nanotron", "has_config_yaml",
                  l->config != NULL, "has_checkpoint_metadata", l->meta != NULL, "use_mup",
                  json_is_true(mup), "shard_tp", (int)t->tp, "shard_pp", (int)t->pp);

    if (!facts || json_object_update_new(a, facts) < 0)
        return ckpt_nomem(err);
    const char *version = NULL;
    for (size_t i = 0; i < l->shards.len && !version; i++)
        version = *l->shards.ptr[i].version ? l->shards.ptr[i].version : NULL;
    if ((version && json_object_set_new(a, "version", json_string(version)) < 0) ||
        set(a, "version", json_object_get(l->meta, "version")) < 0 ||
        set(a, "tp", json_object_get(l->meta, "tp")) < 0 ||
        set(a, "step", ckpt_json_at(l->meta, "metas.last_train_step")) < 0 ||
        set(a, "tokenizer", ckpt_json_at(l->config, "tokenizer.tokenizer_name_or_path")) < 0 ||
        set(a, "model_dtype", ckpt_json_at(l->config, "model.dtype")) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* ---- the reader ---- */

static int load(struct load *l, struct ckpt_err *err)
{
    struct topology t = {0};

    if (ckpt_catalog_new(&l->cat, err) < 0 || read_configs(l, err) < 0 || scan(l, err) < 0 ||
        group(l, err) < 0 || choose_topology(l, &t, err) < 0 || select_shards(l, &t, err) < 0)
        return -1;
    if (prepare_sources(l, err) < 0 ||
        ckpt_parallel(l->shards.len, l->opt->nthread, read_one, l, err) < 0)
        return -1;
    if (ckpt_reader_add_each(l->opt, l->cat, l->params.len, add_tensor, l, err) < 0 ||
        (l->opt->states && add_states(l, &t, err) < 0))
        return -1;
    return describe(l, &t, err);
}

static int nanotron_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                         struct ckpt_facts *facts, struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt};

    (void)facts;
    if (load(&l, err) < 0)
        return -1;
    *ret = ckpt_steal(&l.cat);
    return 0;
}

static enum ckpt_evidence nanotron_probe(struct ckpt_dir *dir)
{
    if (!ckpt_dir_has_dir(dir, "model"))
        return CKPT_NOT_MINE;
    bool nested = ckpt_dir_has_dir(dir, "model/model") || ckpt_dir_has_dir(dir, "model/module");
    if (ckpt_dir_has_file(dir, "model_config.json"))
        return nested ? CKPT_BY_MAGIC : CKPT_BY_NAMES;
    return nested && ckpt_dir_has_file(dir, "config.yaml") ? CKPT_BY_NAMES : CKPT_NOT_MINE;
}

static char *nanotron_latest(struct ckpt_dir *run)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    unsigned long long step;
    size_t len;

    if (ckpt_dir_read_file(run, "latest.txt", MAX_LATEST_BYTES, &text, &len, NULL) < 0)
        return NULL;
    while (len > 0 && strchr(" \t\r\n", text[len - 1]))
        len--;
    return ckpt_parse_u64(text, len, &step) ? ckpt_asprintf("%llu", step) : NULL;
}

/* After all ranks have written their weights, latest.txt is written, then model_config.json. */
static bool nanotron_finished(struct ckpt_dir *dir, const char *name, const char *latest)
{
    return ckpt_dir_has_file(dir, "model_config.json") ||
           (latest && ckpt_natural_cmp(name, latest) <= 0);
}

static const char *const markers[] = {"model_config.json", NULL};
static const char *const rewrites[] = {"model_config.json", "checkpoint_metadata.json",
                                       "config.yaml", "model", NULL};

const struct ckpt_reader ckpt_reader_nanotron = {
    .name = "nanotron",
    .markers = markers,
    .after_marker = "optimizer/",
    .rewrites = rewrites,
    .probe = nanotron_probe,
    .load = nanotron_load,
    .objects = ckpt_nanotron_objects,
    .latest = nanotron_latest,
    .finished = nanotron_finished,
    .side_files = "",
};
