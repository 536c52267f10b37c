/* SPDX-License-Identifier: Apache-2.0 */
/* FP8 in blocks, and MXFP4. Both go over the rows of the result, tile by tile; nothing is kept. */
#include "tensor/dequant.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/read.h"
#include "tensor/value.h"

enum {
    TILE = 128 * 1024, /* most elements that are computed at once */
    MXFP4_BYTES = 16,  /* of a block: two codes each */
    MXFP4_CODES = 2 * MXFP4_BYTES,
};

/* A part of the elements [lo, hi) of a matrix: a part of one row, or whole rows, so that it is
 * contiguous. */
struct tile {
    uint64_t row, nrow, col, ncol;
};

struct scaled;

/* The tile's elements as F32. */
typedef int fill_tile(const struct scaled *v, const struct tile *tile, struct ckpt_reading *rd,
                      float *out, struct ckpt_err *err);

/* Codes and scales, copied from the catalogue; `value` comes first. */
struct scaled {
    struct ckpt_value value;
    const struct ckpt_tensor *arg[2];
    struct ckpt_tensor code, scale;
    fill_tile *fill;
    uint64_t block[2]; /* FP8 */
};

static struct tile tile_at(uint64_t lo, uint64_t hi, uint64_t ncol)
{
    const uint64_t n = ckpt_min_u64(hi - lo, TILE), col = lo % ncol;

    if (col == 0 && n >= ncol)
        return (struct tile){lo / ncol, n / ncol, 0, ncol};
    return (struct tile){lo / ncol, 1, col, ckpt_min_u64(ncol - col, n)};
}

static int compute_tiles(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                         uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const struct scaled *scaled = (const struct scaled *)t->value;
    const uint64_t ncol = t->dim[t->rank - 1];
    ckpt_cleanup(ckpt_freep) float *out =
        malloc((size_t)ckpt_min_u64(hi - lo + 1, TILE) * sizeof *out);

    if (!out)
        return ckpt_nomem(err);
    for (unsigned char *at = buf; lo < hi;) {
        const struct tile tile = tile_at(lo, hi, ncol);
        const size_t n = (size_t)(tile.nrow * tile.ncol);
        if (scaled->fill(scaled, &tile, rd, out, err) < 0)
            return ckpt_err_in(err, "tensor '%s'", t->name);
        ckpt_dtype_cast(at, t->dtype, out, CKPT_F32, n);
        at += n * ckpt_dtype_size(t->dtype);
        lo += n;
    }
    return 0;
}

/* Elements [lo, lo+n) of an operand as they are stored. *ret is new. */
static int read_operand(const struct ckpt_tensor *arg, struct ckpt_reading *rd, uint64_t lo,
                        uint64_t n, unsigned char **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *buf =
        malloc((size_t)n * ckpt_dtype_size(arg->dtype) + 1);

    if (!buf)
        return ckpt_nomem(err);
    if (ckpt_elements_pread(arg, rd, buf, lo, lo + n, err) < 0)
        return -1;
    *ret = ckpt_steal(&buf);
    return 0;
}

/* 2^(s - 127), F32's exponent; 255 is NaN. */
static float e8m0(unsigned char s)
{
    const uint32_t bits = s == 0 ? 0x00400000U : s == 255 ? 0x7fc00000U : (uint32_t)s << 23;
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The exponent's bias is 7, not 127; there is no infinity, and one NaN of each sign. */
static float e4m3(unsigned char x)
{
    const uint32_t magnitude = x & 0x7fU, bits = magnitude << 20;
    float f;

    memcpy(&f, &bits, sizeof f);
    f = magnitude == 0x7fU ? NAN : f * 0x1p120F; /* exact, subnormal numbers too */
    return x & 0x80U ? -f : f;
}

/* Scales as F32; bytes are exponents. *ret is new. */
static int read_scales(const struct ckpt_tensor *arg, struct ckpt_reading *rd, uint64_t lo,
                       uint64_t n, float **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) unsigned char *raw = NULL;
    float *out;

    if (read_operand(arg, rd, lo, n, &raw, err) < 0)
        return -1;
    if (!(out = malloc(((size_t)n + 1) * sizeof *out)))
        return ckpt_nomem(err);
    if (ckpt_dtype_size(arg->dtype) == 1)
        for (uint64_t i = 0; i < n; i++)
            out[i] = e8m0(raw[i]);
    else
        ckpt_dtype_cast(out, CKPT_F32, raw, arg->dtype, (size_t)n);
    *ret = out;
    return 0;
}

/* ---- FP8 ---- */

/* The row of scales for a row of the codes; both of the whole stack of matrices. */
static uint64_t scale_row(const struct scaled *v, uint64_t row)
{
    const uint64_t rows = v->code.dim[v->code.rank - 2], srows = v->scale.dim[v->scale.rank - 2];

    return row / rows * srows + row % rows / v->block[0];
}

/* One row of a tile. */
static void scale_codes(float *out, const unsigned char *code, const float value[256],
                        const float *scale, uint64_t block, const struct tile *tile)
{
    for (uint64_t i = 0; i < tile->ncol;) {
        const uint64_t b = (tile->col + i) / block;
        for (uint64_t end = ckpt_min_u64((b + 1) * block - tile->col, tile->ncol); i < end; i++)
            out[i] = value[code[i]] * scale[b];
    }
}

static int fp8_tile(const struct scaled *v, const struct tile *tile, struct ckpt_reading *rd,
                    float *out, struct ckpt_err *err)
{
    const uint64_t ncol = v->code.dim[v->code.rank - 1], nscale = v->scale.dim[v->scale.rank - 1];
    const uint64_t first = scale_row(v, tile->row), last = scale_row(v, tile->row + tile->nrow - 1);
    ckpt_cleanup(ckpt_freep) unsigned char *code = NULL;
    ckpt_cleanup(ckpt_freep) float *scale = NULL;
    float value[256];

    if (read_operand(v->arg[0], rd, tile->row * ncol + tile->col, tile->nrow * tile->ncol, &code,
                     err) < 0 ||
        read_scales(v->arg[1], rd, first * nscale, (last - first + 1) * nscale, &scale, err) < 0)
        return -1;
    for (unsigned i = 0; i < 256; i++)
        value[i] = e4m3((unsigned char)i);
    for (uint64_t i = 0; i < tile->nrow; i++)
        scale_codes(out + i * tile->ncol, code + i * tile->ncol, value,
                    scale + (scale_row(v, tile->row + i) - first) * nscale, v->block[1], tile);
    return 0;
}

static const struct ckpt_value_ops fp8_ops = {
    .name = "fp8 dequantisation", .compute = compute_tiles, .rounds = true};

/* ---- MXFP4 ---- */

static const float e2m1[16] = {0,     0.5F,  1,  1.5F,  2,  3,  4,  6,
                               -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};

static void scale_nibbles(float *out, const unsigned char *code, unsigned shift, const float *scale,
                          size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = e2m1[code[i] >> shift & 0xf] * scale[i];
}

/* Compute a tile. Row r of the result (over all experts) has its codes in row r / 2 of the blocks,
 * in the low or the high halves of the bytes, and its scales in row r / 32. */
static int mxfp4_tile(const struct scaled *v, const struct tile *tile, struct ckpt_reading *rd,
                      float *out, struct ckpt_err *err)
{
    const uint64_t ncol = v->code.dim[v->code.rank - 1], last = tile->row + tile->nrow - 1;
    const uint64_t code_row = tile->row / 2, scale_row = tile->row / MXFP4_CODES;
    ckpt_cleanup(ckpt_freep) unsigned char *code = NULL;
    ckpt_cleanup(ckpt_freep) float *scale = NULL;

    /* a tile of part of a row has part of one row of each */
    if (read_operand(v->arg[0], rd, code_row * ncol + tile->col,
                     (last / 2 - code_row) * ncol + tile->ncol, &code, err) < 0 ||
        read_scales(v->arg[1], rd, scale_row * ncol + tile->col,
                    (last / MXFP4_CODES - scale_row) * ncol + tile->ncol, &scale, err) < 0)
        return -1;
    for (uint64_t row = tile->row; row <= last; row++, out += tile->ncol)
        scale_nibbles(out, code + (row / 2 - code_row) * ncol, row % 2 * 4,
                      scale + (row / MXFP4_CODES - scale_row) * ncol, (size_t)tile->ncol);
    return 0;
}

static const struct ckpt_value_ops mxfp4_ops = {
    .name = "mxfp4 dequantisation", .compute = compute_tiles, .rounds = true};

/* ---- making them ---- */

static struct scaled *new_value(struct ckpt_catalog *cat, const struct ckpt_value_ops *ops,
                                fill_tile *fill, const struct ckpt_tensor *code,
                                const struct ckpt_tensor *scale, struct ckpt_err *err)
{
    struct scaled *v = ckpt_arena_alloc(&cat->arena, sizeof *v);

    if (!v) {
        (void)ckpt_nomem(err);
        return NULL;
    }
    *v = (struct scaled){.value = {.ops = ops, .narg = 2, .arg = v->arg},
                         .arg = {&v->code, &v->scale},
                         .code = *code,
                         .scale = *scale,
                         .fill = fill};
    return v;
}

/* [..., rows, columns] of the codes against [..., ceil(rows / block), ceil(columns / block)]. */
static int check_fp8(const struct ckpt_tensor *q, const struct ckpt_tensor *s,
                     const uint64_t block[2], struct ckpt_err *err)
{
    bool fits = q->rank >= 2 && s->rank == q->rank;

    if (q->dtype != CKPT_F8_E4M3)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' has scales ('%s') but is %s, not F8_E4M3",
                         q->name, s->name, ckpt_dtype_name(q->dtype));
    if (!(s->dtype == CKPT_F32 || s->dtype == CKPT_BF16 || s->dtype == CKPT_F16 ||
          s->dtype == CKPT_F8_E8M0))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the scales '%s' are %s, not F32, BF16, F16 or F8_E8M0", s->name,
                         ckpt_dtype_name(s->dtype));
    for (uint32_t d = 0; fits && d < q->rank; d++) {
        const uint64_t by = d + 2 >= q->rank ? block[d + 2 - q->rank] : 1;
        fits = s->dim[d] == q->dim[d] / by + (q->dim[d] % by != 0);
    }
    return fits ? 0
                : ckpt_fail(err, CKPT_CONFLICT,
                            "the scales '%s' have the shape %s: not one for each block of %llu x "
                            "%llu of '%s', %s",
                            s->name, ckpt_shape_text(s->dim, s->rank).text,
                            (unsigned long long)block[0], (unsigned long long)block[1], q->name,
                            ckpt_shape_text(q->dim, q->rank).text);
}

int ckpt_value_fp8(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *scale,
                   const uint64_t block[2], enum ckpt_dtype dtype, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    struct scaled *v;

    assert(index < cat->tensors.len && block[0] && block[1] && ckpt_dtype_is_castable(dtype));
    if (check_fp8(t, scale, block, err) < 0 ||
        !(v = new_value(cat, &fp8_ops, fp8_tile, t, scale, err)))
        return -1;
    for (uint32_t d = 0; d < 2; d++) /* no block is larger than the matrix */
        v->block[d] = v->value.param[d] =
            ckpt_max_u64(1, ckpt_min_u64(block[d], t->dim[t->rank - 2 + d]));
    return ckpt_tensor_compute(t, &v->value, dtype, err);
}

int ckpt_value_mxfp4(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *blocks,
                     const struct ckpt_tensor *scales, enum ckpt_dtype dtype, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    uint64_t *dim = ckpt_arena_alloc(&cat->arena, 3 * sizeof *dim), numel;
    struct scaled *v;

    assert(index < cat->tensors.len && blocks->rank == 4 && scales->rank == 3);
    assert(blocks->dim[2] == MXFP4_BYTES && ckpt_dtype_is_castable(dtype));
    if (!dim || !(v = new_value(cat, &mxfp4_ops, mxfp4_tile, blocks, scales, err)))
        return ckpt_nomem(err);
    if (ckd_mul(&numel, blocks->numel, (uint64_t)2) || numel > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "tensor '%s' has 2^63 elements or more", t->name);
    dim[0] = blocks->dim[0];
    dim[1] = blocks->dim[1] * MXFP4_CODES;
    dim[2] = blocks->dim[3];
    t->dim = dim;
    t->rank = 3;
    t->numel = numel;
    return ckpt_tensor_compute(t, &v->value, dtype, err);
}
