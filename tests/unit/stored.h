/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of given bytes, each in a source of its own; and any byte range of a computed one against
 * the whole. What fails aborts: also for programs without cmocka. */
#ifndef CKPT_TESTS_UNIT_STORED_H
#define CKPT_TESTS_UNIT_STORED_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"
#include "tensor/catalog.h"
#include "tensor/read.h"

static inline void stored_fail(const char *why)
{
    (void)fprintf(stderr, "%s\n", why);
    abort();
}

static inline struct ckpt_catalog *stored_catalog(void)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *cat;

    if (ckpt_catalog_new(&cat, &err) < 0)
        stored_fail(err.text);
    return cat;
}

/* Cut in two along dimension `cut` if that is one (and not shorter than 2), in row-major order. */
static inline size_t stored_add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                                uint32_t rank, const uint64_t *dim, const void *data, uint32_t cut)
{
    const size_t esize = ckpt_dtype_size(dtype);
    const bool two = cut < rank && dim[cut] > 1;
    struct ckpt_piece_draft p[2];
    struct ckpt_box box = {.rank = rank};
    uint64_t stride[CKPT_MAX_RANK], numel;
    struct ckpt_err err = {0};
    struct ckpt_source *s;
    uint32_t at;
    size_t index;

    (void)ckpt_shape_numel(dim, rank, &numel);
    ckpt_shape_strides(dim, rank, stride);
    if (ckpt_source_mem_new(name, data, numel * esize, &s, &err) < 0 ||
        (at = ckpt_catalog_add_source(cat, s, &err)) == UINT32_MAX ||
        ckpt_catalog_add(cat, name, dtype, dim, rank, &index, &err) < 0)
        stored_fail(err.text);
    ckpt_source_unref(s);
    for (uint32_t d = 0; d < rank; d++) {
        box.n[d] = dim[d];
        stride[d] *= esize;
    }
    if (two)
        box.n[cut] = 1;
    ckpt_piece_from_box(dim, &box, at, 0, stride, &p[0]);
    if (two) {
        box.lo[cut] = 1;
        box.n[cut] = dim[cut] - 1;
        ckpt_piece_from_box(dim, &box, at, stride[cut], stride, &p[1]);
    }
    if (numel && ckpt_catalog_set_pieces(cat, index, p, two ? 2 : 1, &err) < 0)
        stored_fail(err.text);
    return index;
}

static inline unsigned char *stored_read(const struct ckpt_tensor *t, struct ckpt_reading *rd,
                                         size_t len, uint64_t off)
{
    unsigned char *buf = malloc(len + 1);
    struct ckpt_err err = {0};

    if (ckpt_tensor_pread(t, rd, buf, len, off, &err) < 0)
        stored_fail(err.text);
    return buf;
}

/* Random byte ranges give the bytes of the whole, with slabs and without. */
static inline void stored_check_ranges(const struct ckpt_tensor *t, uint64_t *random, int times)
{
    const uint64_t len = ckpt_tensor_nbytes(t);
    unsigned char *whole = stored_read(t, NULL, len, 0);
    struct ckpt_err err = {0};
    struct ckpt_slabs *slabs;

    if (ckpt_slabs_new(8 << 20, &slabs, &err) < 0)
        stored_fail(err.text);
    struct ckpt_reading rd = {.slabs = slabs};
    for (int i = 0; i < times; i++) {
        const uint64_t lo = random_range(random, 0, len + 1),
                       hi = random_range(random, lo, len + 1);
        unsigned char *part = stored_read(t, random_next(random) % 2 ? &rd : NULL, hi - lo, lo);
        if (memcmp(part, whole + lo, hi - lo) != 0)
            stored_fail("a range of bytes is not that of the whole");
        free(part);
    }
    ckpt_slabs_unref(slabs);
    free(whole);
}

#endif
