/* SPDX-License-Identifier: Apache-2.0 */
/* Checking the headers of items when their data are read. */
#include "format/dcp/unread.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "container/torch.h"

enum {
    AROUND = 2048,   /* bytes at the end of an item, which hold its zip directory */
    SMALL = 1 << 20, /* items up to this size are fetched whole */
};

struct item {
    uint64_t off, end; /* of the item in the file */
    uint64_t data;     /* where the data should begin, and their length in bytes */
    uint64_t bytes;
    uint32_t shape; /* position in `shapes` */
    enum ckpt_dtype dtype;
    atomic_bool seen; /* its header was read, and is as it should be */
};

struct ckpt_dcp_unread {
    struct ckpt_source_guard guard;
    CKPT_VEC(struct item) items; /* by their places */
    CKPT_VEC(uint64_t) shapes;   /* of each item its rank, then so many dimensions */
    atomic_size_t left;          /* number of items that were not seen */
};

int ckpt_dcp_unread_new(struct ckpt_dcp_unread **ret, struct ckpt_err *err)
{
    *ret = calloc(1, sizeof **ret);
    return *ret ? 0 : ckpt_nomem(err);
}

void ckpt_dcp_unread_free(struct ckpt_dcp_unread *u)
{
    if (!u)
        return;
    ckpt_vec_release(&u->items);
    ckpt_vec_release(&u->shapes);
    free(u);
}

int ckpt_dcp_unread_add(struct ckpt_dcp_unread *u, const struct ckpt_dcp_metadata *m,
                        const struct ckpt_dcp_chunk *chunk, struct ckpt_err *err)
{
    const struct ckpt_dcp_tensor *t = &m->tensors.ptr[chunk->tensor];
    const uint64_t *dim = ckpt_dcp_ints(m, chunk->n);
    const uint32_t rank = ckpt_dcp_rank(m, chunk->n);
    const struct item *before = u->items.len ? &u->items.ptr[u->items.len - 1] : NULL;
    struct item *item;

    if (before && before->end > chunk->off)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "tensor '%s': its item at byte %" PRIu64
                         " lies in another tensor's, which ends at byte %" PRIu64,
                         t->name, chunk->off, before->end);
    if (ckpt_vec_add(&u->items, &item) < 0)
        return ckpt_nomem(err);
    item->off = chunk->off;
    item->end = chunk->off + chunk->len;
    item->data = chunk->data;
    item->dtype = t->dtype;
    item->shape = (uint32_t)u->shapes.len;
    (void)ckpt_dcp_chunk_bytes(m, chunk, &item->bytes);
    assert(item->data >= item->off && item->data + item->bytes <= item->end);
    if (ckpt_vec_push(&u->shapes, rank) < 0)
        return ckpt_nomem(err);
    for (uint32_t d = 0; d < rank; d++)
        if (ckpt_vec_push(&u->shapes, dim[d]) < 0)
            return ckpt_nomem(err);
    atomic_init(&item->seen, false);
    atomic_fetch_add_explicit(&u->left, 1, memory_order_relaxed);
    return 0;
}

/* ---- before a read ---- */

/* The first item that ends behind `off`. */
static size_t first_behind(const struct ckpt_dcp_unread *u, uint64_t off)
{
    size_t lo = 0, hi = u->items.len;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (u->items.ptr[mid].end <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool is_seen(const struct item *item)
{
    return atomic_load_explicit(&item->seen, memory_order_acquire);
}

/* Do bytes [off, end) have some of the item's data? */
static bool has_data(const struct item *item, uint64_t off, uint64_t end)
{
    return off < item->data + item->bytes && item->data < end;
}

static int check(const struct ckpt_dcp_unread *u, const struct item *item,
                 const struct ckpt_torch_tensor *t, struct ckpt_err *err)
{
    const uint64_t *shape = u->shapes.ptr + item->shape, *dim = shape + 1;
    const uint32_t rank = (uint32_t)shape[0];

    if (t->dtype != item->dtype || t->rank != rank || memcmp(t->dim, dim, rank * sizeof *dim) != 0)
        return ckpt_fail(err, CKPT_CONFLICT, "the item holds %s %s, the metadata say %s %s",
                         ckpt_dtype_name(t->dtype), ckpt_shape_text(t->dim, t->rank).text,
                         ckpt_dtype_name(item->dtype), ckpt_shape_text(dim, rank).text);
    if (!t->contiguous)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "it is not contiguous, although others like it are: open the checkpoint "
                         "with far=never, which reads every header first");
    if (t->off != item->data)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its data begin at byte %" PRIu64 ", by others like it at %" PRIu64
                         ": open the checkpoint with far=never, which reads every header first",
                         t->off, item->data);
    return 0;
}

/* Read and check the header, through the parts that hold the data if they are read in parts. */
static int see(struct ckpt_dcp_unread *u, struct ckpt_source *s, struct item *item,
               struct ckpt_torch_memo *memo, struct ckpt_err *err)
{
    struct ckpt_source_bare bare;
    struct ckpt_torch_tensor t;
    struct ckpt_err own = {0};

    ckpt_source_bare_init(&bare, s);
    if (ckpt_torch_item(&bare.source, item->off, item->end - item->off, memo, &t, &own) < 0 ||
        check(u, item, &t, &own) < 0) {
        ckpt_cleanup(ckpt_freep) char *name = ckpt_source_name(s);
        if (ckpt_source_check(s, err) < 0) /* it is not the file that was opened */
            return -1;
        (void)ckpt_err_move(err, &own);
        return ckpt_err_in(err, "item at byte %" PRIu64 " of '%s'", item->off, name);
    }
    if (!atomic_exchange_explicit(&item->seen, true, memory_order_acq_rel))
        atomic_fetch_sub_explicit(&u->left, 1, memory_order_relaxed);
    return 0;
}

/* The next item at or after i of which bytes [off, end) have data and whose header was not read;
 * NULL: there is none. */
static struct item *next_unread(const struct ckpt_dcp_unread *u, struct item *i, uint64_t off,
                                uint64_t end)
{
    struct item *last = u->items.ptr + u->items.len;

    for (; i < last && i->off < end; i++)
        if (!is_seen(i) && has_data(i, off, end))
            return i;
    return NULL;
}

/* The first of them. */
static struct item *first_unread(const struct ckpt_dcp_unread *u, uint64_t off, uint64_t end)
{
    return atomic_load_explicit(&u->left, memory_order_relaxed)
               ? next_unread(u, u->items.ptr + first_behind(u, off), off, end)
               : NULL;
}

/* Items' ends are fetched, or all of them if they are small. What the page cache reads is left to
 * it. */
static void begin(struct ckpt_source_guard *g, struct ckpt_source *s, uint64_t off, uint64_t end)
{
    const struct ckpt_dcp_unread *u = (const struct ckpt_dcp_unread *)g;

    if (end - off < CKPT_FAR_LEAST && !ckpt_source_is_object(s))
        return;
    for (struct item *i = first_unread(u, off, end); i; i = next_unread(u, i + 1, off, end)) {
        if (i->end - i->off <= SMALL) {
            (void)ckpt_source_prefetch(s, i->off, i->end - i->off);
            continue;
        }
        (void)ckpt_source_prefetch(s, i->off, i->data - i->off);
        (void)ckpt_source_prefetch(s, i->end - AROUND, AROUND);
    }
}

static int look(struct ckpt_source_guard *g, struct ckpt_source *s, bool waits, uint64_t off,
                uint64_t end, struct ckpt_err *err)
{
    struct ckpt_dcp_unread *u = (struct ckpt_dcp_unread *)g;
    ckpt_cleanup(ckpt_torch_memo_release) struct ckpt_torch_memo memo = {0};
    struct item *first = first_unread(u, off, end);

    if (first && !waits)
        return 1;
    for (struct item *i = first; i; i = next_unread(u, i + 1, off, end))
        if (see(u, s, i, &memo, err) < 0)
            return -1;
    return 0;
}

/* The ends of items are fetched with the data beside them. */
static void widen(struct ckpt_source_guard *g, struct ckpt_source *s, uint64_t *off, uint64_t *end)
{
    const struct ckpt_dcp_unread *u = (const struct ckpt_dcp_unread *)g;
    const struct item *i = u->items.ptr + first_behind(u, *off);
    const struct item *last = u->items.ptr + u->items.len;

    if (atomic_load_explicit(&u->left, memory_order_relaxed) == 0)
        return;
    if (i < last && i->off < *off && *off <= i->data && !is_seen(i))
        *off = i->off;
    for (; i < last && i->off < *end; i++) {
        if (i->end <= *end || is_seen(i) || !has_data(i, *off, *end))
            continue;
        if (*end >= i->data + i->bytes || i->end - i->off <= SMALL)
            *end = i->end;
        else if (*off <= i->data) /* the data go on behind the range */
            (void)ckpt_source_prefetch(s, i->end - AROUND, AROUND);
    }
}

static void free_guard(struct ckpt_source_guard *g)
{
    ckpt_dcp_unread_free((struct ckpt_dcp_unread *)g);
}

void ckpt_dcp_unread_guard(struct ckpt_dcp_unread *u, struct ckpt_source *file)
{
    u->guard = (struct ckpt_source_guard){begin, look, widen, free_guard};
    ckpt_vec_shrink(&u->items);
    ckpt_source_set_guard(file, &u->guard);
}
