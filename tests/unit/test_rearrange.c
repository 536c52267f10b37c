/* SPDX-License-Identifier: Apache-2.0 */
#include "recipe/apply/instance.h"

#include "stored.h"
#include "tensor/value.h"
#include "test.h"

enum { MAX_NUMEL = 4000 };

/* Patterns over axes e k o c; the letters of `where` are the axes of each dimension of the result.
 */
static const struct {
    const char *from, *to;
    const char *source; /* axes of the source, slowest first */
    const char *target;
} cases[] = {
    {"e k o c", "e o c k", "ekoc", "eock"}, {"k c", "1 k c", "kc", "kc"},
    {"c k", "1 k c", "ck", "kc"},           {"(e=3 k) c", "e k c", "ekc", "ekc"},
    {"(e=3 k) o", "e o k", "eko", "eok"},   {"o (k e=3)", "e o k", "oke", "eok"},
    {"c (k e=3)", "e k c", "cke", "ekc"},
};

static uint64_t size_of(char axis)
{
    return axis == 'e' ? 3 : axis == 'k' ? 4 : axis == 'o' ? 5 : 7;
}

/* The element of the source that is element i of the target. */
static uint64_t origin(const char *source, const char *target, uint64_t i)
{
    uint64_t at[128] = {0}, index = 0;

    for (size_t d = strlen(target); d-- > 0; i /= size_of(target[d]))
        at[(unsigned char)target[d]] = i % size_of(target[d]);
    for (; *source; source++)
        index = index * size_of(*source) + at[(unsigned char)*source];
    return index;
}

/* The shape that a pattern gives: letters in parentheses are one dimension. */
static uint32_t shape_of(const char *pattern, uint64_t *dim)
{
    uint32_t n = 0;
    bool inside = false;

    for (const char *p = pattern; *p; p++) {
        if (*p == '(' || *p == ')') {
            inside = *p == '(';
            n += !inside;
            if (inside)
                dim[n] = 1;
        } else if (*p == '1') {
            dim[n++] = 1;
        } else if (*p == '=') {
            p++;
        } else if (*p != ' ') {
            dim[n] = (inside ? dim[n] : 1) * size_of(*p);
            n += !inside;
        }
    }
    return n;
}

TEST(rearrange, each_element_goes_where_its_axes_say)
{
    static uint16_t data[MAX_NUMEL];

    for (size_t i = 0; i < MAX_NUMEL; i++)
        data[i] = (uint16_t)(i * 7 + 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t cut = 0; cut < 3; cut++) {
            struct ckpt_catalog *cat = stored_catalog();
            struct ckpt_err err = {0};
            struct ckpt_tensor t;
            uint64_t dim[CKPT_MAX_RANK], want[CKPT_MAX_RANK];
            const uint32_t rank = shape_of(cases[i].from, dim);
            size_t at = stored_add(cat, "x", CKPT_U16, rank, dim, data, cut);
            CHECK_OK(
                ckpt_rearrange(cat, &cat->tensors.ptr[at], cases[i].from, cases[i].to, &t, &err));
            CHECK_EQ(t.rank, shape_of(cases[i].to, want));
            CHECK(memcmp(t.dim, want, t.rank * sizeof *want) == 0);
            CHECK_EQ(t.numel, cat->tensors.ptr[at].numel);
            uint16_t *got = (uint16_t *)stored_read(&t, NULL, 2 * t.numel, 0);
            for (uint64_t k = 0; k < t.numel; k++)
                CHECK_EQ(got[k], data[origin(cases[i].source, cases[i].target, k)]);
            free(got);
            ckpt_catalog_free(cat);
        }
}

TEST(rearrange, what_does_not_fit_is_refused)
{
    static const uint16_t data[24];
    struct ckpt_catalog *cat = stored_catalog();
    struct ckpt_err err = {0};
    struct ckpt_tensor t;
    size_t at = stored_add(cat, "x", CKPT_F16, 2, (const uint64_t[]){4, 6}, data, 9);
    const struct ckpt_tensor *x = &cat->tensors.ptr[at];

    CHECK_FAILS(ckpt_rearrange(cat, x, "(e=3 k) c", "e k c", &t, &err), CKPT_CONFLICT, "'x'");
    CHECK_FAILS(ckpt_rearrange(cat, x, "a b c", "c b a", &t, &err), CKPT_CONFLICT, "[4, 6]");
    CHECK_FAILS(ckpt_rearrange(cat, x, "rows c", "c rows", &t, &err), CKPT_MISSING, "rows");
    CHECK_FAILS(ckpt_rearrange(cat, x, "a b", "b", &t, &err), CKPT_FORMAT, "partner");
    CHECK_FAILS(ckpt_rearrange(cat, x, "a (", "a", &t, &err), CKPT_FORMAT, "character");
    CHECK_OK(ckpt_value_cast(cat, at, CKPT_F32, &err));
    CHECK_FAILS(ckpt_rearrange(cat, x, "a b", "b a", &t, &err), CKPT_UNSUPPORTED, "computed");
    ckpt_catalog_free(cat);
}

TESTS(T(rearrange, each_element_goes_where_its_axes_say),
      T(rearrange, what_does_not_fit_is_refused))
