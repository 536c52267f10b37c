/* SPDX-License-Identifier: Apache-2.0 */
/* Writing `.metadata`. Classes and attributes' names stand once, at the beginning, from where the
 * memo repeats them. */
#include "write/dcp_metadata_out.h"

#include <stdio.h>

#include "container/pickle_out.h"
#include "write/rows.h"

/* ---- the memo ---- */

enum entry {
    SIZE,
    TENSOR,
    PROPERTIES,
    CHUNK,
    INDEX,
    INFO,
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
    };

    for (int i = 0; i < N_GLOBALS; i++) {
        ckpt_pickle_out_global(p, global[i].module, global[i].name);
        ckpt_pickle_out_put(p);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_POP);
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
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_TUPLE1);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_REDUCE);
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_POP);
    ckpt_pickle_out_global(p, metadata_module, "_MEM_FORMAT_ENCODING");
    ckpt_pickle_out_tuple(p, &contiguous, 1, false);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_REDUCE);
    ckpt_pickle_out_put(p);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_POP);
    for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
        ckpt_pickle_out_text(p, key[i]);
        ckpt_pickle_out_put(p);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_POP);
    }
}

/* ---- objects ---- */

/* An object of a class whose state, a dict, is open: its items follow. */
static void open_object(struct ckpt_pickle_out *p, enum entry class)
{
    ckpt_pickle_out_get(p, class);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_TUPLE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_NEWOBJ);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_DICT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
}

static void close_object(struct ckpt_pickle_out *p)
{
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_SETITEMS);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_BUILD);
}

/* torch.Size((...)) under a key. */
static void put_size(struct ckpt_pickle_out *p, enum entry key, const uint64_t *n, uint32_t count)
{
    ckpt_pickle_out_get(p, key);
    ckpt_pickle_out_get(p, SIZE);
    ckpt_pickle_out_tuple(p, n, count, false);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_TUPLE1);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_REDUCE);
}

/* (dtype, layout, requires_grad, memory format, pin_memory) */
static void put_properties(struct ckpt_pickle_out *p, const struct ckpt_tensor *t)
{
    ckpt_pickle_out_get(p, PROPERTIES_KEY);
    ckpt_pickle_out_get(p, PROPERTIES);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_TUPLE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_NEWOBJ);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_global(p, "torch", ckpt_dtype_torch_name((enum ckpt_dtype)t->dtype));
    ckpt_pickle_out_get(p, LAYOUT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_FALSE);
    ckpt_pickle_out_get(p, MEM_FORMAT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_FALSE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_TUPLE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_BUILD);
}

static void put_chunk(struct ckpt_pickle_out *p, const struct ckpt_rows *r)
{
    uint64_t dim[CKPT_MAX_RANK], off[CKPT_MAX_RANK];

    ckpt_rows_dim(r, dim, off);
    open_object(p, CHUNK);
    put_size(p, OFFSETS_KEY, off, r->tensor->rank);
    put_size(p, SIZES_KEY, dim, r->tensor->rank);
    close_object(p);
}

static void put_tensor(struct ckpt_pickle_out *p, const struct ckpt_tensor *t, uint32_t ranks)
{
    struct ckpt_rows rows;

    ckpt_pickle_out_text(p, t->name);
    open_object(p, TENSOR);
    put_properties(p, t);
    put_size(p, SIZE_KEY, t->dim, t->rank);
    ckpt_pickle_out_get(p, CHUNKS_KEY);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_LIST);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
    for (uint32_t r = 0; r < ranks && ckpt_rows_of(t, r, ranks, &rows); r++)
        put_chunk(p, &rows);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_APPENDS);
    close_object(p);
}

/* A name's path in the state dict, which is flat. */
static void put_path(struct ckpt_pickle_out *p, const struct ckpt_tensor *t)
{
    ckpt_pickle_out_text(p, t->name);
    ckpt_pickle_out_text(p, t->name);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_TUPLE1);
}

/* MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length) */
static void put_part(struct ckpt_pickle_out *p, const struct ckpt_dcp_metadata *m,
                     const struct ckpt_dcp_part *part)
{
    uint64_t dim[CKPT_MAX_RANK], off[CKPT_MAX_RANK];
    struct ckpt_rows rows;
    char path[64];

    (void)snprintf(path, sizeof path, "__%u_0.distcp", part->rank);
    (void)ckpt_rows_of(&m->cat->tensors.ptr[part->tensor], part->rank, m->ranks, &rows);
    ckpt_rows_dim(&rows, dim, off);
    open_object(p, INDEX);
    ckpt_pickle_out_get(p, FQN_KEY);
    ckpt_pickle_out_text(p, rows.tensor->name);
    put_size(p, OFFSET_KEY, off, rows.tensor->rank);
    ckpt_pickle_out_get(p, INDEX_KEY);
    ckpt_pickle_out_u64(p, part->rank);
    close_object(p);
    open_object(p, INFO);
    ckpt_pickle_out_get(p, PATH_KEY);
    ckpt_pickle_out_text(p, path);
    ckpt_pickle_out_get(p, OFFSET_KEY);
    ckpt_pickle_out_u64(p, part->off);
    ckpt_pickle_out_get(p, LENGTH_KEY);
    ckpt_pickle_out_u64(p, part->len);
    close_object(p);
}

/* ---- the whole ---- */

/* A member of Metadata that is a dict, open. */
static void open_dict(struct ckpt_pickle_out *p, const char *key)
{
    ckpt_pickle_out_text(p, key);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_DICT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
}

static void put_head(struct ckpt_pickle_out *p)
{
    ckpt_pickle_out_begin(p);
    put_memo(p);
    ckpt_pickle_out_global(p, metadata_module, "Metadata");
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_TUPLE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_NEWOBJ);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_DICT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
    open_dict(p, "state_dict_metadata");
}

static void put_tail(struct ckpt_pickle_out *p)
{
    static const char *const unknown[] = {"checkpoint_id", "save_id", "load_id"};

    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_SETITEMS);
    ckpt_pickle_out_text(p, "storage_meta");
    ckpt_pickle_out_global(p, metadata_module, "StorageMeta");
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_TUPLE);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_NEWOBJ);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_DICT);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        ckpt_pickle_out_text(p, unknown[i]);
        ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_NONE);
    }
    ckpt_pickle_out_text(p, "modules");
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_EMPTY_LIST);
    close_object(p);
    ckpt_pickle_out_text(p, "version");
    ckpt_pickle_out_text(p, "1.0.0");
    close_object(p);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_STOP);
}

enum { BATCH = 1000 }; /* items of a dict that are set together, as Python does it */

static void next_item(struct ckpt_pickle_out *p, size_t i)
{
    if (i == 0 || i % BATCH)
        return;
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_SETITEMS);
    ckpt_pickle_out_op(p, CKPT_PICKLE_OUT_MARK);
}

/* The head; each tensor; each tensor's path; each part; the tail. */
static void put_entry(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct ckpt_dcp_metadata *m = ctx;
    const size_t n = m->cat->tensors.len;
    struct ckpt_pickle_out p = {.out = out, .memo = N_ENTRIES};

    if (i == 0) {
        put_head(&p);
    } else if (i <= n) {
        next_item(&p, i - 1);
        put_tensor(&p, &m->cat->tensors.ptr[i - 1], m->ranks);
    } else if (i <= 2 * n) {
        next_item(&p, i - n - 1);
        put_path(&p, &m->cat->tensors.ptr[i - n - 1]);
    } else if (i <= 2 * n + m->npart) {
        next_item(&p, i - 2 * n - 1);
        put_part(&p, m, &m->part[i - 2 * n - 1]);
    } else {
        put_tail(&p);
    }
    if (i == n || i == 2 * n) {
        ckpt_pickle_out_op(&p, CKPT_PICKLE_OUT_SETITEMS);
        open_dict(&p, i == n && n ? "planner_data" : "storage_data");
    }
}

int ckpt_dcp_metadata_text(const struct ckpt_dcp_metadata *m, struct ckpt_arena *arena,
                           struct ckpt_text *ret, struct ckpt_err *err)
{
    return ckpt_text_init(ret, put_entry, m, 2 * m->cat->tensors.len + m->npart + 2, arena, err);
}
