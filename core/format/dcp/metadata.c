/* SPDX-License-Identifier: Apache-2.0 */
/* Converting the pickle to tables. */
#include "format/dcp/metadata.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "container/pickle.h"
#include "container/torch.h"

/* ---- the classes ---- */

enum { METADATA, TENSOR, BYTES, CHUNK, INDEX, PROPERTIES, STORAGE, LAYOUT, MCORE };

enum { M_STATE_DICT, M_STORAGE, M_PLANNER };
enum { T_PROPERTIES, T_SIZE, T_CHUNKS };
enum { C_OFFSETS, C_SIZES };
enum { I_FQN, I_OFFSET };
enum { S_PATH, S_OFFSET, S_LENGTH, S_TRANSFORMS };

static const char *const metadata_slots[] = {"state_dict_metadata", "storage_data", "planner_data",
                                             NULL};
static const char *const tensor_slots[] = {"properties", "size", "chunks", NULL};
static const char *const chunk_slots[] = {"offsets", "sizes", NULL};
static const char *const index_slots[] = {"fqn", "offset", NULL};
static const char *const storage_slots[] = {"relative_path", "offset", "length",
                                            "transform_descriptors", NULL};

/* Classes are recognised by name alone, because they have moved between versions of torch, and
 * plug-ins define their own. */
static const struct ckpt_pickle_global globals[] = {
    [METADATA] = {NULL, "Metadata", CKPT_PICKLE_OBJ, metadata_slots},
    [TENSOR] = {NULL, "TensorStorageMetadata", CKPT_PICKLE_OBJ, tensor_slots},
    [BYTES] = {NULL, "BytesStorageMetadata"},
    [CHUNK] = {NULL, "ChunkStorageMetadata", CKPT_PICKLE_OBJ, chunk_slots},
    [INDEX] = {NULL, "MetadataIndex", CKPT_PICKLE_OBJ, index_slots},
    [PROPERTIES] = {NULL, "TensorProperties"},
    [STORAGE] = {NULL, "_StorageInfo", CKPT_PICKLE_OBJ, storage_slots},
    [LAYOUT] = {"torch.serialization", "_get_layout"},
    [MCORE] = {NULL, "MCoreMetadata", CKPT_PICKLE_OBJ,
               metadata_slots}, /* used by Megatron-Core 0.15 */
    {"torch", "Size", CKPT_PICKLE_SIZE},
    {"collections", "OrderedDict", CKPT_PICKLE_DICT},
    {NULL},
};

static const struct ckpt_pickle_rules rules = {globals, false};

/* One file, while it is being added. */
struct adding {
    struct ckpt_dcp_metadata *m;
    struct ckpt_pickle p;
    bool rank_local;
    uint32_t base; /* position of its first tuple in m->ints */
    ckpt_pv state_dict, storage;
    uint32_t *slot; /* hash table of storage's pairs by (name, offset): number + 1 */
    size_t cap;
};

static void adding_release(struct adding *a)
{
    ckpt_pickle_release(&a->p);
    free(a->slot);
}

static int fail_value(const struct adding *a, ckpt_pv v, const char *what, const char *want,
                      struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "%s is %s, not %s", what, ckpt_pv_text(&a->p, v).text, want);
}

/* Check a name that is used later as a key of JSON or as a file name. */
static int check_name(const char *name, struct ckpt_err *err)
{
    if (!name)
        return ckpt_fail(err, CKPT_FORMAT, "a tensor's name is not a string");
    if (strlen(name) > CKPT_DCP_MAX_NAME)
        return ckpt_fail(err, CKPT_LIMIT, "a tensor's name has %zu bytes, at most %d are supported",
                         strlen(name), CKPT_DCP_MAX_NAME);
    return ckpt_utf8_ok(name) ? 0
                              : ckpt_fail(err, CKPT_FORMAT, "tensor name '%s' is not UTF-8", name);
}

/* ---- storage_data: (name, offset) -> file; an object has no offset ---- */

#define NO_OFFSET ((ckpt_pv)0)

static bool same_ints(const struct adding *a, ckpt_pv x, ckpt_pv y)
{
    size_t nx, ny;

    if (x == NO_OFFSET || y == NO_OFFSET)
        return x == y;
    const int64_t *tx = ckpt_pv_ints(&a->p, x, &nx), *ty = ckpt_pv_ints(&a->p, y, &ny);
    return x == y || (nx == ny && memcmp(tx, ty, nx * sizeof *tx) == 0);
}

/* The offset in a key of storage_data. */
static ckpt_pv offset_of(const struct adding *a, ckpt_pv key)
{
    ckpt_pv offset = ckpt_pv_slot(&a->p, key, I_OFFSET);

    return ckpt_pv_kind(offset) <= CKPT_PV_NONE ? NO_OFFSET : offset;
}

/* Find the slot that has the pair, or the free slot where it belongs. */
static size_t find_slot(const struct adding *a, uint64_t name, ckpt_pv offset)
{
    size_t n = 0;
    const int64_t *t = offset == NO_OFFSET ? NULL : ckpt_pv_ints(&a->p, offset, &n);
    size_t h = (size_t)XXH3_64bits_withSeed(t, n * sizeof *t, name) & (a->cap - 1);

    for (; a->slot[h]; h = (h + 1) & (a->cap - 1)) {
        ckpt_pv key = ckpt_pv_key(&a->p, a->storage, a->slot[h] - 1);
        if (ckpt_pv_id(ckpt_pv_slot(&a->p, key, I_FQN)) == name &&
            same_ints(a, offset_of(a, key), offset))
            break;
    }
    return h;
}

static int index_storage(struct adding *a, struct ckpt_err *err)
{
    size_t n = ckpt_pv_npair(&a->p, a->storage);

    if (n >= UINT32_MAX / 4)
        return ckpt_fail(err, CKPT_LIMIT, "storage_data has %zu entries", n);
    for (a->cap = 16; a->cap < 2 * n; a->cap *= 2)
        ;
    if (!(a->slot = calloc(a->cap, sizeof *a->slot)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        ckpt_pv key = ckpt_pv_key(&a->p, a->storage, i);
        if (ckpt_pv_rule(&a->p, key) != INDEX ||
            ckpt_pv_kind(ckpt_pv_slot(&a->p, key, I_FQN)) != CKPT_PV_STR)
            return fail_value(a, key, "a key of storage_data", "a MetadataIndex", err);
        ckpt_pv offset = offset_of(a, key);
        if (offset != NO_OFFSET &&
            ckpt_pv_kind(offset) != CKPT_PV_INTS) /* a list cannot be a part of a key */
            return fail_value(a, offset, "an offset in storage_data", "a tuple of integers", err);
        a->slot[find_slot(a, ckpt_pv_id(ckpt_pv_slot(&a->p, key, I_FQN)), offset)] =
            (uint32_t)i + 1; /* of equal keys the last one counts */
    }
    return 0;
}

static int add_name(struct ckpt_map *map, struct ckpt_arena *arena, const char *name, size_t n,
                    const char **ret_own, uint32_t *ret, struct ckpt_err *err)
{
    *ret_own = NULL;
    if ((*ret = ckpt_map_find(map, name)) != CKPT_NONE)
        return 0;
    if (!(*ret_own = ckpt_arena_strdup(arena, name)) ||
        (*ret = ckpt_map_add(map, *ret_own, (uint32_t)n)) == CKPT_NONE)
        return ckpt_nomem(err);
    return 0;
}

static int read_codec(struct adding *a, ckpt_pv list, const char **ret, struct ckpt_err *err)
{
    const size_t n = ckpt_pv_len(&a->p, list);
    const char *first = n == 1 ? ckpt_pv_str(&a->p, ckpt_pv_at(&a->p, list, 0)) : "several codecs";

    if (n == 0)
        return 0;
    *ret = ckpt_arena_strdup(&a->m->arena, first ? first : "?");
    return *ret ? 0 : ckpt_nomem(err);
}

static int read_place(struct adding *a, ckpt_pv info, struct ckpt_dcp_tensor *t,
                      struct ckpt_dcp_chunk *c, struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = a->m;
    const char *path = ckpt_pv_str(&a->p, ckpt_pv_slot(&a->p, info, S_PATH)), *own;
    int64_t off, len;

    if (ckpt_pv_rule(&a->p, info) != STORAGE)
        return fail_value(a, info, "an entry of storage_data (of another storage plug-in?)",
                          "a _StorageInfo", err);
    if (!path || !ckpt_pv_int(ckpt_pv_slot(&a->p, info, S_OFFSET), &off) ||
        !ckpt_pv_int(ckpt_pv_slot(&a->p, info, S_LENGTH), &len) || off < 0 || len < 0)
        return ckpt_fail(err, CKPT_FORMAT,
                         "an entry of storage_data has no path, offset and length");
    c->off = (uint64_t)off;
    c->len = (uint64_t)len;
    if (add_name(&m->by_file, &m->arena, path, m->files.len, &own, &c->file, err) < 0)
        return -1;
    if (own && ckpt_vec_push(&m->files, own) < 0)
        return ckpt_nomem(err);
    return read_codec(a, ckpt_pv_slot(&a->p, info, S_TRANSFORMS), &t->codec, err);
}

/* ---- state_dict_metadata ---- */

/* Read a tuple of sizes; *ret is its position in m->ints. */
static int read_tuple(struct adding *a, ckpt_pv v, const char *what, uint32_t *ret,
                      struct ckpt_err *err)
{
    size_t n;
    ckpt_pv packed = ckpt_pickle_pack(&a->p, v);
    const int64_t *t = ckpt_pv_ints(&a->p, packed, &n);

    if (!t)
        return fail_value(a, v, what, "a tuple of integers", err);
    if (n > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "%s has %zu dimensions; at most %d are supported", what,
                         n, CKPT_MAX_RANK);
    for (size_t i = 0; i < n; i++)
        if (t[i] < 0)
            return ckpt_fail(err, CKPT_FORMAT, "%s holds %" PRId64, what, t[i]);
    *ret = (uint32_t)ckpt_pv_id(packed);
    return 0;
}

static int read_properties(struct adding *a, ckpt_pv v, struct ckpt_dcp_tensor *t,
                           struct ckpt_err *err)
{
    ckpt_pv state = ckpt_pv_slot(&a->p, v, 1), dtype = ckpt_pv_at(&a->p, state, 0);
    ckpt_pv layout = ckpt_pv_at(&a->p, state, 1);

    if (ckpt_pv_rule(&a->p, v) != PROPERTIES || ckpt_pv_len(&a->p, state) < 5)
        return fail_value(a, v, "its properties", "TensorProperties", err);
    if (!ckpt_torch_dtype(&a->p, dtype, &t->dtype))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "dtype %s has no name in safetensors and is not supported",
                         ckpt_pv_text(&a->p, dtype).text);
    const char *name = ckpt_pv_str(&a->p, ckpt_pv_at(&a->p, ckpt_pv_slot(&a->p, layout, 0), 0));
    if (ckpt_pv_rule(&a->p, layout) == LAYOUT && name && strcmp(name, "torch.strided") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "layout %s is not supported", name);
    return 0;
}

static int add_chunk(struct adding *a, uint32_t tensor, uint64_t name, ckpt_pv v,
                     struct ckpt_err *err)
{
    struct ckpt_dcp_tensor *t = &a->m->tensors.ptr[tensor];
    struct ckpt_dcp_chunk c = {.tensor = tensor, .file = CKPT_DCP_NOWHERE};

    if (ckpt_pv_rule(&a->p, v) != CHUNK)
        return fail_value(a, v, "a chunk", "ChunkStorageMetadata", err);
    ckpt_pv lo = ckpt_pickle_pack(&a->p, ckpt_pv_slot(&a->p, v, C_OFFSETS));
    if (read_tuple(a, lo, "a chunk's offset", &c.lo, err) < 0 ||
        read_tuple(a, ckpt_pv_slot(&a->p, v, C_SIZES), "a chunk's size", &c.n, err) < 0)
        return -1;
    uint32_t at = a->slot[find_slot(a, name, lo)];
    if (at && read_place(a, ckpt_pv_value(&a->p, a->storage, at - 1), t, &c, err) < 0)
        return -1;
    c.lo += a->base;
    c.n += a->base;
    return ckpt_vec_push(&a->m->chunks, c) < 0 ? ckpt_nomem(err) : 0;
}

/* Check that two ranks describe a tensor in the same way. */
static int check_same(const struct adding *a, const struct ckpt_dcp_tensor *old,
                      const struct ckpt_dcp_tensor *now, struct ckpt_err *err)
{
    if (!a->rank_local || old->dim >= a->base) /* of the same file */
        return ckpt_fail(err, CKPT_CONFLICT, "it is listed twice");
    size_t n = ckpt_dcp_rank(a->m, old->dim);
    if (old->dtype == now->dtype && (size_t)a->p.ints.ptr[now->dim] == n &&
        memcmp(a->p.ints.ptr + now->dim + 1, ckpt_dcp_ints(a->m, old->dim), n * sizeof(int64_t)) ==
            0)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT, "the ranks' metadata disagree about its shape or dtype");
}

/* Add a tensor. The tuples of this file are numbered from `base`, where take_ints will put them. */
static int add_tensor(struct adding *a, const char *name, uint64_t name_id, ckpt_pv v,
                      struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = a->m;
    ckpt_pv chunks = ckpt_pv_slot(&a->p, v, T_CHUNKS);
    struct ckpt_dcp_tensor t = {0};
    const char *own;
    uint32_t at;

    if (read_properties(a, ckpt_pv_slot(&a->p, v, T_PROPERTIES), &t, err) < 0 ||
        read_tuple(a, ckpt_pv_slot(&a->p, v, T_SIZE), "its size", &t.dim, err) < 0 ||
        add_name(&m->by_name, &m->arena, name, m->tensors.len, &own, &at, err) < 0)
        return -1;
    if (!own && check_same(a, &m->tensors.ptr[at], &t, err) < 0)
        return -1;
    t.name = own;
    t.dim += a->base;
    if (own && ckpt_vec_push(&m->tensors, t) < 0)
        return ckpt_nomem(err);
    if (!ckpt_pv_is_seq(chunks))
        return fail_value(a, chunks, "its chunks", "a list", err);
    for (size_t i = 0; i < ckpt_pv_len(&a->p, chunks); i++)
        if (add_chunk(a, at, name_id, ckpt_pv_at(&a->p, chunks, i), err) < 0)
            return -1;
    return 0;
}

/* Add a pickled object; one without an entry in storage_data is ignored. */
static int add_object(struct adding *a, uint64_t name_id, const char *name, struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = a->m;
    struct ckpt_dcp_tensor t = {0};
    struct ckpt_dcp_chunk c = {0};
    const uint32_t at = a->slot[find_slot(a, name_id, NO_OFFSET)];

    if (!at)
        return 0;
    if (read_place(a, ckpt_pv_value(&a->p, a->storage, at - 1), &t, &c, err) < 0)
        return -1;
    struct ckpt_dcp_object o = {ckpt_arena_strdup(&m->arena, name), c.file, c.off, c.len};
    return !o.name || ckpt_vec_push(&m->objects, o) < 0 ? ckpt_nomem(err) : 0;
}

static int add_tensors(struct adding *a, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_npair(&a->p, a->state_dict); i++) {
        ckpt_pv key = ckpt_pv_key(&a->p, a->state_dict, i);
        ckpt_pv v = ckpt_pv_value(&a->p, a->state_dict, i);
        const char *name = ckpt_pv_str(&a->p, key);
        if (check_name(name, err) < 0)
            return -1;
        if (ckpt_pv_rule(&a->p, v) == BYTES) {
            a->m->nbytes_entry++;
            const struct ckpt_dcp_format *f = a->m->format;
            if (f && f->wants && f->wants(f->ctx, name) &&
                add_object(a, ckpt_pv_id(key), name, err) < 0)
                return ckpt_err_in(err, "object '%s'", name);
            continue;
        }
        if (ckpt_pv_rule(&a->p, v) != TENSOR)
            return fail_value(a, v, name, "a TensorStorageMetadata", err);
        if (add_tensor(a, name, ckpt_pv_id(key), v, err) < 0)
            return ckpt_err_in(err, "tensor '%s'", name);
    }
    return 0;
}

/* ---- planner_data ---- */

/* Returns a path of planner_data as a new JSON array; NULL: it is none, or there is no memory. */
static json_t *path_of(const struct ckpt_pickle *p, ckpt_pv path)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *out = json_array();
    size_t n = 0;
    const int64_t *keys = ckpt_pv_kind(path) == CKPT_PV_INTS ? ckpt_pv_ints(p, path, &n) : NULL;

    for (size_t i = 0; i < n; i++)
        ckpt_json_append(&out, json_integer(keys[i]));
    for (size_t i = 0; !keys && i < ckpt_pv_len(p, path); i++) {
        const char *key = ckpt_pv_str(p, ckpt_pv_at(p, path, i));
        int64_t number;
        if (key && ckpt_utf8_ok(key))
            ckpt_json_append(&out, json_string(key));
        else if (!key && ckpt_pv_int(ckpt_pv_at(p, path, i), &number))
            ckpt_json_append(&out, json_integer(number));
        else
            return NULL;
    }
    return json_array_size(out) ? ckpt_steal(&out) : NULL;
}

/* Read the order of names from planner_data, and the parts of the names: ("model",
 * "layers.0.weight") says more than "model.layers.0.weight". */
static int add_plan(struct adding *a, ckpt_pv planner, struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = a->m;

    m->has_planner_data |= ckpt_pv_npair(&a->p, planner) > 0;
    for (size_t i = 0; i < ckpt_pv_npair(&a->p, planner); i++) {
        ckpt_pv path = ckpt_pv_value(&a->p, planner, i);
        const char *name = ckpt_pv_str(&a->p, ckpt_pv_key(&a->p, planner, i)), *own;
        const char *root = ckpt_pv_str(&a->p, ckpt_pv_at(&a->p, path, 0));
        uint32_t at = name ? ckpt_map_find(&m->by_name, name) : CKPT_NONE;
        if (m->format && m->format->paths && name && ckpt_utf8_ok(name)) {
            json_t *full = path_of(&a->p, path);
            if (full)
                ckpt_json_set(m->format->paths, name, full);
        }
        if (at == CKPT_NONE)
            continue;
        if (ckpt_vec_push(&m->planned, at) < 0)
            return ckpt_nomem(err);
        if (!root || ckpt_pv_len(&a->p, path) < 2 || !ckpt_utf8_ok(root))
            continue;
        if (add_name(&m->by_root, &m->arena, root, m->roots.len, &own, &at, err) < 0)
            return -1;
        if (own && ckpt_vec_push(&m->roots, own) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* ---- a file ---- */

/* Append the file's tuples to those of the metadata. */
static int take_ints(struct adding *a, struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = a->m;

    if (m->ints.len == 0) {
        ckpt_vec_release(&m->ints);
        m->ints.ptr = ckpt_steal(&a->p.ints.ptr);
        m->ints.len = a->p.ints.len;
        m->ints.cap = a->p.ints.cap;
        a->p.ints.len = a->p.ints.cap = 0;
        return 0;
    }
    if (m->ints.len + a->p.ints.len > UINT32_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "the metadata has more than 2^32 sizes");
    if (ckpt_vec_reserve(&m->ints, a->p.ints.len) < 0)
        return ckpt_nomem(err);
    memcpy(m->ints.ptr + m->ints.len, a->p.ints.ptr, a->p.ints.len * sizeof *m->ints.ptr);
    m->ints.len += a->p.ints.len;
    return 0;
}

static int add(struct adding *a, struct ckpt_source *s, struct ckpt_err *err)
{
    if (s->size > CKPT_DCP_MAX_METADATA)
        return ckpt_fail(err, CKPT_LIMIT, "has %" PRIu64 " bytes", s->size);
    if (ckpt_pickle_read(s, 0, s->size, &rules, NULL, &a->p, err) < 0)
        return -1;
    if (ckpt_pv_rule(&a->p, a->p.root) != METADATA && ckpt_pv_rule(&a->p, a->p.root) != MCORE)
        return fail_value(a, a->p.root, "the pickle", "DCP's Metadata", err);
    a->state_dict = ckpt_pv_slot(&a->p, a->p.root, M_STATE_DICT);
    a->storage = ckpt_pv_slot(&a->p, a->p.root, M_STORAGE);
    if (ckpt_pv_kind(a->state_dict) != CKPT_PV_DICT)
        return fail_value(a, a->state_dict, "state_dict_metadata", "a dict", err);
    if (ckpt_pv_kind(a->storage) != CKPT_PV_DICT)
        return fail_value(a, a->storage, "storage_data", "a dict", err);
    a->base = (uint32_t)a->m->ints.len;
    if (index_storage(a, err) < 0 || add_tensors(a, err) < 0 ||
        add_plan(a, ckpt_pv_slot(&a->p, a->p.root, M_PLANNER), err) < 0)
        return -1;
    return take_ints(a, err);
}

int ckpt_dcp_metadata_add(struct ckpt_dcp_metadata *m, struct ckpt_source *s, bool rank_local,
                          struct ckpt_err *err)
{
    ckpt_cleanup(adding_release) struct adding a = {.m = m, .rank_local = rank_local};

    m->nfile++;
    if (add(&a, s, err) == 0)
        return 0;
    ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
    return ckpt_err_in(err, "'%s'", name ? name : "?");
}

/* ---- order ---- */

/* Does planned contain each of 0 .. n - 1 once? first[i] becomes the position of the smallest
 * number among the positions up to i. */
static bool is_complete(const uint32_t *planned, size_t n, uint32_t *first, bool *seen)
{
    for (size_t i = 0; i < n; i++) {
        if (planned[i] >= n || seen[planned[i]])
            return false;
        seen[planned[i]] = true;
        first[i] = i && planned[first[i - 1]] < planned[i] ? first[i - 1] : (uint32_t)i;
    }
    return true;
}

int ckpt_dcp_order(const uint32_t *planned, size_t nplanned, size_t n, uint32_t *ret)
{
    ckpt_cleanup(ckpt_freep) uint32_t *first = calloc(n + 1, sizeof *first);
    ckpt_cleanup(ckpt_freep) bool *seen = calloc(n + 1, sizeof *seen);
    size_t len = 0;

    if (!first || !seen)
        return -1;
    if (nplanned != n || !is_complete(planned, n, first, seen)) {
        for (size_t i = 0; i < n; i++)
            ret[i] = (uint32_t)i;
        return 0;
    }
    /* `planned` has a block of tensors for each rank, the last rank's first. A block begins with
     * the first tensor of the rank's plan, and the plans are numbered rank after rank: so a block
     * begins where a number is smaller than all before it. Take the last block that is left, and
     * again:
     *
     *     planned   5 6 | 2 4 3 | 0 1      first   0 0 | 2 2 2 | 5 5
     *     ret       0 1 | 2 4 3 | 5 6 */
    for (size_t left = n; left > 0;) {
        const size_t begin = first[left - 1];
        memcpy(ret + len, planned + begin, (left - begin) * sizeof *ret);
        len += left - begin;
        left = begin;
    }
    return 0;
}

/* ---- the end ---- */

static int tuple_cmp(const struct ckpt_dcp_metadata *m, uint32_t a, uint32_t b)
{
    uint32_t na = ckpt_dcp_rank(m, a), nb = ckpt_dcp_rank(m, b);

    if (na != nb)
        return na < nb ? -1 : 1;
    for (uint32_t i = 0; i < na; i++) {
        uint64_t x = ckpt_dcp_ints(m, a)[i], y = ckpt_dcp_ints(m, b)[i];
        if (x != y)
            return x < y ? -1 : 1;
    }
    return 0;
}

static int box_cmp(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_chunk *a,
                   const struct ckpt_dcp_chunk *b)
{
    int lo = tuple_cmp(m, a->lo, b->lo);
    return lo ? lo : tuple_cmp(m, a->n, b->n);
}

/* Order by tensor and box; equal boxes by file, because tuples of earlier files have lower
 * positions. */
static int chunk_cmp(const void *x, const void *y, void *ctx)
{
    const struct ckpt_dcp_chunk *a = x, *b = y;
    int c = ckpt_u64_cmp(a->tensor, b->tensor);

    c = c ? c : box_cmp(ctx, a, b);
    return c ? c : ckpt_u64_cmp(a->n, b->n);
}

/* Drop boxes that other ranks' files list too, which are the same data; that of the lowest rank
 * stays. */
static void drop_replicas(struct ckpt_dcp_metadata *m)
{
    size_t kept = 0;

    for (size_t i = 0; i < m->chunks.len; i++) {
        const struct ckpt_dcp_chunk *last = kept ? &m->chunks.ptr[kept - 1] : NULL;
        struct ckpt_dcp_chunk c = m->chunks.ptr[i];
        if (!last || last->tensor != c.tensor || box_cmp(m, last, &c) != 0)
            m->chunks.ptr[kept++] = c;
    }
    m->chunks.len = kept;
}

int ckpt_dcp_metadata_finish(struct ckpt_dcp_metadata *m, struct ckpt_err *err)
{
    if (m->nfile > 1 || (m->format && m->format->replicas)) {
        qsort_r(m->chunks.ptr, m->chunks.len, sizeof *m->chunks.ptr, chunk_cmp, m);
        drop_replicas(m);
    }
    for (size_t i = 0; i < m->chunks.len; i++) {
        struct ckpt_dcp_tensor *t = &m->tensors.ptr[m->chunks.ptr[i].tensor];
        if (t->nchunk++ == 0)
            t->first = i;
    }
    const bool may_be_empty =
        (m->format && m->format->may_be_empty) || (m->values_are_enough && m->nbytes_entry);
    if (m->tensors.len == 0 && !may_be_empty)
        return ckpt_fail(err, CKPT_MISSING, "the metadata names no tensor");
    if (!(m->order = calloc(m->tensors.len + 1, sizeof *m->order)) ||
        ckpt_dcp_order(m->planned.ptr, m->planned.len, m->tensors.len, m->order) < 0)
        return ckpt_nomem(err);
    return 0;
}

bool ckpt_dcp_chunk_bytes(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_chunk *c,
                          uint64_t *ret)
{
    const size_t esize = ckpt_dtype_size(m->tensors.ptr[c->tensor].dtype);

    return ckpt_shape_numel(ckpt_dcp_ints(m, c->n), ckpt_dcp_rank(m, c->n), ret) &&
           !ckd_mul(ret, *ret, (uint64_t)esize);
}

void ckpt_dcp_metadata_release(struct ckpt_dcp_metadata *m)
{
    ckpt_arena_release(&m->arena);
    ckpt_vec_release(&m->ints);
    ckpt_vec_release(&m->tensors);
    ckpt_vec_release(&m->planned);
    free(m->order);
    ckpt_vec_release(&m->chunks);
    ckpt_vec_release(&m->objects);
    ckpt_vec_release(&m->files);
    ckpt_vec_release(&m->roots);
    ckpt_map_release(&m->by_name);
    ckpt_map_release(&m->by_file);
    ckpt_map_release(&m->by_root);
}
