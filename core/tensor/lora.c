/* SPDX-License-Identifier: Apache-2.0 */
/* W + s * B A by rows; the product by tiles of columns, which bounds the memory that it needs. */
#include "tensor/lora.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "tensor/dtype.h"
#include "tensor/read.h"
#include "tensor/value.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

enum {
    SLAB = 4 * 1024 * 1024, /* bytes of the result that are computed together */
    ROWS = 1024 * 1024,     /* elements of it that are held as F32, at least one row */
    TILE = 1024 * 1024,     /* elements of A that are */
    PANEL = 64,             /* columns that are summed in registers */
};

/* Operands: the weight, A, B, and DoRA's magnitudes; or a bias and what is added. */
struct lora {
    struct ckpt_value value; /* first */
    const struct ckpt_tensor *arg[4];
    struct ckpt_tensor operand[4];
    uint64_t first;
    float scale;
    bool rounded;
};

enum { WEIGHT, A, B, MAGNITUDE };

/* ---- the product ---- */

/* Copy A as panels of PANEL columns, each [rank, PANEL], so that elements that are multiplied
 * together are adjacent. Missing columns of the last panel are zeros. */
static void pack(float *panels, const float *a, size_t rank, size_t cols)
{
    for (size_t c = 0; c < cols; c += PANEL, panels += rank * PANEL)
        for (size_t k = 0; k < rank; k++) {
            const size_t n = cols - c < PANEL ? cols - c : PANEL;
            memcpy(panels + k * PANEL, a + k * cols + c, n * sizeof *a);
            memset(panels + k * PANEL + n, 0, (PANEL - n) * sizeof *a);
        }
}

/* c[0..PANEL) += b[k] * panel[k], k ascending, each a fused multiply-add. */
static void add_panel_plain(float *c, const float *b, const float *panel, size_t rank)
{
    for (size_t k = 0; k < rank; k++)
        for (size_t i = 0; i < PANEL; i++)
            c[i] = fmaf(b[k], panel[k * PANEL + i], c[i]);
}

#ifdef HAVE_X86
__attribute__((target("avx2,fma"))) static void add_panel_fma(float *c, const float *b,
                                                              const float *panel, size_t rank)
{
    __m256 sum[PANEL / 8];

    for (size_t i = 0; i < PANEL / 8; i++)
        sum[i] = _mm256_loadu_ps(c + 8 * i);
    for (size_t k = 0; k < rank; k++, panel += PANEL) {
        const __m256 by = _mm256_set1_ps(b[k]);
        for (size_t i = 0; i < PANEL / 8; i++)
            sum[i] = _mm256_fmadd_ps(by, _mm256_loadu_ps(panel + 8 * i), sum[i]);
    }
    for (size_t i = 0; i < PANEL / 8; i++)
        _mm256_storeu_ps(c + 8 * i, sum[i]);
}
#endif

static void add_panel(float *c, const float *b, const float *panel, size_t rank)
{
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        add_panel_fma(c, b, panel, rank);
        return;
    }
#endif
    add_panel_plain(c, b, panel, rank);
}

/* c of [rows, stride] += b of [rows, rank] times the `cols` columns that panels hold. */
static void add_product(float *c, size_t stride, const float *b, const float *panels, size_t rows,
                        size_t rank, size_t cols)
{
    for (size_t at = 0; at < cols; at += PANEL, panels += rank * PANEL) {
        const size_t n = cols - at < PANEL ? cols - at : PANEL;
        for (size_t i = 0; i < rows; i++) {
            float last[PANEL] = {0}, *to = c + i * stride + at;
            if (n == PANEL) {
                add_panel(to, b + i * rank, panels, rank);
                continue;
            }
            memcpy(last, to, n * sizeof *to);
            add_panel(last, b + i * rank, panels, rank);
            memcpy(to, last, n * sizeof *to);
        }
    }
}

/* ---- operands ---- */

/* Elements [lo, lo+n) as F32, through `raw`, which has room for them. */
static int read_f32(const struct ckpt_tensor *arg, struct ckpt_reading *rd, uint64_t lo, size_t n,
                    void *raw, float *out, struct ckpt_err *err)
{
    if (ckpt_elements_pread(arg, rd, raw, lo, lo + n, err) < 0)
        return -1;
    ckpt_dtype_cast(out, CKPT_F32, raw, arg->dtype, n);
    return 0;
}

/* Reads likewise, into new memory: *ret. */
static int load_f32(const struct ckpt_tensor *arg, struct ckpt_reading *rd, uint64_t lo, size_t n,
                    float **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) float *out = malloc((n + 1) * sizeof *out);
    ckpt_cleanup(ckpt_freep) void *raw = malloc((n + 1) * ckpt_dtype_size(arg->dtype));

    if (!out || !raw)
        return ckpt_nomem(err);
    if (read_f32(arg, rd, lo, n, raw, out, err) < 0)
        return -1;
    *ret = ckpt_steal(&out);
    return 0;
}

/* ---- deltas ---- */

/* Add B A of rows [row, row + nrow) of the whole stack, all of one matrix, to delta. */
static int add_matrix(const struct lora *v, struct ckpt_reading *rd, uint64_t row, uint64_t nrow,
                      float *delta, struct ckpt_err *err)
{
    const struct ckpt_tensor *a = &v->operand[A];
    const size_t rank = (size_t)a->dim[1], cols = (size_t)a->dim[2];
    const size_t tile = (size_t)ckpt_min_u64(cols, ckpt_max_u64(1, TILE / ckpt_max_u64(rank, 1)));
    const uint64_t m = row / v->operand[B].dim[1];
    ckpt_cleanup(ckpt_freep) float *b = NULL;
    ckpt_cleanup(ckpt_freep) float *part = malloc((rank * tile + 1) * sizeof *part);
    ckpt_cleanup(ckpt_freep) float *panels = malloc((rank * (tile + PANEL) + 1) * sizeof *panels);
    ckpt_cleanup(ckpt_freep) void *raw = malloc((rank * tile + 1) * sizeof(double));

    if (!part || !panels || !raw)
        return ckpt_nomem(err);
    if (load_f32(v->arg[B], rd, row * rank, (size_t)nrow * rank, &b, err) < 0)
        return -1;
    for (size_t c = 0; c < cols; c += tile) {
        const size_t n = tile < cols - c ? tile : cols - c;
        if (n == cols && read_f32(v->arg[A], rd, m * rank * cols, rank * cols, raw, part, err) < 0)
            return -1;
        for (size_t k = 0; k < rank && n < cols; k++)
            if (read_f32(v->arg[A], rd, (m * rank + k) * cols + c, n, raw, part + k * n, err) < 0)
                return -1;
        pack(panels, part, rank, n);
        add_product(delta + c, cols, b, panels, (size_t)nrow, rank, n);
    }
    return 0;
}

/* s * B A of rows [row, row + nrow) of the whole stack. */
static int fill_delta(const struct lora *v, struct ckpt_reading *rd, uint64_t row, uint64_t nrow,
                      float *delta, struct ckpt_err *err)
{
    const uint64_t rows = v->operand[B].dim[1], cols = v->operand[A].dim[2];
    const size_t n = (size_t)(nrow * cols);

    memset(delta, 0, n * sizeof *delta);
    for (uint64_t done = 0, take; done < nrow; done += take) {
        take = ckpt_min_u64(rows - (row + done) % rows, nrow - done);
        if (add_matrix(v, rd, row + done, take, delta + done * cols, err) < 0)
            return -1;
    }
    for (size_t i = 0; i < n; i++)
        delta[i] *= v->scale;
    return 0;
}

/* ---- the sum ---- */

/* Scale each row of x to the length that its magnitude says. */
static int set_lengths(const struct lora *v, struct ckpt_reading *rd, uint64_t row, uint64_t nrow,
                       float *x, struct ckpt_err *err)
{
    const size_t cols = (size_t)v->operand[A].dim[2];
    ckpt_cleanup(ckpt_freep) float *magnitude = NULL;

    if (load_f32(v->arg[MAGNITUDE], rd, row, (size_t)nrow, &magnitude, err) < 0)
        return -1;
    for (size_t i = 0; i < nrow; i++) {
        double square = 0;
        for (size_t c = 0; c < cols; c++)
            square += (double)x[i * cols + c] * (double)x[i * cols + c];
        const float by = magnitude[i] / (float)sqrt(square);
        for (size_t c = 0; c < cols; c++)
            x[i * cols + c] *= by;
    }
    return 0;
}

/* Buffers for some rows of a weight: its values as F32, the change, and the stored bytes. */
struct rows {
    float *weight, *delta;
    void *raw;
};

/* Compute rows [row, row + nrow) of the merged weight as F32 in r->weight. */
static int merge_rows(const struct lora *v, struct ckpt_reading *rd, uint64_t row, uint64_t nrow,
                      const struct rows *r, struct ckpt_err *err)
{
    float *weight = r->weight, *delta = r->delta;
    void *raw = r->raw;
    const struct ckpt_tensor *w = v->arg[WEIGHT];
    const size_t cols = (size_t)v->operand[A].dim[2], n = (size_t)nrow * cols;

    if (fill_delta(v, rd, v->first + row, nrow, delta, err) < 0 ||
        read_f32(w, rd, row * cols, n, raw, weight, err) < 0)
        return -1;
    if (v->rounded) {
        const enum ckpt_dtype dtype = (enum ckpt_dtype)w->dtype;
        ckpt_dtype_cast(raw, dtype, delta, CKPT_F32, n);
        ckpt_dtype_cast(delta, CKPT_F32, raw, dtype, n);
    }
    for (size_t i = 0; i < n; i++)
        weight[i] += delta[i];
    return v->value.narg > MAGNITUDE ? set_lengths(v, rd, row, nrow, weight, err) : 0;
}

static int lora_compute(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                        uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const struct lora *v = (const struct lora *)t->value;
    const size_t esize = ckpt_dtype_size(t->dtype);
    const uint64_t cols = v->operand[A].dim[2], end = (hi + cols - 1) / cols;
    const uint64_t step = ckpt_min_u64(ckpt_max_u64(1, ROWS / cols), end - lo / cols);
    const size_t most = (size_t)(step * cols);
    ckpt_cleanup(ckpt_freep) float *weight = malloc(most * sizeof *weight);
    ckpt_cleanup(ckpt_freep) float *delta = malloc(most * sizeof *delta);
    ckpt_cleanup(ckpt_freep) void *raw = malloc(most * ckpt_dtype_size(v->operand[WEIGHT].dtype));

    if (!weight || !delta || !raw)
        return ckpt_nomem(err);
    for (char *out = buf; lo < hi;) {
        const uint64_t row = lo / cols, nrow = ckpt_min_u64(step, end - row);
        const size_t n = (size_t)(ckpt_min_u64(hi, (row + nrow) * cols) - lo);
        if (merge_rows(v, rd, row, nrow, &(struct rows){weight, delta, raw}, err) < 0)
            return ckpt_err_in(err, "tensor '%s'", t->name);
        ckpt_dtype_cast(out, t->dtype, weight + (lo - row * cols), CKPT_F32, n);
        out += n * esize;
        lo += n;
    }
    return 0;
}

static const struct ckpt_value_ops lora_ops = {
    .name = "LoRA merge", .compute = lora_compute, .rounds = true, .slab_bytes = SLAB};

/* ---- biases ---- */

static int bias_compute(const struct ckpt_tensor *t, struct ckpt_reading *rd, void *buf,
                        uint64_t lo, uint64_t hi, struct ckpt_err *err)
{
    const struct lora *v = (const struct lora *)t->value;
    ckpt_cleanup(ckpt_freep) float *bias = NULL;
    ckpt_cleanup(ckpt_freep) float *delta = NULL;
    const size_t n = (size_t)(hi - lo);

    if (load_f32(v->arg[0], rd, lo, n, &bias, err) < 0 ||
        load_f32(v->arg[1], rd, lo, n, &delta, err) < 0)
        return ckpt_err_in(err, "tensor '%s'", t->name);
    for (size_t i = 0; i < n; i++)
        bias[i] += delta[i] * v->scale;
    ckpt_dtype_cast(buf, t->dtype, bias, CKPT_F32, n);
    return 0;
}

static const struct ckpt_value_ops bias_ops = {
    .name = "LoRA bias merge", .compute = bias_compute, .rounds = true};

/* ---- making them ---- */

static int check_type(const struct ckpt_tensor *t, bool is_weight, struct ckpt_err *err)
{
    if (ckpt_dtype_is_castable(t->dtype) && (t->dtype != CKPT_F64 || !is_weight))
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "LoRA of '%s', which is %s, not F32, BF16 or F16",
                     t->name, ckpt_dtype_name(t->dtype));
}

static struct lora *new_value(struct ckpt_catalog *cat, const struct ckpt_value_ops *ops,
                              const struct ckpt_tensor *const operand[4], double scale)
{
    struct lora *v = ckpt_arena_alloc(&cat->arena, sizeof *v);

    if (!v)
        return NULL;
    memset(v, 0, sizeof *v);
    v->value = (struct ckpt_value){.ops = ops, .arg = v->arg};
    v->scale = (float)scale;
    memcpy(&v->value.param[0], &scale, sizeof scale);
    for (uint32_t i = 0; i < 4 && operand[i]; i++) {
        v->operand[i] = *operand[i];
        v->arg[v->value.narg++] = &v->operand[i];
    }
    return v;
}

static int fail_shapes(const struct ckpt_tensor *w, const struct ckpt_tensor *a,
                       const struct ckpt_tensor *b, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_CONFLICT, "LoRA '%s' %s and '%s' %s do not fit the weight '%s' %s",
                     a->name, ckpt_shape_text(a->dim, a->rank).text, b->name,
                     ckpt_shape_text(b->dim, b->rank).text, w->name,
                     ckpt_shape_text(w->dim, w->rank).text);
}

static int check_shapes(const struct ckpt_tensor *w, const struct ckpt_lora *lora, uint64_t first,
                        struct ckpt_err *err)
{
    const struct ckpt_tensor *a = lora->a, *b = lora->b, *m = lora->magnitude;
    uint64_t rows, all;

    if (a->rank != 3 || b->rank != 3 || a->dim[0] != b->dim[0] || a->dim[1] != b->dim[2] ||
        w->rank < 2 || w->dim[w->rank - 1] != a->dim[2] ||
        !ckpt_shape_numel(w->dim, w->rank - 1, &rows) || !ckpt_shape_numel(b->dim, 2, &all) ||
        first > all || rows > all - first)
        return fail_shapes(w, a, b, err);
    if (m && (m->numel != rows || first || all != rows))
        return fail_shapes(w, m, b, err);
    return 0;
}

int ckpt_value_lora(struct ckpt_catalog *cat, size_t index, const struct ckpt_lora *lora,
                    uint64_t first, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    const struct ckpt_tensor *const operand[4] = {t, lora->a, lora->b, lora->magnitude};
    struct lora *v;

    assert(index < cat->tensors.len);
    for (size_t i = 0; i < 4 && operand[i]; i++)
        if (check_type(operand[i], i == WEIGHT, err) < 0)
            return -1;
    if (check_shapes(t, lora, first, err) < 0)
        return -1;
    if (!(v = new_value(cat, &lora_ops, operand, lora->scale)))
        return ckpt_nomem(err);
    v->first = v->value.param[1] = first;
    v->rounded = lora->rounded;
    v->value.param[2] = lora->rounded;
    return ckpt_tensor_compute(t, &v->value, t->dtype, err);
}

int ckpt_value_lora_bias(struct ckpt_catalog *cat, size_t index, const struct ckpt_tensor *bias,
                         double scale, struct ckpt_err *err)
{
    struct ckpt_tensor *t = &cat->tensors.ptr[index];
    const struct ckpt_tensor *const operand[4] = {t, bias};
    struct lora *v;

    assert(index < cat->tensors.len);
    if (check_type(t, true, err) < 0 || check_type(bias, false, err) < 0)
        return -1;
    if (t->rank != bias->rank || memcmp(t->dim, bias->dim, t->rank * sizeof *t->dim) != 0)
        return fail_shapes(t, bias, bias, err);
    if (!(v = new_value(cat, &bias_ops, operand, scale)))
        return ckpt_nomem(err);
    return ckpt_tensor_compute(t, &v->value, t->dtype, err);
}
