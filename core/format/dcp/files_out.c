/* SPDX-License-Identifier: Apache-2.0 */
/* A flat state dict of a catalogue's tensors, cut by rows. */
#include "format/dcp/out.h"

#include <string.h>

#include "format/dcp/rows.h"

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
    size_t most;

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
