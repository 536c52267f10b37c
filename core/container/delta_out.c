/* SPDX-License-Identifier: Apache-2.0 */
/* Making changes: two tensors are read side by side, and only compressed bytes are kept. */
#include <stdlib.h>
#include <string.h>

#include <ckptfs/ckptfs.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "container/delta.h"
#include "container/zstd.h"
#include "tensor/read.h"

enum { STEP = 512 * 1024, HELD = 4096 };

struct making {
    const struct ckpt_tensor *a, *b;
    struct ckpt_reading *of_a, *of_b;
    struct ckpt_zstd_frame *frame;
    struct ckpt_delta_summing *sum; /* of the pass that computes it; else NULL */
    uint64_t changed;
    unsigned char *old, *new;
    unsigned char held[4 * HELD]; /* positions or values that are not compressed yet */
    size_t nheld;
};

/* What a pass does with bytes [lo, lo + n). */
typedef int pass_fn(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err);

static int pass(struct making *m, pass_fn *fn, struct ckpt_err *err)
{
    const uint64_t size = ckpt_tensor_nbytes(m->b);

    m->changed = 0;
    for (uint64_t lo = 0; lo < size; lo += STEP) {
        const size_t n = (size_t)ckpt_min_u64(STEP, size - lo);
        if (ckpt_tensor_pread(m->a, m->of_a, m->old, n, lo, err) < 0 ||
            ckpt_tensor_pread(m->b, m->of_b, m->new, n, lo, err) < 0)
            return -1;
        if (m->sum && ckpt_delta_sum_add(m->sum, m->new, n) < 0)
            return ckpt_nomem(err);
        if (fn(m, lo, n, err) < 0)
            return -1;
    }
    return 0;
}

static int combine(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    size_t i = 0;

    (void)lo;
    for (uint64_t x, y; i + sizeof x <= n; i += sizeof x) {
        memcpy(&x, m->old + i, sizeof x);
        memcpy(&y, m->new + i, sizeof y);
        x ^= y;
        memcpy(m->old + i, &x, sizeof x);
        /* the highest bit of each byte that is not 0; then their sum */
        x = (((x & low) + low) | x) & ~low;
        m->changed += ((x >> 7) * 0x0101010101010101) >> 56;
    }
    for (; i < n; i++)
        m->changed += (m->old[i] ^= m->new[i]) != 0;
    return ckpt_zstd_frame_add(m->frame, m->old, n, err);
}

static int count(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    size_t changed = 0;

    (void)lo, (void)err;
    for (size_t i = 0; i < n; i++)
        changed += m->old[i] != m->new[i];
    m->changed += changed;
    return 0;
}

static int flush(struct making *m, struct ckpt_err *err)
{
    const size_t n = m->nheld;

    m->nheld = 0;
    return n ? ckpt_zstd_frame_add(m->frame, m->held, n, err) : 0;
}

static int put_u32(struct making *m, uint64_t value, struct ckpt_err *err)
{
    if (m->nheld == sizeof m->held && flush(m, err) < 0)
        return -1;
    for (int k = 0; k < 4; k++)
        m->held[m->nheld++] = (unsigned char)(value >> 8 * k);
    return 0;
}

static int positions(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (m->old[i] != m->new[i] && put_u32(m, lo + i, err) < 0)
            return -1;
    return 0;
}

static int values(struct making *m, uint64_t lo, size_t n, struct ckpt_err *err)
{
    (void)lo;
    for (size_t i = 0; i < n; i++) {
        if (m->old[i] == m->new[i])
            continue;
        if (m->nheld == sizeof m->held && flush(m, err) < 0)
            return -1;
        m->held[m->nheld++] = m->new[i];
    }
    return 0;
}

static int make_xor(struct making *m, struct ckpt_err *err)
{
    return ckpt_zstd_frame_new(ckpt_tensor_nbytes(m->b), &m->frame, err) < 0
               ? -1
               : pass(m, combine, err);
}

static int make_overwrite(struct making *m, struct ckpt_err *err)
{
    if (ckpt_tensor_nbytes(m->b) > (uint64_t)UINT32_MAX + 1)
        return ckpt_fail(err, CKPT_LIMIT,
                         "tensor '%s' has more than 2^32 bytes, whose positions overwrite cannot "
                         "hold: use xor",
                         m->b->name);
    if (pass(m, count, err) < 0)
        return -1;
    const uint64_t n = m->changed;
    m->sum = NULL;
    if (n == 0)
        return 0;
    if (ckpt_zstd_frame_new(4 + 5 * n, &m->frame, err) < 0 || put_u32(m, n, err) < 0 ||
        pass(m, positions, err) < 0 || pass(m, values, err) < 0)
        return -1;
    m->changed = n;
    return flush(m, err);
}

int ckpt_delta_make(const struct ckpt_tensor *a, struct ckpt_reading *of_a,
                    const struct ckpt_tensor *b, struct ckpt_reading *of_b, bool overwrite,
                    struct ckpt_change *ret, struct ckpt_err *err)
{
    struct ckpt_delta_summing sum = {.kind = CKPT_DELTA_XXH3};
    ckpt_cleanup(ckpt_freep) struct making *m = calloc(1, sizeof *m);
    ckpt_cleanup(ckpt_freep) unsigned char *memory = malloc((size_t)2 * STEP);

    *ret = (struct ckpt_change){.size = ret->size};
    if (!m || !memory)
        return ckpt_nomem(err);
    *m = (struct making){.a = a, .b = b, .of_a = of_a, .of_b = of_b, .sum = &sum};
    m->old = memory;
    m->new = memory + STEP;
    int rc = overwrite ? make_overwrite(m, err) : make_xor(m, err);
    const bool keep = rc == 0 && m->changed;
    if (ckpt_zstd_frame_end(m->frame, keep ? &ret->data : NULL, &ret->len, err) < 0)
        rc = -1;
    ret->changed = m->changed;
    ckpt_delta_sum_end(&sum, ret->checksum);
    return rc;
}
