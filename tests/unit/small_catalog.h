/* SPDX-License-Identifier: Apache-2.0 */
/* A catalogue for tests: tensors of one dimension, end to end in one source whose byte i is i * 7
 * + 1. */
#ifndef CKPT_TESTS_UNIT_SMALL_CATALOG_H
#define CKPT_TESTS_UNIT_SMALL_CATALOG_H

#include <stdlib.h>

#include "tensor/catalog.h"
#include "test.h"

enum { SMALL_SOURCE = 1 << 16 };

static inline unsigned char small_byte(uint64_t off) { return (unsigned char)(off * 7 + 1); }

struct small_catalog {
    struct ckpt_catalog *cat;
    uint64_t used; /* bytes of the source */
};

static inline struct small_catalog small_catalog_new(void)
{
    static unsigned char data[SMALL_SOURCE];
    struct small_catalog c = {0};
    struct ckpt_source *s;
    struct ckpt_err err = {0};

    for (size_t i = 0; i < sizeof data; i++)
        data[i] = small_byte(i);
    if (ckpt_catalog_new(&c.cat, &err) < 0 ||
        ckpt_source_mem_new("data", data, sizeof data, &s, &err) < 0 ||
        ckpt_catalog_add_source(c.cat, s, &err) == UINT32_MAX)
        fail_msg("%s", err.text);
    ckpt_source_unref(s);
    return c;
}

static inline void small_catalog_free(struct small_catalog *c) { ckpt_catalog_free(c->cat); }

/* Its first byte is the source's byte c->used. */
static inline size_t small_add(struct small_catalog *c, const char *name, enum ckpt_dtype dtype,
                               uint64_t numel, uint32_t block)
{
    struct ckpt_err err = {0};
    struct ckpt_box box = {.rank = 1, .n = {numel}};
    struct ckpt_piece_draft piece;
    uint64_t stride = ckpt_dtype_size(dtype);
    size_t index;

    if (ckpt_catalog_add(c->cat, name, dtype, &numel, 1, &index, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_piece_from_box(&numel, &box, 0, c->used, &stride, &piece);
    if (numel && ckpt_catalog_set_pieces(c->cat, index, &piece, 1, &err) < 0)
        fail_msg("%s", err.text);
    c->cat->tensors.ptr[index].block = block;
    c->used += numel * stride;
    return index;
}

#endif
