/* SPDX-License-Identifier: Apache-2.0 */
/* Writing `.metadata`. Classes and attributes' names stand once, at the beginning, from where the
 * memo repeats them. */
#include "format/dcp/out.h"

#include <stdio.h>

#include "container/torch_out.h"

/* ---- the memo ---- */

enum entry {
    SIZE,
    TENSOR,
    PROPERTIES,
    CHUNK,
    INDEX,
    INFO,
    OBJECT,
    N_GLOBALS,
    LAYOUT = N_GLOBALS, /* torch.strided */
    MEM_FORMAT,         /* contiguous */
    PROPERTIES_KEY,
    SIZE_KEY,
    CHUNKS_KEY,
    OFFSETS_KEY,
    SIZES_KEY,
    FQN_KEY,
    OFFSET_KEY,
    INDEX_KEY,
    PATH_KEY,
    LENGTH_KEY,
    N_ENTRIES,
};

static const char metadata_module[] = "torch.distributed.checkpoint.metadata";

/* Move the object on top of the stack into the memo. */
static void keep(struct ckpt_pickle_out *p)
{
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_POP);
}

static void put_globals(struct ckpt_pickle_out *p)
{
    static const struct {
        const char *module, *name;
    } global[N_GLOBALS] = {
        [SIZE] = {"torch", "Size"},
        [TENSOR] = {metadata_module, "TensorStorageMetadata"},
        [PROPERTIES] = {metadata_module, "TensorProperties"},
        [CHUNK] = {metadata_module, "ChunkStorageMetadata"},
        [INDEX] = {metadata_module, "MetadataIndex"},
        [INFO] = {"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
        [OBJECT] = {metadata_module, "BytesStorageMetadata"},
    };

    for (int i = 0; i < N_GLOBALS; i++) {
        ckpt_pickle_out_global(p, global[i].module, global[i].name);
        keep(p);
    }
}

static void put_memo(struct ckpt_pickle_out *p)
{
    static const char *const key[] = {"properties", "size",   "chunks", "offsets",       "sizes",
                                      "fqn",        "offset", "index",  "relative_path", "length"};
    const uint64_t contiguous = 0;

    put_globals(p);
    ckpt_pickle_out_global(p, "torch.serialization", "_get_layout");
    ckpt_pickle_out_text(p, "torch.strided");
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE1 CKPT_PICKLE_OUT_REDUCE);
    keep(p);
    ckpt_pickle_out_global(p, metadata_module, "_MEM_FORMAT_ENCODING");
    ckpt_pickle_out_tuple(p, &contiguous, 1, false);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_REDUCE);
    keep(p);
    for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
        ckpt_pickle_out_text(p, key[i]);
        keep(p);
    }
}

/* ---- objects ---- */

/* An object of the class on top of the stack; the same, whose state, a dict, is open: its items
 * follow; their end. */
#define NEW CKPT_PICKLE_OUT_EMPTY_TUPLE CKPT_PICKLE_OUT_NEWOBJ
#define OPEN_NEW NEW CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK
#define CLOSE_NEW CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_BUILD

static void open_object(struct ckpt_pickle_out *p, enum entry class)
{
    ckpt_pickle_out_get(p, class);
    ckpt_pickle_out_ops(p, OPEN_NEW);
}

/* torch.Size((...)) under a key. */
static void put_size(struct ckpt_pickle_out *p, enum entry key, const uint64_t *n, uint32_t count)
{
    ckpt_pickle_out_get(p, key);
    ckpt_pickle_out_get(p, SIZE);
    ckpt_pickle_out_tuple(p, n, count, false);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE1 CKPT_PICKLE_OUT_REDUCE);
}

/* (dtype, layout, requires_grad, memory format, pin_memory) */
static void put_properties(struct ckpt_pickle_out *p, enum ckpt_dtype dtype)
{
    ckpt_pickle_out_get(p, PROPERTIES_KEY);
    ckpt_pickle_out_get(p, PROPERTIES);
    ckpt_pickle_out_ops(p, NEW CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_global(p, "torch", ckpt_dtype_torch_name(dtype));
    ckpt_pickle_out_get(p, LAYOUT);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_FALSE);
    ckpt_pickle_out_get(p, MEM_FORMAT);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_FALSE CKPT_PICKLE_OUT_TUPLE CKPT_PICKLE_OUT_BUILD);
}

static void put_tensor(struct ckpt_pickle_out *p, const struct ckpt_dcp_state *s, size_t i,
                       const struct ckpt_dcp_key *key)
{
    struct ckpt_dcp_data d;

    open_object(p, TENSOR);
    put_properties(p, key->dtype);
    put_size(p, SIZE_KEY, key->dim, key->rank);
    ckpt_pickle_out_get(p, CHUNKS_KEY);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_LIST CKPT_PICKLE_OUT_MARK);
    for (size_t k = 0; s->chunk(s->ctx, i, k, &d); k++) {
        open_object(p, CHUNK);
        put_size(p, OFFSETS_KEY, d.off, key->rank);
        put_size(p, SIZES_KEY, d.dim, key->rank);
        ckpt_pickle_out_ops(p, CLOSE_NEW);
    }
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_APPENDS CLOSE_NEW);
}

static void put_key(struct ckpt_pickle_out *p, const struct ckpt_dcp_state *s, size_t i)
{
    struct ckpt_dcp_key key;

    s->key(s->ctx, i, &key);
    ckpt_pickle_out_text(p, key.name);
    if (!key.is_object) {
        put_tensor(p, s, i, &key);
        return;
    }
    ckpt_pickle_out_get(p, OBJECT);
    ckpt_pickle_out_ops(p, NEW);
}

/* A name's path in the state dict. */
static void put_path(struct ckpt_pickle_out *p, const struct ckpt_dcp_state *s, size_t i)
{
    struct ckpt_dcp_key key;

    s->key(s->ctx, i, &key);
    ckpt_pickle_out_text(p, key.name);
    if (!key.npath) {
        ckpt_pickle_out_text(p, key.name);
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE1);
        return;
    }
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_MARK);
    for (uint32_t k = 0; k < key.npath; k++)
        if (key.path[k])
            ckpt_pickle_out_text(p, key.path[k]);
        else
            ckpt_pickle_out_u64(p, key.number);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_TUPLE);
}

/* MetadataIndex(fqn, offset, index) */
static void put_index(struct ckpt_pickle_out *p, const struct ckpt_dcp_state *s,
                      const struct ckpt_dcp_part *part)
{
    struct ckpt_dcp_data d;
    struct ckpt_dcp_key key;

    s->key(s->ctx, part->key, &key);
    (void)s->chunk(s->ctx, part->key, part->index, &d);
    open_object(p, INDEX);
    ckpt_pickle_out_get(p, FQN_KEY);
    ckpt_pickle_out_text(p, key.name);
    if (key.is_object) {
        ckpt_pickle_out_get(p, OFFSET_KEY);
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_NONE);
    } else {
        put_size(p, OFFSET_KEY, d.off, key.rank);
    }
    ckpt_pickle_out_get(p, INDEX_KEY);
    if (s->indexed && !key.is_object)
        ckpt_pickle_out_u64(p, part->index);
    else
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_NONE);
    ckpt_pickle_out_ops(p, CLOSE_NEW);
}

/* MetadataIndex: _StorageInfo(relative_path, offset, length) */
static void put_part(struct ckpt_pickle_out *p, const struct ckpt_dcp_state *s, size_t i)
{
    const struct ckpt_dcp_part *part = &s->part[i];
    char path[64];

    (void)snprintf(path, sizeof path, "__%u_0.distcp", part->rank);
    put_index(p, s, part);
    open_object(p, INFO);
    ckpt_pickle_out_get(p, PATH_KEY);
    ckpt_pickle_out_text(p, path);
    ckpt_pickle_out_get(p, OFFSET_KEY);
    ckpt_pickle_out_u64(p, part->off);
    ckpt_pickle_out_get(p, LENGTH_KEY);
    ckpt_pickle_out_u64(p, part->len);
    ckpt_pickle_out_ops(p, CLOSE_NEW);
}

/* ---- the whole ---- */

/* A member of Metadata that is a dict, open. */
static void open_dict(struct ckpt_pickle_out *p, const char *key)
{
    ckpt_pickle_out_text(p, key);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
}

/* The dict is complete; the next one follows. */
static void end_dict(struct ckpt_pickle_out *p, const char *next)
{
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS);
    open_dict(p, next);
}

static void put_tail(struct ckpt_pickle_out *p)
{
    static const char *const unknown[] = {"checkpoint_id", "save_id", "load_id"};

    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS);
    ckpt_pickle_out_text(p, "storage_meta");
    ckpt_pickle_out_global(p, metadata_module, "StorageMeta");
    ckpt_pickle_out_ops(p, OPEN_NEW);
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        ckpt_pickle_out_text(p, unknown[i]);
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_NONE);
    }
    ckpt_pickle_out_text(p, "modules");
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_LIST CLOSE_NEW);
    ckpt_pickle_out_text(p, "version");
    ckpt_pickle_out_text(p, "1.0.0");
    ckpt_pickle_out_ops(p, CLOSE_NEW CKPT_PICKLE_OUT_STOP);
}

enum { BATCH = 1000 }; /* items of a dict that are set together, as Python does it */

static void next_item(struct ckpt_pickle_out *p, size_t i)
{
    if (i && i % BATCH == 0)
        ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_MARK);
}

/* The head; each key; each key's path; each part; the tail. */
static void put_entry(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct ckpt_dcp_state *s = ctx;
    const size_t n = s->nkey, npath = s->indexed ? n : 0;
    struct ckpt_pickle_out p = {.out = out, .memo = N_ENTRIES};

    if (i == 0) {
        ckpt_pickle_out_begin(&p);
        put_memo(&p);
        ckpt_pickle_out_global(&p, metadata_module, "Metadata");
        ckpt_pickle_out_ops(&p, OPEN_NEW);
        open_dict(&p, "state_dict_metadata");
    } else if (i <= n) {
        next_item(&p, i - 1);
        put_key(&p, s, i - 1);
    } else if (i <= n + npath) {
        next_item(&p, i - n - 1);
        put_path(&p, s, i - n - 1);
    } else if (i <= n + npath + s->npart) {
        next_item(&p, i - n - npath - 1);
        put_part(&p, s, i - n - npath - 1);
    } else {
        put_tail(&p);
    }
    if (i == n && npath)
        end_dict(&p, "planner_data");
    else if (i == n + npath)
        end_dict(&p, "storage_data");
}

int ckpt_dcp_metadata_text(const struct ckpt_dcp_state *s, struct ckpt_arena *arena,
                           struct ckpt_text *ret, struct ckpt_err *err)
{
    const size_t npath = s->indexed ? s->nkey : 0;

    return ckpt_text_init(ret, put_entry, s, s->nkey + npath + s->npart + 2, CKPT_TEXT_SHORT, arena,
                          err);
}
