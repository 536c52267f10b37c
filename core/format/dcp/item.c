/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the headers of items. */
#include "format/dcp/metadata.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/par.h"
#include "base/sort.h"
#include "container/safetensors.h"
#include "container/torch.h"
#include "format/dcp/unread.h"
#include "tensor/strided.h"

enum { TASK_ITEMS = 2048 }; /* number of items that one thread reads in a batch */

/* The safetensors file that was read last; items refer to it by its offset. */
struct blob {
    uint64_t off;
    struct ckpt_st st;
    struct ckpt_map by_name; /* empty: there is none */
};

static void blob_release(struct blob *b)
{
    ckpt_map_release(&b->by_name);
    ckpt_st_release(&b->st);
}

/* Items at a distance that torch.save has written alike (unread.h). */
struct kind {
    size_t first, last; /* positions in `order`; the headers of these two are read */
    bool is_alike;      /* these two are archives of contiguous tensors, with as much before them */
};

struct reading {
    struct ckpt_dcp_items *items;
    struct ckpt_dcp_metadata *m;
    struct ckpt_source *const *source;
    CKPT_VEC(struct ckpt_dcp_chunk *) order; /* the chunks by file and offset */
    CKPT_VEC(size_t) todo;                   /* those in `order` whose headers are read now */
    CKPT_VEC(size_t) tasks;                  /* first position in `todo` of each task; the end */
    CKPT_VEC(struct kind) kinds;
    CKPT_VEC(uint32_t) kind_of; /* by position in `order`; CKPT_NONE: its header is read */
    struct ckpt_map by_key;     /* kinds; the keys are in `keys` */
    struct ckpt_arena keys;
};

static void reading_release(struct reading *r)
{
    ckpt_vec_release(&r->order);
    ckpt_vec_release(&r->todo);
    ckpt_vec_release(&r->tasks);
    ckpt_vec_release(&r->kinds);
    ckpt_vec_release(&r->kind_of);
    ckpt_map_release(&r->by_key);
    ckpt_arena_release(&r->keys);
}

static struct ckpt_dcp_chunk *chunk_to_read(const struct reading *r, size_t k)
{
    return r->order.ptr[r->todo.ptr[k]];
}

/* The data of one thread. */
struct task {
    struct reading *r;
    struct ckpt_torch_memo memo;
    struct blob blob;
};

static void task_release(struct task *t)
{
    ckpt_torch_memo_release(&t->memo);
    blob_release(&t->blob);
}

static int keep_strides(struct reading *r, const struct ckpt_torch_tensor *t,
                        struct ckpt_dcp_chunk *c, struct ckpt_err *err)
{
    int result = 0;

    if (t->contiguous)
        return 0;
    (void)pthread_mutex_lock(&r->items->lock);
    c->strides = (uint32_t)r->items->strides.len + 1;
    for (uint32_t d = 0; d < t->rank && result == 0; d++)
        result = ckpt_vec_push(&r->items->strides, t->stride[d]);
    (void)pthread_mutex_unlock(&r->items->lock);
    return result < 0 ? ckpt_nomem(err) : 0;
}

static int check_item(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_chunk *c,
                      enum ckpt_dtype dtype, const uint64_t *dim, uint32_t rank,
                      struct ckpt_err *err)
{
    const struct ckpt_dcp_tensor *t = &m->tensors.ptr[c->tensor];

    if (dtype != t->dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "the item holds %s, the metadata say %s",
                         ckpt_dtype_name(dtype), ckpt_dtype_name(t->dtype));
    if (rank != ckpt_dcp_rank(m, c->n) ||
        memcmp(dim, ckpt_dcp_ints(m, c->n), rank * sizeof *dim) != 0)
        return ckpt_fail(err, CKPT_CONFLICT, "the item has shape %s, the metadata say %s",
                         ckpt_shape_text(dim, rank).text,
                         ckpt_shape_text(ckpt_dcp_ints(m, c->n), ckpt_dcp_rank(m, c->n)).text);
    return 0;
}

static int read_zip(struct task *t, struct ckpt_source *s, uint64_t off, uint64_t len,
                    struct ckpt_dcp_chunk *c, struct ckpt_err *err)
{
    struct ckpt_torch_tensor tensor;

    if (ckpt_torch_item(s, off, len, &t->memo, &tensor, err) < 0 ||
        check_item(t->r->m, c, tensor.dtype, tensor.dim, tensor.rank, err) < 0)
        return -1;
    c->data = tensor.off;
    return keep_strides(t->r, &tensor, c, err);
}

/* ---- compressed items ---- */

enum { AROUND = 1 << 20 /* bytes of an archive besides its tensor */ };

int ckpt_dcp_decompress(struct ckpt_dcp_items *items, struct ckpt_source *s, uint64_t off,
                        uint64_t len, uint64_t max_len, struct ckpt_source **ret,
                        struct ckpt_err *err)
{
    unsigned char head[CKPT_ZSTD_MAGIC_LEN] = {0};

    *ret = NULL;
    if (len < sizeof head)
        return 0;
    if (ckpt_source_pread(s, head, sizeof head, off, err) < 0)
        return -1;
    if (!ckpt_zstd_is_frame(head))
        return 0;
    if (ckd_add(&max_len, max_len, AROUND))
        max_len = UINT64_MAX;
    (void)pthread_mutex_lock(&items->lock);
    const int result =
        items->store ? 0 : ckpt_decoded_new(CKPT_DECODED_BUDGET, items->spill, &items->store, err);
    (void)pthread_mutex_unlock(&items->lock);
    return result < 0 ? -1 : ckpt_source_zstd_new(items->store, s, off, len, max_len, ret, err);
}

static int read_zstd(struct task *t, struct ckpt_source *s, struct ckpt_dcp_chunk *c,
                     struct ckpt_err *err)
{
    struct ckpt_dcp_items *items = t->r->items;
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *plain = NULL;
    uint64_t bytes;

    if (!ckpt_dcp_chunk_bytes(t->r->m, c, &bytes))
        return ckpt_fail(err, CKPT_LIMIT, "it claims more than 2^64 bytes");
    if (ckpt_dcp_decompress(items, s, c->off, c->len, bytes, &plain, err) < 0 ||
        read_zip(t, plain, 0, plain->size, c, err) < 0)
        return -1;
    ckpt_source_zstd_settle(plain);
    (void)pthread_mutex_lock(&items->lock);
    const int result = ckpt_vec_push(&items->plain, plain);
    c->plain = (uint32_t)items->plain.len;
    (void)pthread_mutex_unlock(&items->lock);
    if (result < 0)
        return ckpt_nomem(err);
    (void)ckpt_steal(&plain);
    return 0;
}

/* ---- SerializationFormat.SAFETENSORS ---- */

static int open_blob(struct task *t, struct ckpt_source *s, uint64_t off, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *window = NULL;
    struct blob *b = &t->blob;

    if (b->by_name.len && b->off == off)
        return 0;
    blob_release(b);
    *b = (struct blob){.off = off};
    if (ckpt_source_window_new(s, off, s->size - off, &window, err) < 0 ||
        ckpt_st_read(window, &b->st, err) < 0)
        return -1;
    for (size_t i = 0; i < b->st.ntensor; i++)
        if (ckpt_map_add(&b->by_name, b->st.tensor[i].name, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    return 0;
}

static int read_blob(struct task *t, struct ckpt_source *s, struct ckpt_dcp_chunk *c,
                     struct ckpt_err *err)
{
    const char *name = t->r->m->tensors.ptr[c->tensor].name;

    if (open_blob(t, s, c->off, err) < 0)
        return -1;
    const uint32_t at = ckpt_map_find(&t->blob.by_name, name);
    if (at == CKPT_NONE)
        return ckpt_fail(err, CKPT_FORMAT, "the safetensors part of the file does not hold it");
    const struct ckpt_st_tensor *st = &t->blob.st.tensor[at];
    if (check_item(t->r->m, c, st->dtype, st->dim, st->rank, err) < 0)
        return -1;
    c->data = c->off + st->off;
    return 0;
}

/* ---- all items ---- */

/* Fail if two chunks claim the same archive, since only one of them can be right. k is the position
 * in the order. */
static int check_own(const struct reading *r, size_t k, struct ckpt_err *err)
{
    const struct ckpt_dcp_chunk *c = r->order.ptr[k], *before = k ? r->order.ptr[k - 1] : NULL;

    if (!before || before->file != c->file || c->off - before->off >= before->len)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "the metadata say that a chunk of tensor '%s' lies there, too",
                     r->m->tensors.ptr[before->tensor].name);
}

/* at: the position in the order */
static int read_item(struct task *t, size_t at, struct ckpt_err *err)
{
    static const unsigned char zip[4] = {'P', 'K', 3, 4};
    struct ckpt_dcp_chunk *c = t->r->order.ptr[at];
    struct ckpt_source *s = t->r->source[c->file];
    unsigned char head[9];

    if (ckpt_source_pread(s, head, sizeof head, c->off, err) < 0)
        return -1;
    c->is_archive = memcmp(head, zip, sizeof zip) == 0;
    if (c->is_archive)
        return check_own(t->r, at, err) < 0 ? -1 : read_zip(t, s, c->off, c->len, c, err);
    if (ckpt_zstd_is_frame(head))
        return check_own(t->r, at, err) < 0 ? -1 : read_zstd(t, s, c, err);
    if (head[8] == '{' && head[7] == 0 && head[6] == 0)
        return read_blob(t, s, c, err);
    return ckpt_fail(err, CKPT_FORMAT,
                     "the item is neither a torch.save archive nor part of a safetensors file");
}

/* Begin to fetch the headers of chunks from position k of `todo` on, which lie at both ends of an
 * item. Where items are small that may be all of the file, in steps of which the memory for parts
 * keeps those of all threads until they are read. Where the step ends. */
static size_t fetch_headers(const struct reading *r, size_t k, size_t end)
{
    enum { HEADER = 8 * 1024, AT_ONCE = 4 << 20 };
    struct ckpt_source *s = r->source[chunk_to_read(r, k)->file];
    struct ckpt_batch batch;
    struct ckpt_err ignored = {0};

    if (!ckpt_source_is_far(s))
        return end;
    ckpt_batch_init(&batch, CKPT_READ_PREFETCH);
    for (uint64_t bytes = 0; k < end && bytes < AT_ONCE; k++) {
        const struct ckpt_dcp_chunk *c = chunk_to_read(r, k);
        const uint64_t len = ckpt_min_u64(c->len, HEADER);
        if (ckpt_batch_add(&batch, s, NULL, len, c->off, &ignored) < 0 ||
            ckpt_batch_add(&batch, s, NULL, len, c->off + c->len - len, &ignored) < 0)
            break;
        bytes += c->len < 2 * HEADER + CKPT_STRIDED_GAP ? c->len : 2 * HEADER;
    }
    (void)ckpt_batch_fetch(&batch, CKPT_STRIDED_GAP);
    ckpt_batch_release(&batch);
    return k;
}

static int fail_item(const struct reading *r, const struct ckpt_dcp_chunk *c, struct ckpt_err *err)
{
    return ckpt_err_in(err, "tensor '%s', item at byte %" PRIu64 " of '%s'",
                       r->m->tensors.ptr[c->tensor].name, c->off, r->m->files.ptr[c->file]);
}

static int read_task(void *ctx, size_t i, struct ckpt_err *err)
{
    struct reading *r = ctx;
    ckpt_cleanup(task_release) struct task t = {.r = r};

    const size_t end = r->tasks.ptr[i + 1];
    for (size_t k = r->tasks.ptr[i], fetched = k; k < end; k++) {
        const struct ckpt_dcp_chunk *c = chunk_to_read(r, k);
        if (k == fetched)
            fetched = fetch_headers(r, k, end);
        if (read_item(&t, r->todo.ptr[k], err) < 0)
            return fail_item(r, c, err);
    }
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct ckpt_dcp_chunk *p = *(struct ckpt_dcp_chunk *const *)a;
    const struct ckpt_dcp_chunk *q = *(struct ckpt_dcp_chunk *const *)b;
    const int c = ckpt_u64_cmp(p->file, q->file);

    return c ? c : ckpt_u64_cmp(p->off, q->off);
}

static int sort_chunks(struct reading *r, struct ckpt_err *err)
{
    const struct ckpt_dcp_metadata *m = r->m;

    for (size_t i = 0; i < m->tensors.len; i++) {
        const struct ckpt_dcp_tensor *t = &m->tensors.ptr[i];
        for (size_t k = t->first; k < t->first + t->nchunk; k++) {
            struct ckpt_dcp_chunk *c = &m->chunks.ptr[k];
            uint64_t numel = 0;
            (void)ckpt_shape_numel(ckpt_dcp_ints(m, c->n), ckpt_dcp_rank(m, c->n), &numel);
            if (numel && ckpt_vec_push(&r->order, c) < 0)
                return ckpt_nomem(err);
        }
    }
    ckpt_sort(r->order.ptr, r->order.len, by_place);
    return 0;
}

/* Divide the chunks whose headers are read now into tasks, each within one file. */
static int split(struct reading *r, struct ckpt_err *err)
{
    const size_t n = r->todo.len;
    size_t begin = 0;

    r->tasks.len = 0;
    for (size_t k = 0; k <= n; k++) {
        bool is_new = k == 0 || k == n || k - begin == TASK_ITEMS ||
                      chunk_to_read(r, k)->file != chunk_to_read(r, k - 1)->file;
        if (!is_new)
            continue;
        begin = k;
        if (ckpt_vec_push(&r->tasks, k) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int read_headers(struct reading *r, struct ckpt_err *err)
{
    return split(r, err) < 0 ? -1 : ckpt_parallel(r->tasks.len - 1, 0, read_task, r, err);
}

/* ---- headers that are read with the data ---- */

enum { KEY_LEN = CKPT_DCP_MAX_NAME + 96 }; /* with numbers behind the name */

static bool may_wait(struct ckpt_source *s)
{
    return ckpt_source_is_far(s) && !ckpt_source_is_elsewhere(s) &&
           ckpt_dir_far_options(ckpt_source_file_dir(s))->rule != CKPT_FAR_NEVER;
}

/* Name what items have in common of which torch.save writes as many bytes before the data: the
 * tensor's name without its numbers, its dtype and rank, the number of bytes around the data, and
 * how these end between two of torch's boundaries of 64 bytes. */
static void key_of(const struct reading *r, const struct ckpt_dcp_chunk *c, uint64_t bytes,
                   char key[KEY_LEN])
{
    enum { BOUNDARY = 64 };
    const struct ckpt_dcp_tensor *t = &r->m->tensors.ptr[c->tensor];
    size_t n = 0;

    for (const char *p = t->name; *p; p++)
        if (*p < '0' || *p > '9')
            key[n++] = *p;
    (void)snprintf(key + n, KEY_LEN - n, " %d %" PRIu32 " %" PRIu64 " %" PRIu64, (int)t->dtype,
                   ckpt_dcp_rank(r->m, c->n), c->len - bytes, bytes % BOUNDARY);
}

/* The kind with this key, a new one if there is none; CKPT_NONE: there is no memory. */
static uint32_t kind_by_key(struct reading *r, const char *key, size_t at)
{
    const uint32_t found = ckpt_map_find(&r->by_key, key), next = (uint32_t)r->kinds.len;

    if (found != CKPT_NONE)
        return found;
    const char *kept = ckpt_arena_strdup(&r->keys, key);
    return kept && ckpt_vec_push(&r->kinds, ((struct kind){.first = at})) == 0
               ? ckpt_map_add(&r->by_key, kept, next)
               : CKPT_NONE;
}

/* Find the kind of the item at this position, unless its header is read in any case. */
static int find_kind(struct reading *r, size_t at, struct ckpt_err *err)
{
    const struct ckpt_dcp_chunk *c = r->order.ptr[at];
    uint32_t kind = CKPT_NONE;
    uint64_t bytes;

    if (may_wait(r->source[c->file]) && !r->m->tensors.ptr[c->tensor].codec &&
        ckpt_dcp_chunk_bytes(r->m, c, &bytes) && bytes < c->len) {
        char key[KEY_LEN];
        key_of(r, c, bytes, key);
        if ((kind = kind_by_key(r, key, at)) == CKPT_NONE)
            return ckpt_nomem(err);
        r->kinds.ptr[kind].last = at;
    }
    return ckpt_vec_push(&r->kind_of, kind) < 0 ? ckpt_nomem(err) : 0;
}

/* The kind of the item at this position, if its header is not one of the two of that kind; NULL:
 * its header is read in any case. */
static const struct kind *kind_at(const struct reading *r, size_t at)
{
    const uint32_t kind = r->kind_of.ptr[at];
    const struct kind *k = kind == CKPT_NONE ? NULL : &r->kinds.ptr[kind];

    return k && at != k->first && at != k->last ? k : NULL;
}

static bool is_plain(const struct ckpt_dcp_chunk *c) { return c->is_archive && c->strides == 0; }

static uint64_t before_data(const struct ckpt_dcp_chunk *c) { return c->data - c->off; }

/* After the two headers of each kind were read. */
static void compare_samples(struct reading *r)
{
    for (size_t i = 0; i < r->kinds.len; i++) {
        struct kind *k = &r->kinds.ptr[i];
        const struct ckpt_dcp_chunk *a = r->order.ptr[k->first], *b = r->order.ptr[k->last];
        k->is_alike = is_plain(a) && is_plain(b) && before_data(a) == before_data(b);
    }
}

/* Give the items of one file, from this position on, to its source. *ret_end is where the next
 * file's begin. */
static int guard_file(struct reading *r, size_t at, size_t *ret_end, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dcp_unread_freep) struct ckpt_dcp_unread *u = NULL;
    const uint32_t file = r->order.ptr[at]->file;

    for (; at < r->order.len && r->order.ptr[at]->file == file; at++) {
        struct ckpt_dcp_chunk *c = r->order.ptr[at];
        const struct kind *k = kind_at(r, at);
        if (!k || !k->is_alike)
            continue;
        c->data = c->off + before_data(r->order.ptr[k->first]);
        if (check_own(r, at, err) < 0)
            return fail_item(r, c, err);
        if ((!u && ckpt_dcp_unread_new(&u, err) < 0) || ckpt_dcp_unread_add(u, r->m, c, err) < 0)
            return -1;
    }
    *ret_end = at;
    if (u)
        ckpt_dcp_unread_guard(ckpt_steal(&u), r->source[file]);
    return 0;
}

/* Read the headers that others depend on, then those of which nothing is known. */
static int read_first(struct reading *r, struct ckpt_err *err)
{
    for (size_t at = 0; at < r->order.len; at++)
        if (find_kind(r, at, err) < 0)
            return -1;
    for (size_t at = 0; at < r->order.len; at++)
        if (!kind_at(r, at) && ckpt_vec_push(&r->todo, at) < 0)
            return ckpt_nomem(err);
    if (read_headers(r, err) < 0)
        return -1;
    compare_samples(r);
    return 0;
}

/* Read the headers of items that turned out to be written differently. */
static int read_others(struct reading *r, struct ckpt_err *err)
{
    r->todo.len = 0;
    for (size_t at = 0; at < r->order.len; at++) {
        const struct kind *k = kind_at(r, at);
        if (k && !k->is_alike && ckpt_vec_push(&r->todo, at) < 0)
            return ckpt_nomem(err);
    }
    return read_headers(r, err);
}

int ckpt_dcp_items_read(struct ckpt_dcp_items *items, struct ckpt_dcp_metadata *m,
                        struct ckpt_source *const *source, struct ckpt_err *err)
{
    ckpt_cleanup(reading_release) struct reading r = {.items = items, .m = m, .source = source};

    if (sort_chunks(&r, err) < 0 || read_first(&r, err) < 0 || read_others(&r, err) < 0)
        return -1;
    for (size_t at = 0; at < r.order.len;)
        if (guard_file(&r, at, &at, err) < 0)
            return -1;
    return 0;
}

void ckpt_dcp_items_init(struct ckpt_dcp_items *items)
{
    *items = (struct ckpt_dcp_items){0};
    (void)pthread_mutex_init(&items->lock, NULL);
}

void ckpt_dcp_items_release(struct ckpt_dcp_items *items)
{
    for (size_t i = 0; i < items->plain.len; i++)
        ckpt_source_unref(items->plain.ptr[i]);
    ckpt_vec_release(&items->plain);
    ckpt_decoded_unref(items->store);
    (void)pthread_mutex_destroy(&items->lock);
    ckpt_vec_release(&items->strides);
}

void ckpt_dcp_strides(const struct ckpt_dcp_items *items, const struct ckpt_dcp_chunk *c,
                      const struct ckpt_box *box, size_t esize, uint64_t *ret)
{
    if (c->strides == 0)
        ckpt_box_strides(box, esize, ret);
    else
        memcpy(ret, items->strides.ptr + c->strides - 1, box->rank * sizeof *ret);
}
