/* SPDX-License-Identifier: Apache-2.0 */
/* A flat state dict of a catalogue's tensors, cut by rows. */
#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "format/dcp/out.h"

/* ---- rows ---- */

enum { MOST_PARTS = 1 << 25 };

static uint64_t rows_in(const struct ckpt_tensor *t) { return t->rank ? t->dim[0] : 1; }

/* The first row of a rank. */
static uint64_t first_row(uint64_t rows, uint32_t rank, uint32_t ranks)
{
    const uint64_t each = rows / ranks + (rows % ranks > 0);

    return each && rank > rows / each ? rows : ckpt_min_u64(each * rank, rows);
}

bool ckpt_rows_of(const struct ckpt_tensor *t, uint32_t rank, uint32_t ranks, struct ckpt_rows *ret)
{
    const uint64_t rows = rows_in(t), lo = first_row(rows, rank, t->rank ? ranks : 1),
                   hi = first_row(rows, rank + 1, t->rank ? ranks : 1);
    const uint64_t size = rows ? ckpt_tensor_nbytes(t) / rows : 0;

    if (rank > 0 && (t->rank == 0 || (lo == rows && first_row(rows, rank - 1, ranks) == rows)))
        return false;
    *ret = (struct ckpt_rows){
        .tensor = t, .lo = lo, .n = hi - lo, .from = lo * size, .len = (hi - lo) * size};
    return true;
}

void ckpt_rows_dim(const struct ckpt_rows *r, uint64_t dim[CKPT_MAX_RANK],
                   uint64_t off[CKPT_MAX_RANK])
{
    for (uint32_t d = 0; d < r->tensor->rank; d++) {
        dim[d] = d ? r->tensor->dim[d] : r->n;
        off[d] = d ? 0 : r->lo;
    }
}

int ckpt_rows_count(const struct ckpt_catalog *cat, uint32_t ranks, size_t *ret,
                    struct ckpt_err *err)
{
    const uint64_t n = (uint64_t)cat->tensors.len * ranks; /* both fit 32 bits */

    if (n > MOST_PARTS)
        return ckpt_fail(err, CKPT_LIMIT,
                         "option ranks: %zu tensors cut for %" PRIu32
                         " ranks are more than %d parts",
                         cat->tensors.len, ranks, MOST_PARTS);
    *ret = (size_t)n;
    return 0;
}

struct state {
    struct ckpt_dcp_state out;
    const struct ckpt_catalog *cat;
    uint32_t ranks;
};

static void get_key(const void *ctx, size_t i, struct ckpt_dcp_key *ret)
{
    const struct state *s = ctx;
    const struct ckpt_tensor *t = &s->cat->tensors.ptr[i];

    *ret =
        (struct ckpt_dcp_key){.name = t->name, .dtype = (enum ckpt_dtype)t->dtype, .rank = t->rank};
    memcpy(ret->dim, t->dim, t->rank * sizeof *t->dim);
}

/* A tensor's part has the number of its rank. */
static bool get_chunk(const void *ctx, size_t key, size_t rank, struct ckpt_dcp_data *ret)
{
    const struct state *s = ctx;
    struct ckpt_rows rows;

    if (rank >= s->ranks ||
        !ckpt_rows_of(&s->cat->tensors.ptr[key], (uint32_t)rank, s->ranks, &rows))
        return false;
    *ret = (struct ckpt_dcp_data){.tensor = rows.tensor, .from = rows.from, .len = rows.len};
    ckpt_rows_dim(&rows, ret->dim, ret->off);
    return true;
}

static void list_parts(struct state *s)
{
    struct ckpt_rows rows;
    size_t n = 0;

    for (uint32_t r = 0; r < s->ranks; r++)
        for (size_t i = 0; i < s->cat->tensors.len; i++)
            if (ckpt_rows_of(&s->cat->tensors.ptr[i], r, s->ranks, &rows))
                s->out.part[n++] =
                    (struct ckpt_dcp_part){.rank = r, .key = (uint32_t)i, .index = r};
    s->out.npart = n;
}

int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err)
{
    struct state *s = ckpt_arena_alloc(&w->files->arena, sizeof *s);
    const uint32_t ranks = ckpt_output_parts(w->output, CKPT_CUT_RANKS);
    size_t most = 0;

    if (!s)
        return ckpt_nomem(err);
    if (ckpt_rows_count(w->cat, ranks, &most, err) < 0)
        return -1;
    *s = (struct state){.out = {.ctx = s,
                                .nkey = w->cat->tensors.len,
                                .key = get_key,
                                .chunk = get_chunk,
                                .indexed = true},
                        .cat = w->cat,
                        .ranks = ranks};
    s->out.part = ckpt_arena_alloc(&w->files->arena, (most + 1) * sizeof *s->out.part);
    if (!s->out.part)
        return ckpt_nomem(err);
    list_parts(s);
    return ckpt_dcp_out(w, folder, &s->out, ranks, true, err);
}

static int write_dcp(const struct ckpt_writing *w, struct ckpt_err *err)
{
    return ckpt_dcp_files(w, "", err);
}

const struct ckpt_writer ckpt_writer_dcp = {
    .name = "dcp",
    .also = "to_dcp",
    .keys = 1u << CKPT_CUT_RANKS | CKPT_WRITES_NAMES,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .bare = true,
    .write = write_dcp,
};
