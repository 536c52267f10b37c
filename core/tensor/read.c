/* SPDX-License-Identifier: Apache-2.0 */
/* Boxes of stored tensors are read in batches; boxes of computed tensors are made from boxes, or
 * ranges of elements, of their operands. A range of bytes is whole elements, and parts of the first
 * and the last one. */
#include "tensor/read.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "io/source.h"

enum {
    CHUNK_BYTES = 1024 * 1024, /* size of a computed tensor's part that is made at once for a box */
    OPERAND_BYTES = 512 * 1024,    /* size of an operand's part that is read at once for a range */
    COMBINED_BYTES = 128 * 1024,   /* the same, if there are several operands */
    SLAB_MIN_TENSOR = 1024 * 1024, /* smaller transposed tensors are read whole anyway */
    SLAB_BYTES = 64 * 1024 * 1024, /* size limit of one slab of a transposed tensor */
};

static const struct ckpt_box_cost usual_cost = {.gap = CKPT_STRIDED_GAP,
                                                .bound = CKPT_STRIDED_BOUND,
                                                .run = UINT64_MAX,
                                                .hot_hole = CKPT_STRIDED_HOT_HOLE};

/* ---- computed tensors ---- */

/* Each element of a box is computed from the same element of the operand. Without a cost the box is
 * a range of elements: its operand is, too, and is read in chunks. */
static int read_elementwise(struct ckpt_reading *rd, const struct ckpt_box_read *read,
                            const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    const struct ckpt_value *v = read->tensor->value;
    const struct ckpt_tensor *t = read->tensor, *from = v->arg[0];
    const size_t esize = ckpt_dtype_size(from->dtype);
    const uint64_t numel = ckpt_box_numel(&read->box), lo = cost ? 0 : read->box.lo[0];
    const uint64_t step = cost ? numel : ckpt_min_u64(numel, OPERAND_BYTES / esize);
    ckpt_cleanup(ckpt_freep) void *raw = malloc((size_t)step * esize);
    const struct ckpt_box_read whole = {from, read->box, raw};
    char *out = read->buf;

    if (!raw)
        return ckpt_nomem(err);
    for (uint64_t done = 0, n; done < numel; done += n) {
        n = ckpt_min_u64(step, numel - done);
        if ((cost ? ckpt_boxes_pread(rd, &whole, 1, cost, err)
                  : ckpt_elements_pread(from, rd, raw, lo + done, lo + done + n, err)) < 0)
            return -1;
        v->ops->elements(v, out, t->dtype, raw, from->dtype, (size_t)n);
        out += n * ckpt_dtype_size(t->dtype);
    }
    return 0;
}

/* The slowest dimension of which the box has several indices; its rank if none. */
static uint32_t first_dim(const struct ckpt_box *box)
{
    uint32_t d = 0;

    while (d < box->rank && box->n[d] == 1)
        d++;
    return d;
}

/* The size of an element of the operand with the largest. */
static size_t largest_element(const struct ckpt_value *v)
{
    size_t most = 1;

    for (uint32_t i = 0; i < v->narg; i++)
        if (ckpt_dtype_size(v->arg[i]->dtype) > most)
            most = ckpt_dtype_size(v->arg[i]->dtype);
    return most;
}

/* Likewise, where each element is computed from the same element of several operands. A few rows of
 * all of them are read at a time. */
static int read_combined(struct ckpt_reading *rd, const struct ckpt_box_read *read,
                         const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = read->tensor;
    const struct ckpt_value *v = t->value;
    const uint32_t d = first_dim(&read->box);
    const uint64_t rows = d < read->box.rank ? read->box.n[d] : 1,
                   row = ckpt_box_numel(&read->box) / rows;
    const size_t esize = largest_element(v);
    const uint64_t step = ckpt_min_u64(rows, ckpt_max_u64(1, COMBINED_BYTES / esize / row));
    const size_t room = (size_t)(step * row) * esize;
    ckpt_cleanup(ckpt_freep) char *raw = malloc(v->narg * room);
    ckpt_cleanup(ckpt_freep) const void **src = calloc(v->narg, sizeof *src);
    struct ckpt_box part = read->box;
    char *out = read->buf;

    if (!raw || !src)
        return ckpt_nomem(err);
    for (uint64_t at = 0, n; at < rows; at += n) {
        n = ckpt_min_u64(step, rows - at);
        if (d < part.rank) {
            part.lo[d] = read->box.lo[d] + at;
            part.n[d] = n;
        }
        for (uint32_t i = 0; i < v->narg; i++) {
            const struct ckpt_box_read one = {v->arg[i], part, raw + i * room};
            src[i] = one.buf;
            if ((cost ? ckpt_boxes_pread(rd, &one, 1, cost, err)
                      : ckpt_elements_pread(v->arg[i], rd, one.buf, part.lo[0],
                                            part.lo[0] + part.n[0], err)) < 0)
                return -1;
        }
        v->ops->combine(out, t->dtype, src, v->arg, v->narg, (size_t)(n * row));
        out += n * row * ckpt_dtype_size(t->dtype);
    }
    return 0;
}

/* The innermost dimension that the box does not span; 0 if it spans all of them. */
static uint32_t split_dim(const struct ckpt_tensor *t, const struct ckpt_box *box)
{
    uint32_t d = box->rank;

    while (d > 1 && box->n[d - 1] == t->dim[d - 1])
        d--;
    return d ? d - 1 : 0;
}

/* Read a box of another computed tensor row by row: several whole rows of those dimensions of which
 * the box has only a part are made at once, and the box's part is kept. */
static int read_rows(struct ckpt_reading *rd, const struct ckpt_box_read *read,
                     struct ckpt_err *err)
{
    const struct ckpt_tensor *t = read->tensor;
    const struct ckpt_box *box = &read->box;
    const size_t esize = ckpt_dtype_size(t->dtype);
    uint64_t unit[CKPT_MAX_RANK + 1], dense[CKPT_MAX_RANK], index[CKPT_MAX_RANK] = {0};
    const uint32_t d = split_dim(t, box), outer = d ? d - 1 : 0;
    unsigned char *out = read->buf;

    ckpt_shape_strides(t->dim, box->rank, unit);
    ckpt_box_strides(box, esize, dense);
    if (box->rank == 0 || d == 0) { /* one range */
        uint64_t lo, hi;
        ckpt_box_range(box, t->dim, &lo, &hi);
        return ckpt_elements_pread(t, rd, out, lo, hi, err);
    }
    const uint64_t row = unit[outer]; /* elements a step of `outer`, of which the box has a part */
    const uint64_t step = ckpt_max_u64(1, CHUNK_BYTES / (row * esize));
    ckpt_cleanup(ckpt_freep) unsigned char *rows =
        malloc((size_t)(ckpt_min_u64(step, box->n[outer]) * row) * esize);
    if (!rows)
        return ckpt_nomem(err);
    for (;;) {
        uint64_t n = ckpt_min_u64(step, box->n[outer] - index[outer]), lo = 0;
        struct ckpt_step_axis axis[2] = {{n, dense[outer], row * esize},
                                         {box->n[d] * unit[d], esize, esize}};
        struct ckpt_ndcopy copy;
        for (uint32_t k = 0; k <= outer; k++)
            lo += (box->lo[k] + index[k]) * unit[k];
        if (ckpt_elements_pread(t, rd, rows, lo, lo + n * row, err) < 0)
            return -1;
        ckpt_ndcopy_init(&copy, axis, 2, esize);
        ckpt_ndcopy_run(&copy, out, rows + box->lo[d] * unit[d] * esize);
        out += n * dense[outer];
        index[outer] += n;
        for (uint32_t k = outer; index[k] == box->n[k];) {
            if (k == 0)
                return 0;
            index[k--] = 0;
            index[k]++;
        }
    }
}

/* ---- what will be read ---- */

static size_t slab_bytes(const struct ckpt_tensor *t);

/* Add what is read for a box of a stored tensor to a batch of CKPT_READ_PREFETCH. */
static int add_prefetch(struct ckpt_batch *batch, const struct ckpt_box_read *read,
                        const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    struct ckpt_strided_reader reader = {
        .batch = batch, .gap = cost->gap, .bound = cost->bound, .run = cost->run};

    return ckpt_stored_read(&reader, &(struct ckpt_box_read){read->tensor, read->box, NULL}, err);
}

int ckpt_tensor_prefetch(const struct ckpt_tensor *t, const struct ckpt_reading *rd, uint64_t lo,
                         uint64_t hi, struct ckpt_batch *batch, struct ckpt_err *err)
{
    const uint64_t slab = rd->slabs ? slab_bytes(t) / ckpt_dtype_size(t->dtype) : 0;

    if (slab) {
        lo -= lo % slab;
        hi = ckpt_min_u64(t->numel, (hi + slab - 1) / slab * slab);
    }
    if (lo >= hi)
        return 0;
    if (!t->value) {
        const struct ckpt_box_read read = {t, {.rank = 1, .lo = {lo}, .n = {hi - lo}}, NULL};
        return add_prefetch(batch, &read, &usual_cost, err);
    }
    for (uint32_t i = 0; i < t->value->narg; i++) { /* about the same part of the operands */
        const struct ckpt_tensor *a = t->value->arg[i];
        const long double part = (long double)a->numel / (long double)t->numel;
        if (ckpt_tensor_prefetch(a, rd, (uint64_t)((long double)lo * part),
                                 ckpt_min_u64(a->numel, (uint64_t)((long double)hi * part) + 1),
                                 batch, err) < 0)
            return -1;
    }
    return 0;
}

/* A load has planned to the byte who reads what, and nothing else is to be fetched. Loads count
 * what arrives, and nobody else does. */
static bool is_load(const struct ckpt_box_cost *cost) { return cost->route.arrived != NULL; }

/* Do its bytes lie in a bucket? */
static bool is_of_objects(const struct ckpt_tensor *t)
{
    return t->npiece && ckpt_source_is_object(t->cat->sources.ptr[t->piece[0].source]);
}

/* Far sources fetch all of this at the same time. Small pieces of files that a load reads are
 * better read through the page cache, which ranks share, with the holes between them. */
static void fetch_all(const struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                      const struct ckpt_box_cost *cost)
{
    const uint64_t gap = is_load(cost) ? 0 : CKPT_STRIDED_GAP;
    struct ckpt_batch batch;
    bool good = true;

    if (!rd || !rd->ahead)
        return;
    ckpt_batch_init(&batch, CKPT_READ_PREFETCH);
    for (size_t i = 0; i < n && good; i++)
        good = read[i].tensor->value || ckpt_box_numel(&read[i].box) == 0 ||
               (is_load(cost) && !is_of_objects(read[i].tensor)) ||
               add_prefetch(&batch, &read[i], cost, NULL) == 0;
    if (good && batch.runs.len > 1)
        (void)ckpt_batch_fetch(&batch, gap);
    ckpt_batch_release(&batch);
}

/* ---- boxes ---- */

static int read_one(struct ckpt_strided_reader *reader, struct ckpt_reading *rd,
                    const struct ckpt_box_read *read, const struct ckpt_box_cost *cost,
                    struct ckpt_err *err)
{
    const struct ckpt_value *v = read->tensor->value;

    if (ckpt_box_numel(&read->box) == 0)
        return 0;
    if (!v)
        return ckpt_stored_read(reader, read, err);
    if (v->ops->combine)
        return read_combined(rd, read, cost, err);
    return v->ops->elements ? read_elementwise(rd, read, cost, err) : read_rows(rd, read, err);
}

static int read_all(struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                    const struct ckpt_box_cost *cost, enum ckpt_read_how how, struct ckpt_err *err)
{
    struct ckpt_batch batch;
    struct ckpt_strided_cache cache = {0};
    struct ckpt_strided_reader reader = {.batch = &batch,
                                         .gap = cost->gap,
                                         .bound = cost->bound,
                                         .run = cost->run,
                                         .hot_hole = cost->hot_hole,
                                         .cache = &cache};
    int result = 0;

    ckpt_batch_init(&batch, how);
    batch.route = cost->route;
    for (size_t i = 0; i < n && result == 0; i++)
        result = read_one(&reader, rd, &read[i], cost, err);
    if (result == 0)
        result = ckpt_batch_finish(&batch, err);
    if (result < 0 && batch.missed)
        result = 1;
    if (rd && rd->stats && result <= 0) {
        atomic_fetch_add_explicit(&rd->stats->source_reads, batch.nread, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->source_bytes, batch.nbyte, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->asked_bytes, batch.nasked, memory_order_relaxed);
    }
    ckpt_batch_release(&batch);
    ckpt_strided_cache_release(&cache);
    return result;
}

int ckpt_boxes_pread(struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                     const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    fetch_all(rd, read, n, cost);
    return read_all(rd, read, n, cost, is_load(cost) ? CKPT_READ_EXACT : CKPT_READ_AHEAD, err);
}

int ckpt_boxes_pread_cached(struct ckpt_reading *rd, const struct ckpt_box_read *read, size_t n,
                            const struct ckpt_box_cost *cost, struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (read[i].tensor->value)
            return 1;
    return read_all(rd, read, n, cost, CKPT_READ_CACHED, err);
}

const struct ckpt_tensor *ckpt_tensor_stored(const struct ckpt_tensor *t)
{
    return t->value && t->value->ops->elements ? t->value->arg[0] : t;
}

bool ckpt_tensor_is_decoded(const struct ckpt_tensor *t)
{
    const struct ckpt_tensor *stored = ckpt_tensor_stored(t);

    return stored->npiece && stored->piece[0].source < t->cat->sources.len &&
           t->cat->sources.ptr[stored->piece[0].source]->ops->stored;
}

/* ---- ranges of elements ---- */

static int make_elements(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                         uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const struct ckpt_value *v = t->value;
    const struct ckpt_box_read read = {t, {.rank = 1, .lo = {lo}, .n = {hi - lo}}, buf};

    if (v && v->ops->combine)
        return read_combined(rd, &read, NULL, err);
    if (v)
        return v->ops->elements ? read_elementwise(rd, &read, NULL, err)
                                : v->ops->compute(t, rd, buf, lo, hi, err);
    if (ckpt_boxes_pread(rd, &read, 1, &usual_cost, err) < 0)
        return ckpt_err_in(err, "tensor '%s'", t->name);
    return 0;
}

/* Are neighbours along the innermost axis far apart in the source, row after row? Then the bounding
 * range of a request is most of the tensor. */
static bool is_transposed(const struct ckpt_tensor *t)
{
    if (t->npiece == 0 || ckpt_tensor_nbytes(t) <= SLAB_MIN_TENSOR)
        return false;
    const struct ckpt_piece *p = &t->piece[0];
    for (uint32_t j = p->naxis; j-- > 0;)
        if (p->axis[j].n > 1)
            return p->axis[j].src > ckpt_dtype_size(t->dtype);
    return false;
}

/* 0: the tensor is made as it is read. */
static size_t slab_bytes(const struct ckpt_tensor *t)
{
    if (t->value)
        return t->value->ops->slab_bytes;
    return is_transposed(t) ? SLAB_BYTES : 0;
}

struct slab_ctx {
    const struct ckpt_tensor *tensor;
    struct ckpt_reading *rd;
    uint64_t slab_numel;
};

static int fill_slab(const void *arg, void *buf, size_t len, uint64_t slab, struct ckpt_err *err)
{
    const struct slab_ctx *c = arg;
    uint64_t lo = slab * c->slab_numel;

    return make_elements(c->tensor, c->rd, buf, lo, lo + len / ckpt_dtype_size(c->tensor->dtype),
                         err);
}

/* Check that the shards of a cached slab have not changed. */
static int check_sources(const struct ckpt_tensor *t, struct ckpt_err *err)
{
    for (size_t i = 0; i < t->npiece; i++)
        if ((i == 0 || t->piece[i].source != t->piece[i - 1].source) &&
            ckpt_source_check(t->cat->sources.ptr[t->piece[i].source], err) < 0)
            return ckpt_err_in(err, "tensor '%s'", t->name);
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        if (check_sources(t->value->arg[i], err) < 0)
            return -1;
    return 0;
}

static struct ckpt_slab slab_of(const struct slab_ctx *c, uint64_t number)
{
    const uint64_t left = c->tensor->numel - number * c->slab_numel;
    const size_t esize = ckpt_dtype_size(c->tensor->dtype);

    return (struct ckpt_slab){.scope = c->rd,
                              .owner = c->tensor,
                              .number = number,
                              .len = (size_t)ckpt_min_u64(c->slab_numel, left) * esize,
                              .fill = fill_slab,
                              .ctx = c};
}

static int read_slabs(const struct slab_ctx *c, unsigned char *buf, uint64_t lo, uint64_t hi,
                      struct ckpt_err *err)
{
    const size_t esize = ckpt_dtype_size(c->tensor->dtype);

    while (lo < hi) {
        const struct ckpt_slab slab = slab_of(c, lo / c->slab_numel);
        const size_t off = (size_t)(lo % c->slab_numel) * esize;
        const size_t len = (size_t)ckpt_min_u64((hi - lo) * esize, slab.len - off);
        if (ckpt_slabs_read(c->rd->slabs, &slab, buf, len, off, err) < 0)
            return -1;
        buf += len;
        lo += len / esize;
    }
    return check_sources(c->tensor, err);
}

int ckpt_elements_pread(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                        uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const size_t most = rd && rd->slabs ? slab_bytes(t) : 0;

    if (lo == hi)
        return 0;
    if (most) {
        const struct slab_ctx c = {t, rd, most / ckpt_dtype_size(t->dtype)};
        return read_slabs(&c, buf, lo, hi, err);
    }
    return make_elements(t, rd, buf, lo, hi, err);
}

/* ---- what is slow to make, before it is read ---- */

/* Decode the first source of a tensor that is not decoded. */
static enum ckpt_prepared prepare_sources(const struct ckpt_tensor *t)
{
    enum ckpt_prepared result = CKPT_PREPARED_BEFORE;

    for (size_t i = 0; i < t->npiece && result >= CKPT_PREPARED_BUSY; i++)
        if (i == 0 || t->piece[i].source != t->piece[i - 1].source)
            result = ckpt_prepared_both(
                result, ckpt_source_prepare(t->cat->sources.ptr[t->piece[i].source]));
    for (uint32_t i = 0; t->value && i < t->value->narg && result >= CKPT_PREPARED_BUSY; i++)
        result = ckpt_prepared_both(result, prepare_sources(t->value->arg[i]));
    return result;
}

/* Fill the first slab of elements [lo, hi) that is not there, or those of the operands. */
static enum ckpt_prepared prepare_slabs(const struct ckpt_tensor *t, struct ckpt_reading *rd,
                                        uint64_t lo, uint64_t hi)
{
    const struct slab_ctx c = {t, rd, slab_bytes(t) / ckpt_dtype_size(t->dtype)};
    enum ckpt_prepared result = CKPT_PREPARED_BEFORE;

    if (c.slab_numel) {
        for (uint64_t i = lo / c.slab_numel; i * c.slab_numel < hi && result >= CKPT_PREPARED_BUSY;
             i++) {
            const struct ckpt_slab slab = slab_of(&c, i);
            result = ckpt_prepared_both(result, ckpt_slabs_prepare(rd->slabs, &slab));
        }
    } else if (t->value && t->value->ops->elements) {
        result = prepare_slabs(t->value->arg[0], rd, lo, hi);
    }
    return result;
}

enum ckpt_prepared ckpt_tensor_prepare(const struct ckpt_tensor *t, struct ckpt_reading *rd,
                                       uint64_t lo, uint64_t hi)
{
    const enum ckpt_prepared result = prepare_sources(t);

    return result == CKPT_PREPARED_BEFORE && rd->slabs ? prepare_slabs(t, rd, lo, hi) : result;
}

/* ---- ranges of bytes ---- */

/* A range within one element. */
static int read_part(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf, size_t len,
                     uint64_t off, struct ckpt_err *err)
{
    unsigned char element[16];
    const size_t esize = ckpt_dtype_size(t->dtype);

    if (ckpt_elements_pread(t, rd, element, off / esize, off / esize + 1, err) < 0)
        return -1;
    memcpy(buf, element + off % esize, len);
    return 0;
}

int ckpt_tensor_pread(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf, size_t len,
                      uint64_t off, struct ckpt_err *err)
{
    size_t esize = ckpt_dtype_size(t->dtype);
    unsigned char *at = buf;

    assert(ckpt_range_ok(off, len, ckpt_tensor_nbytes(t)));
    if (rd && rd->stats) {
        atomic_fetch_add_explicit(&rd->stats->requests, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->bytes, len, memory_order_relaxed);
    }
    if (off % esize && len) {
        size_t n = (size_t)ckpt_min_u64(len, esize - off % esize);
        if (read_part(t, rd, at, n, off, err) < 0)
            return -1;
        at += n;
        off += n;
        len -= n;
    }
    if (ckpt_elements_pread(t, rd, at, off / esize, off / esize + len / esize, err) < 0)
        return -1;
    if (len % esize == 0)
        return 0;
    at += len - len % esize;
    return read_part(t, rd, at, len % esize, off + len - len % esize, err);
}

/* ---- comparing two tensors by dtype and shape, by their pieces, then by samples of their bytes
 * ---- */

enum { PLACES = 16, PLACE_BYTES = 256 };

static bool same_piece(const struct ckpt_tensor *s, const struct ckpt_tensor *t, size_t i)
{
    const struct ckpt_piece *a = &s->piece[i], *b = &t->piece[i];

    return a->dst == b->dst && a->src == b->src && a->naxis == b->naxis &&
           memcmp(a->axis, b->axis, a->naxis * sizeof *a->axis) == 0 &&
           ckpt_source_same(s->cat->sources.ptr[a->source], t->cat->sources.ptr[b->source]);
}

static bool same_kind(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    return a->dtype == b->dtype && a->rank == b->rank && a->ranks == b->ranks &&
           memcmp(a->dim, b->dim, a->rank * sizeof *a->dim) == 0;
}

int ckpt_tensor_same_kind(const struct ckpt_tensor *a, const char *in_a,
                          const struct ckpt_tensor *b, const char *in_b, struct ckpt_err *err)
{
    if (same_kind(a, b))
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT, "'%s' is %s %s in %s, and %s %s in %s", a->name,
                     ckpt_dtype_name(a->dtype), ckpt_shape_text(a->dim, a->rank).text, in_a,
                     ckpt_dtype_name(b->dtype), ckpt_shape_text(b->dim, b->rank).text, in_b);
}

bool ckpt_tensor_unchanged(const struct ckpt_tensor *a, const struct ckpt_tensor *b)
{
    const struct ckpt_value *v = a->value, *w = b->value;
    bool same = same_kind(a, b) && !v == !w && a->npiece == b->npiece;

    for (size_t i = 0; same && i < a->npiece; i++)
        same = same_piece(a, b, i);
    if (same && v)
        same = v->ops == w->ops && v->narg == w->narg &&
               memcmp(v->param, w->param, sizeof v->param) == 0;
    for (uint32_t i = 0; same && v && i < v->narg; i++)
        same = ckpt_tensor_unchanged(v->arg[i], w->arg[i]);
    return same;
}

bool ckpt_tensor_is_nowhere(const struct ckpt_tensor *t)
{
    bool is = false;

    for (size_t i = 0; i < t->npiece && !is; i++)
        is = ckpt_source_is_nowhere(t->cat->sources.ptr[t->piece[i].source]);
    for (uint32_t i = 0; t->value && i < t->value->narg && !is; i++)
        is = ckpt_tensor_is_nowhere(t->value->arg[i]);
    return is;
}

int ckpt_tensor_same(const struct ckpt_tensor *a, const struct ckpt_tensor *b, bool *ret_same,
                     struct ckpt_err *err)
{
    const uint64_t nbytes = ckpt_tensor_nbytes(a);
    const size_t len = nbytes < PLACE_BYTES ? (size_t)nbytes : PLACE_BYTES;
    bool same = same_kind(a, b);

    if (same && !ckpt_tensor_is_nowhere(a) && !ckpt_tensor_is_nowhere(b) &&
        !ckpt_tensor_unchanged(a, b))
        for (unsigned i = 0; i < PLACES && same && len; i++) {
            unsigned char x[PLACE_BYTES], y[PLACE_BYTES];
            const uint64_t off = (nbytes - len) / (PLACES - 1) * i;
            const uint64_t at = i == PLACES - 1 ? nbytes - len : off;
            struct ckpt_reading rd = {0};
            if (ckpt_tensor_pread(a, &rd, x, len, at, err) < 0 ||
                ckpt_tensor_pread(b, &rd, y, len, at, err) < 0)
                return -1;
            same = memcmp(x, y, len) == 0;
        }
    *ret_same = same;
    return 0;
}
