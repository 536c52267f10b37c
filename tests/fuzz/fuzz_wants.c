/* SPDX-License-Identifier: Apache-2.0 */
/* What other ranks say they want. Input: the length of the tail (u8), a table, as ckpt_wants_dump
 * writes it, and the tail: the boxes of another rank, whose table has the same form. */
#include "fuzz.h"

#include "load/plan/plan.h"
#include "load/want/want.h"

enum { RANKS = 5, TENSORS = 4, MOST_ENTRIES = 64 };

static const uint64_t shape[TENSORS][3] = {{40, 12}, {7}, {3, 5, 8}, {0, 4}};
static const uint32_t rank_of[TENSORS] = {2, 1, 3, 2};

static struct ckpt_catalog *make_catalog(void)
{
    static unsigned char data[8192];
    struct ckpt_catalog *cat;
    struct ckpt_source *s;
    struct ckpt_err err = {0};
    uint64_t off = 0;

    MUST(ckpt_catalog_new(&cat, &err) == 0);
    MUST(ckpt_source_mem_new("memory", data, sizeof data, &s, &err) == 0);
    const uint32_t source = ckpt_catalog_add_source(cat, s, &err);
    ckpt_source_unref(s);
    for (uint32_t t = 0; t < TENSORS; t++) {
        struct ckpt_box box = {.rank = rank_of[t]};
        struct ckpt_piece_draft piece;
        uint64_t stride[3], step = 2;
        size_t index;
        char name[8];
        for (uint32_t d = rank_of[t]; d-- > 0;) {
            box.n[d] = shape[t][d];
            stride[d] = step;
            step *= shape[t][d];
        }
        ckpt_piece_from_box(shape[t], &box, source, off, stride, &piece);
        off += step;
        (void)snprintf(name, sizeof name, "t%u", t);
        MUST(ckpt_catalog_add(cat, name, CKPT_BF16, shape[t], rank_of[t], &index, &err) == 0);
        MUST(ckpt_catalog_set_pieces(cat, index, &piece, step ? 1 : 0, &err) == 0);
    }
    return cat;
}

/* The same bytes come out, and every box lies inside. */
static void check_table(const struct ckpt_wants *w, const struct ckpt_catalog *cat)
{
    struct ckpt_wants again;
    struct ckpt_err err = {0};
    struct ckpt_table text, other;

    MUST(ckpt_wants_dump(w, cat, &text, &err) == 0);
    MUST(ckpt_wants_parse(text.data, text.len, cat, RANKS, NULL, &again, &err) == 0);
    MUST(ckpt_wants_dump(&again, cat, &other, &err) == 0);
    MUST(text.form == other.form);
    MUST(text.len == other.len && memcmp(text.data, other.data, text.len) == 0);
    ckpt_wants_release(&again);
    free(text.data);
    free(other.data);
    for (size_t e = 0; e < w->entries.len; e++)
        for (uint32_t r = 0; r < RANKS; r++) {
            const struct ckpt_tensor *t = &cat->tensors.ptr[w->entries.ptr[e].tensor];
            struct ckpt_box box;
            if (ckpt_wants_box(w, &w->entries.ptr[e], t, r, &box))
                MUST(ckpt_box_within(&box, t->dim, t->rank));
        }
}

static int add_bytes(void *ctx, uint32_t unit, const struct ckpt_box *box, uint64_t at)
{
    (void)unit, (void)at;
    *(uint64_t *)ctx += ckpt_box_numel(box);
    return 0;
}

/* Elements, times their size, that a rank reads by its plan. */
static uint64_t own_bytes(const struct ckpt_plan *p)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < p->chunks.len; i++) {
        const struct ckpt_chunk *chunk = &p->chunks.ptr[i];
        for (uint32_t u = ckpt_plan_unit_at(p, chunk->group, chunk->lo);
             u < p->stream[chunk->group].hi; u++) {
            uint64_t n = 0;
            (void)ckpt_plan_boxes(p, u, chunk->lo, chunk->lo + chunk->len, add_bytes, &n);
            bytes += n * ckpt_dtype_size(ckpt_plan_unit_tensor(p, u)->dtype);
        }
    }
    return bytes;
}

/* Elements, times their size, of a group's regions. */
static uint64_t group_bytes(const struct ckpt_plan *p, uint32_t group)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < p->regions.len; i++)
        if (p->regions.ptr[i].group == group)
            bytes +=
                ckpt_box_numel(&p->regions.ptr[i].box) *
                ckpt_dtype_size(p->job_wants->cat->tensors.ptr[p->regions.ptr[i].tensor].dtype);
    return bytes;
}

/* Rank 3 wants the second table, if there is one, all others the first; takes both. */
static void plan(const struct ckpt_wants w[2], uint32_t n, const struct ckpt_catalog *cat)
{
    static const uint32_t node[RANKS] = {0, 0, 1, 1, 1};
    const struct ckpt_plan_sizes sizes = {128, 128, 512, 256, 2, false};
    const struct ckpt_sharing sharing = {CKPT_READERS_ONCE, node};
    struct ckpt_wants *table = malloc(2 * sizeof *table);
    uint32_t *class_of = calloc(RANKS, sizeof *class_of);
    struct ckpt_job_wants job_wants;
    struct ckpt_plan *p;
    struct ckpt_err err = {0};
    uint64_t unique = 0, read = 0;

    MUST(table && class_of);
    memcpy(table, w, n * sizeof *table);
    if (n > 1)
        table[1].form = table;
    class_of[3] = n - 1;
    MUST(ckpt_job_wants_init(&job_wants, cat, RANKS, class_of, table, n, &err) == 0);
    for (uint32_t r = 0; r < RANKS; r++) {
        MUST(ckpt_plan_new(&job_wants, r, &sharing, true, &sizes, &p, &err) == 0);
        read += own_bytes(p);
        for (uint32_t g = 0; g < p->groups.len; g++)
            if (p->groups.ptr[g].self == 0)
                unique += group_bytes(p, g);
        ckpt_plan_free(p);
    }
    MUST(read == unique);
    ckpt_job_wants_release(&job_wants);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ckpt_catalog *cat;
    struct ckpt_wants w[2];
    struct ckpt_err err = {0};
    uint32_t n = 1;

    if (!cat)
        cat = make_catalog();
    if (size == 0 || data[0] > size - 1)
        return 0;
    const uint8_t *tail = data + size - data[0];
    if (ckpt_wants_parse(data + 1, (size_t)(tail - data) - 1, cat, RANKS, NULL, &w[0], &err) < 0) {
        check_err(&err);
        return 0;
    }
    check_table(&w[0], cat);
    if (ckpt_wants_parse(tail, data[0], cat, RANKS, &w[0], &w[1], &err) < 0)
        check_err(&err);
    else
        check_table(&w[n++], cat);
    if (w[0].entries.len <= MOST_ENTRIES) {
        plan(w, n, cat);
    } else {
        while (n-- > 0)
            ckpt_wants_release(&w[n]);
    }
    return 0;
}
