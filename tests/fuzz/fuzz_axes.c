/* SPDX-License-Identifier: Apache-2.0 */
/* Axes and boxes against brute force: ckpt_axes_clip, ckpt_boxes_cover, ckpt_ndcopy. */
#include "fuzz.h"

#include "tensor/ndcopy.h"

enum { MOST = 4096 };

static void clip(struct input *in)
{
    uint64_t n[6], stride[6], total = 1, unit = 1;
    uint32_t k = input_u8(in) % 5;
    struct ckpt_span span[CKPT_MAX_SPANS];
    static uint8_t seen[MOST];

    for (uint32_t j = k; j-- > 0;) {
        n[j] = 1 + input_u8(in) % 6;
        stride[j] = unit + input_u8(in) % 4;
        unit = n[j] * stride[j];
        total *= n[j];
    }
    uint64_t lo = input_u16(in), hi = lo + input_u16(in);
    memset(seen, 0, sizeof seen);
    size_t nspan = ckpt_axes_clip(n, stride, k, lo, hi, span), found = 0;
    MUST(nspan <= (k ? 2 * k - 1 : 1));
    uint64_t previous = 0;
    for (size_t s = 0; s < nspan; s++) {
        uint64_t index[6] = {0};
        for (;;) {
            uint64_t sum = 0, flat = 0;
            uint32_t j;
            for (j = 0; j < k; j++) {
                MUST(span[s].n[j] > 0 && span[s].lo[j] + index[j] < n[j]);
                sum += (span[s].lo[j] + index[j]) * stride[j];
                flat = flat * n[j] + span[s].lo[j] + index[j];
            }
            MUST(sum >= lo && sum < hi && flat < MOST && !seen[flat]++);
            MUST(found == 0 || sum > previous);
            previous = sum;
            found++;
            for (j = k; j-- > 0 && ++index[j] == span[s].n[j];)
                index[j] = 0;
            if (j == UINT32_MAX)
                break;
        }
    }
    size_t expected = 0;
    for (uint64_t i = 0; i < total; i++) {
        uint64_t rest = i, sum = 0;
        for (uint32_t j = k; j-- > 0; rest /= n[j])
            sum += rest % n[j] * stride[j];
        expected += sum >= lo && sum < hi;
    }
    MUST(found == expected);
}

static void cover(struct input *in)
{
    uint64_t dim[4], numel = 1;
    uint32_t rank = input_u8(in) % 4;
    struct ckpt_box box[24];
    size_t n = input_u8(in) % 24, bad = 0;
    static uint8_t times[MOST];
    struct ckpt_err err = {0};
    bool twice = false, gap = false;

    for (uint32_t d = 0; d < rank; d++)
        numel *= dim[d] = 1 + input_u8(in) % 8;
    memset(times, 0, sizeof times);
    for (size_t i = 0; i < n; i++) {
        box[i] = (struct ckpt_box){.rank = rank};
        for (uint32_t d = 0; d < rank; d++) {
            box[i].lo[d] = input_u8(in) % dim[d];
            box[i].n[d] = 1 + input_u8(in) % (dim[d] - box[i].lo[d]);
        }
        for (uint64_t e = 0; e < numel; e++) {
            uint64_t rest = e;
            bool inside = true;
            for (uint32_t d = rank; d-- > 0; rest /= dim[d])
                inside &= rest % dim[d] - box[i].lo[d] < box[i].n[d];
            times[e] += inside;
        }
    }
    for (uint64_t e = 0; e < numel; e++) {
        twice |= times[e] > 1;
        gap |= times[e] == 0;
    }
    int result = ckpt_boxes_cover(dim, rank, box, n, &bad, &err);
    MUST((result == 0) == (!twice && !gap));
    if (result < 0) {
        check_err(&err);
        MUST(err.code == (bad == SIZE_MAX ? CKPT_MISSING : CKPT_CONFLICT));
        MUST(bad == SIZE_MAX ? gap : twice && bad < n);
    }
}

static void copy(struct input *in)
{
    static const uint8_t esizes[] = {1, 2, 4, 8};
    struct ckpt_step_axis axis[4];
    struct ckpt_ndcopy c;
    uint32_t k = input_u8(in) % 5, order[4] = {0, 1, 2, 3};
    uint64_t esize = esizes[input_u8(in) % 4], unit = esize, total = 1, end = esize;

    for (uint32_t j = k; j-- > 0; total *= axis[j].n) {
        axis[j].n = 1 + input_u8(in) % 6;
        axis[j].dst = unit + esize * (input_u8(in) % 3);
        unit = axis[j].n * axis[j].dst;
    }
    uint64_t dst_len = k ? unit : esize;
    for (uint32_t j = 0; j + 1 < k; j++) {
        uint32_t other = j + input_u8(in) % (k - j), t = order[j];
        order[j] = order[other];
        order[other] = t;
    }
    unit = esize;
    for (uint32_t j = 0; j < k; j++) {
        struct ckpt_step_axis *a = &axis[order[j]];
        a->src = unit + input_u8(in) % 5;
        unit = a->n * a->src;
        end += (a->n - 1) * a->src;
    }
    unsigned char *src = malloc(end), *got = calloc(1, dst_len), *want = calloc(1, dst_len);
    MUST(src && got && want);
    for (uint64_t i = 0; i < end; i++)
        src[i] = (unsigned char)(i * 37 + (i >> 8) + 1);
    for (uint64_t i = 0; i < total; i++) {
        uint64_t rest = i, d = 0, s = 0;
        for (uint32_t j = k; j-- > 0; rest /= axis[j].n) {
            d += rest % axis[j].n * axis[j].dst;
            s += rest % axis[j].n * axis[j].src;
        }
        memcpy(want + d, src + s, esize);
    }
    ckpt_ndcopy_init(&c, axis, k, esize);
    MUST(ckpt_ndcopy_bytes(&c) == total * esize && ckpt_ndcopy_src_span(&c) == end);
    ckpt_ndcopy_run(&c, got, src);
    MUST(memcmp(got, want, dst_len) == 0);
    free(src);
    free(got);
    free(want);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};

    clip(&in);
    cover(&in);
    copy(&in);
    return 0;
}
