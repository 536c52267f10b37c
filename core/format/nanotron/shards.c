/* SPDX-License-Identifier: Apache-2.0 */
/* Finding nanotron's shard files, grouping them by parameter, and reading their headers. */
#include "format/nanotron/shards.h"

#include <stdlib.h>
#include <string.h>

#include "base/par.h"
#include "base/sort.h"
#include "base/str.h"
#include "container/safetensors.h"

enum {
    MAX_DEPTH = 32,
    MAX_LINKED = 65536, /* limit of folders that are reached by links, since a few links can make
                           many paths */
    MAX_FOLDERS = 2 * 1000 * 1000,
    MAX_SHARDS = 8 * 1000 * 1000,
};

static void folder_release(struct ckpt_nt_folder *f)
{
    ckpt_vec_release(&f->subdirs);
    ckpt_vec_release(&f->files);
}

void ckpt_nt_shards_release(struct ckpt_nt_shards *set)
{
    for (size_t i = 0; i < set->folders.len; i++) {
        folder_release(&set->folders.ptr[i]);
        ckpt_dir_unref(set->folders.ptr[i].dir);
    }
    for (size_t i = 0; i < set->shards.len; i++) {
        free(set->shards.ptr[i].dim);
        free(set->shards.ptr[i].local_dim);
        free(set->shards.ptr[i].pair);
        ckpt_source_unref(set->shards.ptr[i].source);
    }
    ckpt_vec_release(&set->folders);
    ckpt_vec_release(&set->shards);
    ckpt_vec_release(&set->params);
    ckpt_arena_release(&set->names);
}

struct ckpt_dir *ckpt_nt_shard_dir(const struct ckpt_nt_shards *set, const struct ckpt_nt_shard *s)
{
    return set->folders.ptr[s->folder].dir;
}

static int see_entry(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct ckpt_nt_folder *f = ctx;
    struct ckpt_nt_name parsed;
    bool weight = e->kind == CKPT_ENTRY_DIR ? ckpt_nt_name_parse(e->name, &parsed)
                                            : ckpt_has_prefix(e->name, "model_");

    if (weight && ckpt_has_suffix(e->name, "_metadata.pkl"))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s/%s': FP8 parameters with pickled metadata are not supported",
                         ckpt_dir_path(f->dir), e->name);
    /* an entry such as a FIFO with a weight's name must give an error when it is opened, and not be
     * ignored */
    if (e->kind != CKPT_ENTRY_DIR && !weight)
        return 0;
    const char *name = ckpt_dir_intern(f->dir, e->name);
    const struct ckpt_nt_subdir subdir = {name, e->is_link};
    if (!name || (weight ? ckpt_vec_push(&f->files, name) : ckpt_vec_push(&f->subdirs, subdir)) < 0)
        return ckpt_nomem(err);
    return 0;
}

static int list_folder(void *ctx, size_t i, struct ckpt_err *err)
{
    struct ckpt_nt_folder *f = (struct ckpt_nt_folder *)ctx + i;
    return ckpt_dir_list(f->dir, see_entry, f, err);
}

/* "prefix.name", or the name alone if the prefix is empty; NULL: no memory. */
static const char *join_names(struct ckpt_nt_shards *set, const char *prefix, const char *name,
                              size_t len)
{
    size_t plen = strlen(prefix), dot = plen > 0;
    char *joined = ckpt_arena_alloc(&set->names, plen + dot + len + 1);

    if (joined) {
        memcpy(joined, prefix, plen);
        memcpy(joined + plen, ".", dot);
        memcpy(joined + plen + dot, name, len);
        joined[plen + dot + len] = '\0';
    }
    return joined;
}

/* Is the folder one of its own parents? Two links to "." would make 2^32 paths. */
static bool leads_back(const struct ckpt_nt_shards *set, const struct ckpt_nt_folder *f)
{
    struct ckpt_file_id id, above;

    if (!ckpt_dir_stat(f->dir, ".", &id))
        return false;
    while (f->depth > 0) {
        f = &set->folders.ptr[f->parent];
        if (ckpt_dir_stat(f->dir, ".", &above) && above.inode == id.inode)
            return true;
    }
    return false;
}

static int add_folder(struct ckpt_nt_shards *set, uint32_t parent, const struct ckpt_nt_subdir *sub,
                      struct ckpt_err *err)
{
    const struct ckpt_nt_folder up = set->folders.ptr[parent]; /* the array moves */
    struct ckpt_nt_folder *f;

    if (up.depth == MAX_DEPTH || set->folders.len >= MAX_FOLDERS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "'%s': directories nest deeper than %d, or are more than %d",
                         ckpt_dir_path(up.dir), MAX_DEPTH, MAX_FOLDERS);
    if (ckpt_vec_add(&set->folders, &f) < 0)
        return ckpt_nomem(err);
    f->parent = parent;
    f->depth = up.depth + 1;
    f->linked = up.linked || sub->linked;
    /* a link is opened now; other folders are opened once, when they are listed */
    if ((sub->linked ? ckpt_dir_open_below : ckpt_dir_listed_below)(up.dir, sub->name, &f->dir,
                                                                    err) < 0)
        return -1;
    if (sub->linked && leads_back(set, f))
        return ckpt_fail(err, CKPT_FORMAT, "'%s' is a link to a directory that contains the link",
                         ckpt_dir_path(f->dir));
    if (f->linked && ++set->nlinked > MAX_LINKED)
        return ckpt_fail(err, CKPT_LIMIT, "'%s': more than %d directories are reached by links",
                         ckpt_dir_path(f->dir), MAX_LINKED);
    f->path = join_names(set, up.path, sub->name, strlen(sub->name));
    return f->path ? 0 : ckpt_nomem(err);
}

static int add_shard(struct ckpt_nt_shards *set, uint32_t folder, const char *file,
                     struct ckpt_err *err)
{
    struct ckpt_nt_name name;
    struct ckpt_nt_shard *s;

    if (!ckpt_nt_name_parse(file, &name))
        return 0;
    if (set->shards.len >= MAX_SHARDS)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d shard files", MAX_SHARDS);
    if (ckpt_vec_add(&set->shards, &s) < 0)
        return ckpt_nomem(err);
    *s = (struct ckpt_nt_shard){.file = file, .name = name, .folder = folder};
    return 0;
}

/* Scan level by level, so that all directories of one level are listed in parallel: a network file
 * system answers slowly, but handles many requests at once. */
static int scan(struct ckpt_nt_shards *set, struct ckpt_err *err)
{
    struct ckpt_nt_folder *top;

    if (ckpt_vec_add(&set->folders, &top) < 0)
        return ckpt_nomem(err);
    top->path = "";
    if (ckpt_dir_open_below(set->dir, "model", &top->dir, err) < 0)
        return -1;
    for (size_t begin = 0, end; begin < set->folders.len; begin = end) {
        end = set->folders.len;
        if (ckpt_parallel(end - begin, 0, list_folder, set->folders.ptr + begin, err) < 0)
            return -1;
        for (size_t i = begin; i < end; i++) {
            for (size_t k = 0; k < set->folders.ptr[i].files.len; k++)
                if (add_shard(set, (uint32_t)i, set->folders.ptr[i].files.ptr[k], err) < 0)
                    return -1;
            for (size_t k = 0; k < set->folders.ptr[i].subdirs.len; k++)
                if (add_folder(set, (uint32_t)i, &set->folders.ptr[i].subdirs.ptr[k], err) < 0)
                    return -1;
            folder_release(&set->folders.ptr[i]);
        }
    }
    if (set->shards.len == 0)
        return ckpt_fail(err, CKPT_MISSING, "'%s/model' holds no weights", ckpt_dir_path(set->dir));
    return 0;
}

/* ---- parameters ---- */

static int shard_cmp(const void *a, const void *b)
{
    const struct ckpt_nt_shard *p = a, *q = b;
    int c = ckpt_u64_cmp(p->param, q->param);

    c = c ? c : ckpt_u64_cmp(p->name.ep.rank, q->name.ep.rank);
    c = c ? c : ckpt_u64_cmp(p->name.tp.rank, q->name.tp.rank);
    return c ? c : strcmp(p->file, q->file);
}

/* Remove "module.", which models saved inside DistributedDataParallel have before every name. */
static const char *unwrapped(const char *path)
{
    return ckpt_has_prefix(path, "module.") ? path + strlen("module.") : path;
}

/* Assign each shard to its parameter, and each parameter a range of shards. */
static int group(struct ckpt_nt_shards *set, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map seen = {0};

    for (size_t i = 0; i < set->shards.len; i++) {
        struct ckpt_nt_shard *s = &set->shards.ptr[i];
        const char *path = unwrapped(set->folders.ptr[s->folder].path);
        const char *name = join_names(set, path, s->name.leaf, s->name.leaf_len);
        const uint32_t next = (uint32_t)set->params.len;
        s->param = name ? ckpt_map_add(&seen, name, next) : CKPT_NONE;
        if (s->param == CKPT_NONE ||
            (s->param == next &&
             ckpt_vec_push(&set->params, ((struct ckpt_nt_param){.name = name})) < 0))
            return ckpt_nomem(err);
    }
    qsort(set->shards.ptr, set->shards.len, sizeof *set->shards.ptr, shard_cmp);
    for (size_t i = 0; i < set->shards.len; i++) {
        struct ckpt_nt_param *p = &set->params.ptr[set->shards.ptr[i].param];
        if (p->n++ == 0)
            p->first = i;
    }
    return 0;
}

int ckpt_nt_shards_find(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                        struct ckpt_nt_shards *ret, struct ckpt_err *err)
{
    ret->dir = dir;
    ret->opt = opt;
    return scan(ret, err) < 0 || group(ret, err) < 0 ? -1 : 0;
}

/* ---- topologies ---- */

enum { MOST_TOPOLOGIES = 16 };

/* The topology that the JSON and YAML files of the directory's last save record; 0 where they do
 * not. checkpoint_metadata.json has priority; PP and EP are only in config.yaml. */
static struct ckpt_nt_topology recorded(const json_t *meta, const json_t *config)
{
    const json_t *par = ckpt_json_at(config, "parallelism");
    struct ckpt_nt_topology t = {0};
    uint64_t v;

    if (ckpt_json_u64(meta, "tp", &v) || ckpt_json_u64(par, "tp", &v))
        t.tp = (uint32_t)v;
    if (ckpt_json_u64(par, "pp", &v))
        t.pp = (uint32_t)v;
    if (ckpt_json_u64(par, "expert_parallel_size", &v))
        t.ep = (uint32_t)v;
    return t;
}

/* Find all topologies in the names. Files without an expert rank are counted with those that have
 * one. */
static int find_topologies(const struct ckpt_nt_shards *set, struct ckpt_nt_topology *out,
                           size_t cap, size_t *ret_n, struct ckpt_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < set->shards.len; i++) {
        struct ckpt_nt_topology t = ckpt_nt_name_topology(&set->shards.ptr[i].name);
        size_t k = 0;
        if (!set->shards.ptr[i].name.sharded)
            continue;
        while (k < n && !ckpt_nt_topology_fits(&out[k], &t))
            k++;
        if (k == cap)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s/model' holds shards of more than %zu topologies",
                             ckpt_dir_path(set->dir), cap);
        if (k == n)
            out[n++] = t;
        else if (out[k].ep == 0)
            out[k].ep = t.ep;
    }
    *ret_n = n;
    return 0;
}

/* Find the topology that matches the recorded one; n: several match, or none. */
static size_t find_recorded(const struct ckpt_nt_topology *all, size_t n,
                            const struct ckpt_nt_topology *want)
{
    size_t at = n, hits = 0;

    for (size_t i = 0; i < n; i++)
        if (ckpt_nt_topology_fits(&all[i], want)) {
            at = i;
            hits++;
        }
    return hits == 1 ? at : n;
}

int ckpt_nt_topology_choose(const struct ckpt_nt_shards *set, const json_t *meta,
                            const json_t *config, struct ckpt_catalog *cat,
                            struct ckpt_nt_topology *ret, struct ckpt_err *err)
{
    const struct ckpt_nt_topology want = recorded(meta, config);
    struct ckpt_nt_topology all[MOST_TOPOLOGIES] = {0};
    size_t n = 0;

    if (find_topologies(set, all, MOST_TOPOLOGIES, &n, err) < 0)
        return -1;
    const size_t at = n > 1 ? find_recorded(all, n, &want) : 0;
    if (n > 1 && at == n)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "'%s/model' holds shards of %zu saves (TP %u PP %u, TP %u PP %u ...) and its "
            "metadata does not say which one to use: remove the stale files",
            ckpt_dir_path(set->dir), n, all[0].tp, all[0].pp, all[1].tp, all[1].pp);
    *ret = all[at];
    if (n > 1)
        ckpt_catalog_warn(
            cat,
            "shards of %zu saves lie in '%s/model': those of TP %u PP %u are used, as "
            "its metadata says",
            n, ckpt_dir_path(set->dir), ret->tp, ret->pp);
    return 0;
}

/* ---- one save ---- */

int ckpt_nt_shards_select(struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                          struct ckpt_err *err)
{
    size_t kept = 0; /* shards own nothing before they are read */

    for (size_t i = 0; i < set->params.len; i++) {
        struct ckpt_nt_param *p = &set->params.ptr[i];
        size_t first = kept, plain = 0;
        for (size_t k = p->first; k < p->first + p->n; k++) {
            const struct ckpt_nt_shard s = set->shards.ptr[k];
            const struct ckpt_nt_topology own = ckpt_nt_name_topology(&s.name);
            if (s.name.sharded && !ckpt_nt_topology_fits(&own, t))
                continue;
            plain += !s.name.sharded;
            set->shards.ptr[kept++] = s;
        }
        p->first = first;
        p->n = kept - first;
        if (p->n == 0)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "parameter '%s' has only shards of another save than TP %u PP %u",
                             p->name, t->tp, t->pp);
        if (plain && p->n > 1)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "parameter '%s' has a file without shards and sharded files, which "
                             "are of two saves",
                             p->name);
    }
    set->shards.len = kept;
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

static int read_plain(struct ckpt_nt_shard *s, struct ckpt_err *err)
{
    if (!(s->dim = copy_dim(s->local_dim, s->rank)) || !(s->pair = calloc(1, sizeof *s->pair)))
        return ckpt_nomem(err);
    s->npair = 1;
    s->pair->local.rank = s->rank;
    memcpy(s->pair->local.n, s->dim, s->rank * sizeof *s->dim);
    s->pair->global = s->pair->local;
    return 0;
}

static int read_slices(struct ckpt_nt_shard *s, const struct ckpt_st *st, struct ckpt_err *err)
{
    const char *version = ckpt_st_metadata(st, "version");
    const char *pairs = ckpt_st_metadata(st, "local_global_slices_pairs");
    const char *shape = ckpt_st_metadata(st, "unsharded_shape");
    uint64_t dim[CKPT_MAX_RANK];
    uint32_t rank;

    if (version && strlen(version) >= CKPT_NT_MAX_VERSION)
        return ckpt_fail(err, CKPT_FORMAT, "version '%s' is not a sequence of integers and dots",
                         version);
    if (version && ckpt_nt_version_check(version, err) < 0)
        return -1;
    (void)strcpy(s->version, version ? version : "");
    if (!pairs && ckpt_st_metadata(st, "concat_dim"))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its metadata is of version 1.0 (concat_dim), which no public release "
                         "wrote and which is not supported");
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

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct ckpt_nt_shards *set = ctx;
    struct ckpt_nt_shard *s = &set->shards.ptr[i];
    ckpt_cleanup(ckpt_st_release) struct ckpt_st st = {0};
    struct ckpt_dir *dir = ckpt_nt_shard_dir(set, s);

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
    if ((s->name.sharded ? read_slices(s, &st, err) : read_plain(s, err)) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), s->file);
    return 0;
}

int ckpt_nt_shards_read(struct ckpt_nt_shards *set, struct ckpt_err *err)
{
    for (size_t i = 0; i < set->shards.len; i++) {
        struct ckpt_nt_shard *s = &set->shards.ptr[i];
        if (ckpt_source_file_prepare(ckpt_nt_shard_dir(set, s), s->file, set->opt->pool, &s->source,
                                     err) < 0)
            return -1;
    }
    return ckpt_parallel(set->shards.len, 0, read_one, set, err);
}
