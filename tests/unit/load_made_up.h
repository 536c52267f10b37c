/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints without bytes, and what ranks might want of them. */
#ifndef CKPT_TESTS_UNIT_LOAD_MADE_UP_H
#define CKPT_TESTS_UNIT_LOAD_MADE_UP_H

#include <stdlib.h>
#include <string.h>

#include "load/plan/plan.h"
#include "random.h"
#include "test.h"

enum { MOST_TENSORS = 40 };

/* ---- made-up checkpoints: tensors end to end in a few sources of no bytes ---- */

static inline int never(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                        struct ckpt_err *err)
{
    (void)s, (void)iov, (void)n, (void)off;
    return ckpt_fail(err, CKPT_IO, "there is nothing to be read");
}

static inline char *no_name(const struct ckpt_source *s)
{
    (void)s;
    return strdup("made up");
}

static inline void forget(struct ckpt_source *s) { free(s); }

static inline struct ckpt_source *nothing(const struct ckpt_source *s, uint64_t *ret_off)
{
    (void)s, (void)ret_off;
    return NULL;
}

/* The second decodes whole tensors. */
static const struct ckpt_source_ops nowhere[] = {
    {.preadv = never, .name = no_name, .free = forget},
    {.preadv = never, .name = no_name, .free = forget, .stored = nothing}};

static inline void add_source(struct ckpt_catalog *cat, bool decodes)
{
    struct ckpt_err err = {0};
    struct ckpt_source *s = calloc(1, sizeof *s);

    s->ops = &nowhere[decodes];
    s->size = UINT64_MAX / 2;
    atomic_init(&s->refs, 1);
    if (ckpt_catalog_add_source(cat, s, &err) == UINT32_MAX)
        fail_msg("%s", err.text);
    ckpt_source_unref(s);
}

static inline void add_tensor(struct ckpt_catalog *cat, uint32_t source, uint64_t *off,
                              uint32_t rank, const uint64_t *dim)
{
    struct ckpt_err err = {0};
    struct ckpt_box box = {.rank = rank};
    struct ckpt_piece_draft piece;
    uint64_t stride[CKPT_MAX_RANK];
    char name[32];
    size_t index;

    (void)snprintf(name, sizeof name, "t%zu", cat->tensors.len);
    ckpt_shape_strides(dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++) {
        box.n[d] = dim[d];
        stride[d] *= 2;
    }
    ckpt_piece_from_box(dim, &box, source, *off, stride, &piece);
    *off += ckpt_box_numel(&box) * 2;
    if (ckpt_catalog_add(cat, name, CKPT_BF16, dim, rank, &index, &err) < 0 ||
        ckpt_catalog_set_pieces(cat, index, &piece, 1, &err) < 0)
        fail_msg("%s", err.text);
}

static inline struct ckpt_catalog *checkpoint_with(bool decodes, uint64_t *rng)
{
    struct ckpt_catalog *cat;
    struct ckpt_err err = {0};
    uint64_t off[2] = {0, 0};

    if (ckpt_catalog_new(&cat, &err) < 0)
        fail_msg("%s", err.text);
    add_source(cat, false);
    add_source(cat, decodes);
    for (uint64_t n = random_range(rng, 1, MOST_TENSORS); n > 0; n--) {
        uint64_t dim[3];
        uint32_t rank = (uint32_t)random_range(rng, 0, 4),
                 source = (uint32_t)random_range(rng, 0, 2);
        for (uint32_t d = 0; d < rank; d++)
            dim[d] = random_range(rng, 1, 40);
        add_tensor(cat, source, &off[source], rank, dim);
    }
    return cat;
}

static inline struct ckpt_catalog *small_checkpoint(uint64_t *rng)
{
    return checkpoint_with(false, rng);
}

/* ---- wants ---- */

static inline uint32_t all_ranks(struct ckpt_wants *w, uint32_t a, uint32_t b)
{
    struct ckpt_err err = {0};
    uint32_t *rank = malloc(a * b * sizeof *rank), dim[2] = {a, b};

    for (uint32_t i = 0; i < a * b; i++)
        rank[i] = i;
    uint32_t g = ckpt_wants_grid(w, 2, dim, rank, &err);
    free(rank);
    return g;
}

static inline void random_table(struct ckpt_wants *w, const struct ckpt_catalog *cat,
                                uint32_t nrank, uint64_t *rng)
{
    struct ckpt_err err = {0};
    uint32_t a = nrank % 2 == 0 ? 2 : 1;

    for (uint32_t t = 0; t < cat->tensors.len; t++) {
        const struct ckpt_tensor *tensor = &cat->tensors.ptr[t];
        struct ckpt_spec spec = {.grid = all_ranks(w, a, nrank / a)};
        struct ckpt_box box = {.rank = tensor->rank};
        uint32_t number = CKPT_NONE;
        if (random_range(rng, 0, 5) == 0)
            continue;
        for (uint32_t axis = 0; axis < 2; axis++)
            if (tensor->rank && random_range(rng, 0, 2))
                spec.cut[spec.ncut++] =
                    (struct ckpt_division){(uint32_t)random_range(rng, 0, tensor->rank), axis};
        if (spec.ncut)
            number = ckpt_wants_spec(w, &spec, &err);
        for (uint32_t d = 0; d < tensor->rank; d++) {
            box.lo[d] = random_range(rng, 0, tensor->dim[d]);
            box.n[d] = random_range(rng, 0, tensor->dim[d] - box.lo[d]) + 1;
        }
        if (ckpt_wants_add(w, cat, t, number, random_range(rng, 0, 3) ? NULL : &box, &err) < 0)
            fail_msg("%s", err.text);
    }
}

/* A table of the same form with other boxes. */
static inline void other_boxes(struct ckpt_wants *w, const struct ckpt_wants *form,
                               const struct ckpt_catalog *cat, uint64_t *rng)
{
    *w = *form;
    w->form = form;
    w->boxes.ptr = calloc(form->boxes.len + 1, sizeof *w->boxes.ptr);
    w->boxes.cap = form->boxes.len + 1;
    for (size_t i = 0; i < w->entries.len; i++) {
        uint64_t *word = w->boxes.ptr + w->entries.ptr[i].box;
        for (uint32_t d = 0; w->entries.ptr[i].dims >> d; d++) {
            const uint64_t dim = cat->tensors.ptr[w->entries.ptr[i].tensor].dim[d];
            if (!(w->entries.ptr[i].dims >> d & 1))
                continue;
            word[0] = random_range(rng, 0, dim);
            word[1] = random_range(rng, 0, dim - word[0]) + 1;
            word += 2;
        }
    }
}

static inline void random_job_wants(struct ckpt_job_wants *r, const struct ckpt_catalog *cat,
                                    uint32_t nrank, uint64_t *rng)
{
    struct ckpt_err err = {0};
    uint32_t nclass = (uint32_t)random_range(rng, 1, nrank < 3 ? nrank + 1 : 4);
    uint32_t *class_of = malloc(nrank * sizeof *class_of);
    struct ckpt_wants *table = calloc(nclass, sizeof *table);

    for (uint32_t k = 0; k < nrank; k++)
        class_of[k] = k < nclass ? k : (uint32_t)random_range(rng, 0, nclass);
    for (uint32_t c = 0; c < nclass; c++)
        if (c > 0 && random_range(rng, 0, 2))
            other_boxes(&table[c], &table[0], cat, rng);
        else
            random_table(&table[c], cat, nrank, rng);
    if (ckpt_job_wants_init(r, cat, nrank, class_of, table, nclass, &err) < 0)
        fail_msg("%s", err.text);
}

/* The bytes that at least one of these ranks wants, element by element. */
static inline uint64_t wanted_bytes(const struct ckpt_job_wants *r, const uint32_t *rank,
                                    uint32_t n)
{
    uint64_t count = 0;

    for (uint32_t t = 0; t < r->cat->tensors.len; t++) {
        const struct ckpt_tensor *tensor = &r->cat->tensors.ptr[t];
        unsigned char *seen = calloc(tensor->numel + 1, 1);
        for (uint32_t k = 0; k < n; k++) {
            const struct ckpt_wants *w = &r->table[r->class_of[rank[k]]];
            for (size_t e = 0; e < w->entries.len; e++) {
                struct ckpt_box box;
                if (w->entries.ptr[e].tensor != t ||
                    !ckpt_wants_box(w, &w->entries.ptr[e], tensor, rank[k], &box))
                    continue;
                for (uint64_t i = 0; i < tensor->numel; i++) {
                    uint64_t left = i;
                    bool in = true;
                    for (uint32_t d = tensor->rank; d-- > 0; left /= tensor->dim[d])
                        in &= left % tensor->dim[d] - box.lo[d] < box.n[d];
                    seen[i] |= in;
                }
            }
        }
        for (uint64_t i = 0; i < tensor->numel; i++)
            count += seen[i];
        free(seen);
    }
    return count * 2;
}

#endif
