/* SPDX-License-Identifier: Apache-2.0 */
/* DCP saves in Hugging Face storage: sharded safetensors of torch >= 2.8 and of NeMo Automodel.
 *
 * Nothing in such a save states the shape of a whole tensor: the shape is computed as the end of
 * the farthest shard (empty ones included) in each dimension. A lost shard therefore leaves a hole,
 * or, if it was the last one, a smaller tensor. Holes and overlaps are refused here, smaller
 * tensors where the model is known (model/check.h). Names are those of the Hugging Face model. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/ckd.h"
#include "base/par.h"
#include "base/str.h"
#include "format/dcp/hf_layout.h"
#include "format/dcp/load.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "format/trainer.h"

enum { MAX_SHARDS = 10000000 };

/* A shard of a tensor: number of the shard, and of the tensor in its file. */
struct chunk {
    uint32_t shard, tensor;
};

struct whole {
    const char *name; /* memory of the arena of a shard's header */
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t file; /* number of the file in the finished model */
    uint32_t rank;
    CKPT_VEC(struct chunk) chunks;
};

struct load {
    struct ckpt_dir *dir;
    struct ckpt_dir *shard_dir; /* may be dir itself */
    const struct ckpt_reader_options *opt;
    struct ckpt_facts *facts;
    struct ckpt_hfs_layout layout;
    CKPT_VEC(struct ckpt_hfs_shard) shards;
    CKPT_VEC(struct whole) wholes;
    struct ckpt_map by_name;
    struct ckpt_catalog *cat; /* source i of it is shard i */
};

static void load_release(struct load *l)
{
    for (size_t i = 0; i < l->shards.len; i++)
        ckpt_hfs_shard_release(&l->shards.ptr[i]);
    for (size_t i = 0; i < l->wholes.len; i++)
        ckpt_vec_release(&l->wholes.ptr[i].chunks);
    ckpt_vec_release(&l->shards);
    ckpt_vec_release(&l->wholes);
    ckpt_map_release(&l->by_name);
    json_decref(l->layout.file_index);
    ckpt_dir_unref(l->shard_dir);
}

/* ---- which files ---- */

/* Did a trainer write it that prepares an export of its own: below model/, or with a mapping of
 * tensors to files? */
static bool is_of_trainer(const struct load *l)
{
    return ckpt_has_prefix(l->layout.shards, "model") || l->layout.file_index;
}

/* List every entry with such a name; if it is not a file, opening it reports that. */
static int list_shards(struct load *l, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_hfs_shard s = {0};
    struct ckpt_entry e;

    if (ckpt_entries_read(l->shard_dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        if (!ckpt_hfs_name_parse(e.name, &s.id))
            continue;
        if (l->shards.len == MAX_SHARDS)
            return ckpt_fail(err, CKPT_LIMIT, "'%s' has more than %d shards", ckpt_dir_path(l->dir),
                             MAX_SHARDS);
        if (!(s.name = ckpt_dir_intern(l->shard_dir, e.name)) || ckpt_vec_push(&l->shards, s) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* Check that all files have the same count: every save numbers its files anew, so two counts are of
 * two saves. */
static int check_counts(struct load *l, struct ckpt_err *err)
{
    const struct ckpt_hfs_shard *first = &l->shards.ptr[0];

    for (size_t i = 1; i < l->shards.len; i++)
        if (l->shards.ptr[i].id.nfile != first->id.nfile)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s': '%s' and '%s' are of different saves (%" PRIu64 " and %" PRIu64
                             " files)",
                             ckpt_dir_path(l->shard_dir), first->name, l->shards.ptr[i].name,
                             first->id.nfile, l->shards.ptr[i].id.nfile);
    return 0;
}

/* The lowest number in [1, n] that no shard has, which is at most one more than the number of
 * shards. 0: none is missing, or there is not enough memory to find out. */
static uint64_t absent_number(const struct load *l,
                              uint64_t (*number)(const struct ckpt_hfs_name *), uint64_t n)
{
    const size_t most = l->shards.len + 1;
    ckpt_cleanup(ckpt_freep) bool *seen = calloc(most + 1, sizeof *seen);
    uint64_t absent = 1;

    if (!seen)
        return 0;
    for (size_t i = 0; i < l->shards.len; i++)
        if (number(&l->shards.ptr[i].id) <= most)
            seen[number(&l->shards.ptr[i].id)] = true;
    while (absent <= most && seen[absent])
        absent++;
    return absent <= n ? absent : 0;
}

static uint64_t file_number(const struct ckpt_hfs_name *id) { return id->file; }

static uint64_t rank_number(const struct ckpt_hfs_name *id) { return id->rank; }

/* Fail if no rank has a part of one of the finished model's files. */
static int check_files(struct load *l, struct ckpt_err *err)
{
    uint64_t n = l->shards.ptr[0].id.nfile;
    uint64_t absent = absent_number(l, file_number, n);

    if (!absent)
        return 0;
    if (!l->opt->allow_partial)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has no shard-*-model-%05" PRIu64 "-of-%05" PRIu64
                         ".safetensors: nothing of file %" PRIu64 " of the model is there",
                         ckpt_dir_path(l->shard_dir), absent, n, absent);
    ckpt_catalog_warn(l->cat, "left out: file %" PRIu64 " of %" PRIu64 ", which has no shard",
                      absent, n);
    return 0;
}

/* A hint for error texts if a rank's number is skipped: "; no shard of rank 2 is there". It is not
 * an error, because ranks without tensors write no file. */
static void hint_rank(const struct load *l, char *buf, size_t cap)
{
    uint64_t last = 0, absent;

    for (size_t i = 0; i < l->shards.len; i++)
        last = ckpt_max_u64(last, l->shards.ptr[i].id.rank);
    absent = absent_number(l, rank_number, last);
    if (absent)
        (void)snprintf(buf, cap, "; 'shard-%05" PRIu64 "-model-*' is not there", absent);
    else
        (void)snprintf(buf, cap, "; is a shard after 'shard-%05" PRIu64 "-model-*' lost?", last);
}

static int read_one(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    struct ckpt_hfs_shard *s = &l->shards.ptr[i];

    return ckpt_source_file_open(s->source, err) < 0 ? -1 : ckpt_hfs_shard_read(s, err);
}

/* ---- tensors ---- */

static const struct ckpt_st_tensor *part_of(const struct load *l, const struct chunk *c)
{
    return &l->shards.ptr[c->shard].st.tensor[c->tensor];
}

static const char *file_of(const struct load *l, const struct chunk *c)
{
    return l->shards.ptr[c->shard].name;
}

static int check_agreement(const struct load *l, const struct whole *w, const struct chunk *c,
                           struct ckpt_err *err)
{
    const struct chunk *f = w->chunks.ptr;
    const struct ckpt_st_tensor *a = part_of(l, f), *b = part_of(l, c);

    if (a->dtype != b->dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' is %s in '%s' and %s in '%s'", w->name,
                         ckpt_dtype_name(a->dtype), file_of(l, f), ckpt_dtype_name(b->dtype),
                         file_of(l, c));
    if (a->rank != b->rank)
        return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' has %u dimensions in '%s' and %u in '%s'",
                         w->name, a->rank, file_of(l, f), b->rank, file_of(l, c));
    if (w->file != l->shards.ptr[c->shard].id.file)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "tensor '%s' belongs to file %" PRIu64 " by '%s' and to file %" PRIu64 " by '%s'",
            w->name, w->file, file_of(l, f), l->shards.ptr[c->shard].id.file, file_of(l, c));
    return 0;
}

static int add_chunk(struct load *l, uint32_t shard, uint32_t tensor, struct ckpt_err *err)
{
    const struct chunk c = {shard, tensor};
    const struct ckpt_st_tensor *t = part_of(l, &c);
    const uint64_t *lo = l->shards.ptr[shard].lo[tensor];
    const uint32_t at = ckpt_map_add(&l->by_name, t->name, (uint32_t)l->wholes.len);
    const bool is_new = at == l->wholes.len;
    struct whole *w;

    if (at == CKPT_NONE || (is_new && ckpt_vec_add(&l->wholes, &w) < 0))
        return ckpt_nomem(err);
    w = &l->wholes.ptr[at];
    if (is_new && t->rank > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' in '%s' has %u dimensions", t->name,
                         file_of(l, &c), t->rank);
    if (is_new)
        *w = (struct whole){.name = t->name, .file = l->shards.ptr[shard].id.file, .rank = t->rank};
    else if (check_agreement(l, w, &c, err) < 0)
        return -1;
    if (ckpt_vec_push(&w->chunks, c) < 0)
        return ckpt_nomem(err);
    for (uint32_t d = 0; d < t->rank; d++)
        w->dim[d] = ckpt_max_u64(w->dim[d], lo[d] + t->dim[d]);
    return 0;
}

static int whole_cmp(const void *a, const void *b, void *ctx)
{
    const struct load *l = ctx;
    const struct ckpt_naming *n = l->opt->naming;
    const char *x = ((const struct whole *)a)->name, *y = ((const struct whole *)b)->name;

    return n ? n->cmp(n->ctx, l->cat->config, x, y) : ckpt_natural_cmp(x, y);
}

static int collect_pieces(const struct load *l, const struct whole *w, struct ckpt_pieces *p,
                          struct ckpt_err *err)
{
    for (size_t i = 0; i < w->chunks.len; i++) {
        const struct chunk *c = &w->chunks.ptr[i];
        const struct ckpt_st_tensor *t = part_of(l, c);
        struct ckpt_box box = ckpt_box_whole(t->dim, t->rank);
        uint64_t stride[CKPT_MAX_RANK];
        memcpy(box.lo, l->shards.ptr[c->shard].lo[c->tensor], t->rank * sizeof *box.lo);
        ckpt_box_strides(&box, ckpt_dtype_size(t->dtype), stride);
        if (ckpt_pieces_add(p, w->dim, &box, c->shard, t->off, stride, err) < 0)
            return -1;
    }
    return 0;
}

/* Find the other box that overlaps box `bad`. */
static size_t find_other(const struct ckpt_pieces *p, size_t bad)
{
    const struct ckpt_box *box = p->box.ptr;
    struct ckpt_box shared;
    size_t i = 0;

    while (i < p->box.len && (i == bad || !ckpt_box_intersect(&box[i], &box[bad], &shared)))
        i++;
    return i < p->box.len ? i : bad;
}

static int check_coverage(const struct load *l, const struct whole *w, const struct ckpt_pieces *p,
                          struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    char hint[96];
    size_t bad;

    if (ckpt_boxes_cover(w->dim, w->rank, p->box.ptr, p->box.len, &bad, &why) == 0)
        return 0;
    if (bad == SIZE_MAX) {
        hint_rank(l, hint, sizeof hint);
        return ckpt_fail(err, why.code, "tensor '%s': %s%s", w->name, why.text, hint);
    }
    size_t other = find_other(p, bad);
    return ckpt_fail(err, why.code,
                     "tensor '%s': '%s' overlaps '%s' (%s); one is left of an earlier save?",
                     w->name, l->shards.ptr[p->draft.ptr[bad].source].name,
                     l->shards.ptr[p->draft.ptr[other].source].name, why.text);
}

static int add_tensor(void *ctx, size_t i, struct ckpt_err *err)
{
    struct load *l = ctx;
    const struct whole *w = &l->wholes.ptr[i];
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};
    const enum ckpt_dtype dtype = part_of(l, w->chunks.ptr)->dtype;
    uint64_t numel;

    if (!ckpt_shape_numel(w->dim, w->rank, &numel))
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' would have 2^64 elements or more", w->name);
    return collect_pieces(l, w, &pieces, err) < 0 || check_coverage(l, w, &pieces, err) < 0
               ? -1
               : ckpt_pieces_catalog(&pieces, l->cat, w->name, dtype, w->dim, w->rank, err);
}

/* Check that every tensor in the mapping exists. */
static int check_mapped(struct load *l, struct ckpt_err *err)
{
    const char *name;
    json_t *value;
    char hint[96];

    json_object_foreach(l->layout.file_index, name, value) {
        const struct ckpt_naming *n = l->opt->naming;
        if (ckpt_map_find(&l->by_name, name) != CKPT_NONE ||
            (n && n->may_lack(n->ctx, l->cat->config, name)))
            continue;
        hint_rank(l, hint, sizeof hint);
        if (!l->opt->allow_partial)
            return ckpt_fail(err, CKPT_MISSING,
                             "'%s': no shard has tensor '%s', which "
                             "fqn_to_file_index_mapping.json names%s",
                             ckpt_dir_path(l->shard_dir), name, hint);
        ckpt_catalog_warn(l->cat, "left out: tensor '%s', which no shard has", name);
    }
    return 0;
}

/* ---- facts ---- */

/* Make the weight map of the finished model by Automodel's mapping (a tensor that is not in the
 * mapping goes into the last file), or by the names of the shards. It stays NULL if the checkpoint
 * does not prescribe one. */
static int map_weights(struct load *l, struct ckpt_err *err)
{
    const json_t *index = l->layout.file_index;
    uint64_t nfile = index ? 0 : l->shards.ptr[0].id.nfile;
    const char *name;
    json_t *value;

    if (!index && (l->facts->weight_map || nfile <= 1))
        return 0;
    ckpt_weight_map_unrefp(&l->facts->weight_map);
    if (ckpt_weight_map_new(&l->facts->weight_map, err) < 0)
        return -1;
    json_object_foreach((json_t *)index, name, value) {
        nfile = ckpt_max_u64(nfile, (uint64_t)json_integer_value(value));
    }
    for (size_t i = 0; nfile && i < l->wholes.len; i++) {
        const struct whole *w = &l->wholes.ptr[i];
        const json_t *mapped = json_object_get(index, w->name);
        const uint64_t number = mapped  ? (uint64_t)json_integer_value(mapped)
                                : index ? nfile
                                        : w->file;
        ckpt_cleanup(ckpt_freep) char *file =
            ckpt_asprintf("model-%05" PRIu64 "-of-%05" PRIu64 ".safetensors", number, nfile);
        if (!file)
            return ckpt_nomem(err);
        if (ckpt_weight_map_put(l->facts->weight_map, w->name, file, err) < 0)
            return -1;
    }
    return 0;
}

static int describe(struct load *l, struct ckpt_err *err)
{
    json_t **about = &l->cat->about;

    l->facts->names = CKPT_NAMES_HUB;
    l->facts->split_as_base = is_of_trainer(l) ? ckpt_trainers_split() : NULL;
    ckpt_json_set(about, "format", json_string("dcp_hf"));
    ckpt_json_set(about, "shards", json_integer((json_int_t)l->shards.len));
    ckpt_trainers_describe(l->dir, l->opt->name, l->cat);
    return map_weights(l, err);
}

/* ---- the reader ---- */

static int dcp_hf_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                       struct ckpt_facts *facts, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(load_release) struct load l = {.dir = dir, .opt = opt, .facts = facts, .cat = cat};

    if (ckpt_hfs_layout_read(dir, &l.layout, facts, &cat->config, err) < 0)
        return -1;
    const char *below = l.layout.shards;
    if (ckpt_dir_open_below(dir, *below ? below : ".", &l.shard_dir, err) < 0 ||
        list_shards(&l, err) < 0)
        return -1;
    if (l.shards.len == 0)
        return ckpt_fail(err, CKPT_STALE, "'%s': the shards have gone", ckpt_dir_path(dir));
    if (check_counts(&l, err) < 0 || check_files(&l, err) < 0)
        return -1;
    for (size_t i = 0; i < l.shards.len; i++)
        if (ckpt_source_file_prepare(l.shard_dir, l.shards.ptr[i].name, opt->pool,
                                     &l.shards.ptr[i].source, err) < 0)
            return -1;
    if (ckpt_parallel(l.shards.len, 0, read_one, &l, err) < 0)
        return -1;
    for (size_t s = 0; s < l.shards.len; s++)
        for (size_t i = 0; i < l.shards.ptr[s].st.ntensor; i++)
            if (add_chunk(&l, (uint32_t)s, (uint32_t)i, err) < 0)
                return ckpt_err_in(err, "'%s'", ckpt_dir_path(l.shard_dir));
    /* torch writes through the safetensors library, which sorts by name; Automodel has written in
     * the model's order since 0.3 */
    if (l.wholes.len && !is_of_trainer(&l))
        qsort_r(l.wholes.ptr, l.wholes.len, sizeof *l.wholes.ptr, whole_cmp, &l);
    for (size_t i = 0; i < l.shards.len; i++)
        if (ckpt_catalog_add_source(cat, l.shards.ptr[i].source, err) == UINT32_MAX)
            return -1;
    if (ckpt_reader_add_each(opt, cat, l.wholes.len, add_tensor, &l, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(l.shard_dir));
    return check_mapped(&l, err) < 0 || describe(&l, err) < 0
               ? -1
               : ckpt_dcp_add_states(dir, opt, cat, err);
}

static enum ckpt_evidence dcp_hf_probe(struct ckpt_dir *dir)
{
    return ckpt_hfs_layout_shards(dir) ? CKPT_BY_MAGIC : CKPT_NOT_MINE;
}

const struct ckpt_reader ckpt_reader_dcp_hf = {
    .name = "dcp_hf",
    .probe = dcp_hf_probe,
    .load = dcp_hf_load,
    .groups = ckpt_dcp_groups,
    .latest = ckpt_trainers_latest,
    .finished = ckpt_trainers_finished,
};
