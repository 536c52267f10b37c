/* SPDX-License-Identifier: Apache-2.0 */
/* The device's copies, run on the host, against those of the host. */
#include "device/copies.h"

#include <stdlib.h>

#include "random.h"
#include "test.h"

enum { MOST = 256, BYTES = 1 << 16 };

/* What a launch does. */
static void launch(const struct ckpt_copies *c)
{
    for (uint32_t b = 0; b < c->nblock; b++)
        for (uint32_t t = 0; t < CKPT_COPY_THREADS; t++)
            ckpt_copy_thread(c->ptr, c->n, b, t);
}

struct boxes {
    struct ckpt_box whole, part;
};

static struct boxes random_boxes(uint64_t *rng)
{
    struct boxes b = {0};

    b.whole.rank = b.part.rank = (uint32_t)random_range(rng, 0, 7);
    for (uint32_t d = 0; d < b.whole.rank; d++) {
        b.whole.lo[d] = random_range(rng, 0, 5);
        b.whole.n[d] = 1 + random_range(rng, 0, 5);
        b.part.lo[d] = b.whole.lo[d] + random_range(rng, 0, b.whole.n[d]);
        b.part.n[d] = 1 + random_range(rng, 0, b.whole.lo[d] + b.whole.n[d] - b.part.lo[d]);
    }
    return b;
}

static void fill(unsigned char *p, uint64_t *rng)
{
    for (size_t i = 0; i < BYTES; i += 8) {
        uint64_t v = random_next(rng);
        memcpy(p + i, &v, 8);
    }
}

/* A destination with holes and its dimensions in any order. */
static struct ckpt_target random_target(uint64_t *rng, const struct ckpt_box *whole,
                                        unsigned char *mem, enum ckpt_dtype dtype)
{
    struct ckpt_target t = {.ptr = mem, .box = *whole, .dtype = dtype};
    uint32_t order[CKPT_MAX_RANK];
    uint64_t size = ckpt_dtype_size(dtype);

    for (uint32_t d = 0; d < whole->rank; d++) {
        uint32_t k = (uint32_t)random_range(rng, 0, d + 1);
        order[d] = d;
        order[d] = order[k];
        order[k] = d;
    }
    for (uint32_t d = whole->rank; d-- > 0;) {
        t.stride[order[d]] = size;
        size *= whole->n[order[d]] + random_range(rng, 0, 2);
    }
    return t;
}

TEST(copies, place_and_cast_as_the_host_does)
{
    static const enum ckpt_dtype types[] = {CKPT_F16, CKPT_BF16, CKPT_F32, CKPT_F64};
    static _Alignas(64) unsigned char src[BYTES], a[BYTES * 8], b[BYTES * 8];
    struct ckpt_device_copy list[MOST];
    struct ckpt_err err = {0};
    uint64_t rng = 11;

    for (int i = 0; i < 6000; i++) {
        struct ckpt_copies c = {.ptr = list, .cap = MOST};
        const struct boxes x = random_boxes(&rng);
        const enum ckpt_dtype from = types[random_range(&rng, 0, 4)];
        const enum ckpt_dtype to = types[random_range(&rng, 0, 4)];
        if (ckpt_box_numel(&x.whole) * 8 > BYTES || ckpt_copies_most(&x.part) > MOST)
            continue;
        fill(src, &rng);
        struct ckpt_target t = random_target(&rng, &x.whole, a, to);
        uint64_t span = ckpt_dtype_size(to);
        for (uint32_t d = 0; d < x.whole.rank; d++)
            span += (x.whole.n[d] - 1) * t.stride[d];
        if (span > sizeof a)
            continue;
        memset(a, 0x55, span);
        memset(b, 0x55, span);
        ckpt_place(&t, &x.part, src, &x.whole, from);
        t.ptr = b;
        CHECK_OK(ckpt_copies_place(&c, &t, &x.part, src, &x.whole, from, &err));
        CHECK(c.n <= ckpt_copies_most(&x.part));
        launch(&c);
        if (memcmp(a, b, span) != 0)
            fail_msg("round %d: %s to %s differs", i, ckpt_dtype_name(from), ckpt_dtype_name(to));
    }
}

/* Every F16 and BF16, and patterns of F32 and F64 around everything special. */
TEST(copies, cast_special_values_as_the_host_does)
{
    static const enum ckpt_dtype types[] = {CKPT_F16, CKPT_BF16, CKPT_F32, CKPT_F64};
    enum { N = 1 << 16 };
    unsigned char *src = aligned_alloc(64, N * 8), *a = malloc(N * 8), *b = malloc(N * 8);
    struct ckpt_device_copy one;
    struct ckpt_err err = {0};
    struct ckpt_box box = {.rank = 1, .n = {N}};

    for (int f = 0; f < 4; f++)
        for (int t = 0; t < 4; t++) {
            const size_t size = ckpt_dtype_size(types[f]);
            struct ckpt_copies c = {.ptr = &one, .cap = 1};
            struct ckpt_target target = {b, box, {ckpt_dtype_size(types[t])}, types[t]};
            for (uint64_t i = 0; i < N; i++) { /* sign, exponent and the ends of the mantissa */
                uint64_t v = size == 2   ? i
                             : size == 4 ? i << 16 | (i * 0x9e37u & 0xffffu)
                                         : i << 48 | (i % 3 ? i * 0x9e3779b97f4a7c15u >> 16 : 0);
                memcpy(src + i * size, &v, size);
            }
            ckpt_dtype_cast(a, types[t], src, types[f], N);
            CHECK_OK(ckpt_copies_place(&c, &target, &box, src, &box, types[f], &err));
            launch(&c);
            CHECK(memcmp(a, b, N * ckpt_dtype_size(types[t])) == 0);
        }
    free(src);
    free(a);
    free(b);
}

TEST(copies, refuse_what_has_no_room)
{
    static unsigned char mem[64];
    struct ckpt_device_copy one;
    struct ckpt_copies c = {.ptr = &one, .cap = 1};
    const struct ckpt_box box = {.rank = 1, .n = {16}};
    const struct ckpt_target to = {.ptr = mem, .box = box, .stride = {1}, .dtype = CKPT_U8};
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_copies_place(&c, &to, &box, mem + 32, &box, CKPT_U8, &err));
    CHECK_FAILS(ckpt_copies_place(&c, &to, &box, mem + 32, &box, CKPT_U8, &err), CKPT_LIMIT,
                "number 1");
}

TESTS(T(copies, place_and_cast_as_the_host_does), T(copies, cast_special_values_as_the_host_does),
      T(copies, refuse_what_has_no_room))
