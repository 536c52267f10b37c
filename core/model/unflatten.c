/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the parameters in FSDP1's flat ones. */
#include "model/unflatten.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/library/order.h"
#include "tensor/boxes.h"

static const char flat_name[] = "_flat_param";

/* Elements to which offsets may be aligned: 16 bytes of F64, F32, 16-bit and 8-bit types; 0: not.
 */
static const uint64_t alignment[] = {0, 2, 4, 8, 16};
enum { NALIGNMENT = sizeof alignment / sizeof *alignment, PADDING_AT_ONCE = 4096 };

/* A wrapped module. */
struct unit {
    struct ckpt_tensor flat;
    size_t prefix; /* length of the module's name, with the dot behind it */
    uint64_t used; /* elements so far, with padding */
};

struct param {
    const struct ckpt_tensor *shape; /* the base's tensor */
    const struct ckpt_texts *order;
    char *name; /* in the checkpoint */
    uint32_t unit;
    uint64_t off;
};

struct flat {
    struct ckpt_catalog *cat;
    const struct ckpt_type *type;
    bool tied;
    CKPT_VEC(struct unit) unit;
    CKPT_VEC(struct param) param; /* in the order of registration */
};

static void flat_release(struct flat *f)
{
    for (size_t i = 0; i < f->param.len; i++)
        free(f->param.ptr[i].name);
    ckpt_vec_release(&f->param);
    ckpt_vec_release(&f->unit);
}

/* ---- which modules ---- */

/* Do the elements of each piece lie one after the other, as torch saves them? */
static bool is_dense(const struct ckpt_tensor *t)
{
    for (size_t i = 0; i < t->npiece; i++)
        for (uint32_t k = 0; k < t->piece[i].naxis; k++) {
            const struct ckpt_axis *a = &t->piece[i].axis[k];
            if (a->n > 1 && (a->dst != 1 || a->src != ckpt_dtype_size(t->dtype)))
                return false;
        }
    return true;
}

static bool is_flat(const struct ckpt_tensor *t)
{
    const size_t len = strlen(t->name), own = strlen(flat_name);

    return t->rank == 1 && ckpt_has_suffix(t->name, flat_name) &&
           (len == own || t->name[len - own - 1] == '.');
}

static int collect_units(struct flat *f, struct ckpt_err *err)
{
    for (size_t i = 0; i < f->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &f->cat->tensors.ptr[i];
        if (is_flat(t) && !is_dense(t))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "'%s': a flat parameter whose elements do not lie one after the other",
                             t->name);
        if (is_flat(t) &&
            ckpt_vec_push(&f->unit, ((struct unit){*t, strlen(t->name) - strlen(flat_name), 0})) <
                0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int fail_unknown(const struct flat *f, const char *model_type, bool has_base,
                        struct ckpt_err *err)
{
    const char *name = f->unit.ptr[0].flat.name;

    if (!model_type || f->type->flat_parameters)
        return ckpt_fail(
            err, CKPT_UNSUPPORTED,
            "'%s' is an FSDP flat parameter (LOCAL_STATE_DICT): how to split it is not "
            "in the checkpoint; give base=DIR with %s, or save with SHARDED_STATE_DICT",
            name,
            has_base ? "the model's weights, which have its shapes"
                     : "a model of the same shapes and its weights");
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s' is an FSDP flat parameter (LOCAL_STATE_DICT): how to split it is not in "
        "the checkpoint, and the order of a '%s' model's parameters is not proven; save "
        "with SHARDED_STATE_DICT",
        name, model_type);
}

/* ---- which parameters ---- */

static int param_cmp(const void *a, const void *b)
{
    const struct param *p = a, *q = b;

    return ckpt_order_cmp(p->order, p->shape->name, q->shape->name);
}

/* Is it a copy of a tied parameter, which the flat one contains once? */
static bool is_tied(const struct flat *f, const char *name)
{
    for (size_t i = 0; i < f->type->ties.n; i++)
        if (f->tied && strcmp(f->type->ties.pair[i].from, name) == 0)
            return true;
    return false;
}

/* The module with the longest name that contains the parameter. */
static uint32_t unit_of(const struct flat *f, const char *name)
{
    uint32_t best = 0;

    for (uint32_t i = 0; i < f->unit.len; i++) {
        const struct unit *u = &f->unit.ptr[i];
        if (strncmp(u->flat.name, name, u->prefix) == 0 && u->prefix >= f->unit.ptr[best].prefix)
            best = i;
    }
    return best;
}

/* The outermost module, which is the whole model; the other names begin with its name. */
static int find_root(struct flat *f, struct ckpt_err *err)
{
    struct unit *u = f->unit.ptr;

    for (size_t i = 1; i < f->unit.len; i++)
        if (u[i].prefix < u[0].prefix) {
            const struct unit root = u[i];
            u[i] = u[0];
            u[0] = root;
        }
    for (size_t i = 1; i < f->unit.len; i++)
        if (u[i].prefix == u[0].prefix || strncmp(u[i].flat.name, u[0].flat.name, u[0].prefix) != 0)
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "flat parameters of two models: '%s' and '%s'; save them one by one",
                             u[0].flat.name, u[i].flat.name);
    return 0;
}

static int collect_params(struct flat *f, const struct ckpt_catalog *base, struct ckpt_err *err)
{
    const struct unit *root = &f->unit.ptr[0];

    for (size_t i = 0; i < base->tensors.len; i++) {
        const struct ckpt_tensor *t = &base->tensors.ptr[i];
        struct param p = {.shape = t, .order = &f->type->order};
        if (is_tied(f, t->name))
            continue;
        if (!(p.name = ckpt_asprintf("%.*s%s", (int)root->prefix, root->flat.name, t->name)))
            return ckpt_nomem(err);
        p.unit = unit_of(f, p.name);
        if (ckpt_vec_push(&f->param, p) < 0) {
            free(p.name);
            return ckpt_nomem(err);
        }
    }
    if (f->param.len)
        qsort(f->param.ptr, f->param.len, sizeof *f->param.ptr, param_cmp);
    return 0;
}

/* ---- where ---- */

/* Place all parameters at offsets that are multiples of `align` (0: one after the other). */
static void lay_out(struct flat *f, uint64_t align)
{
    for (size_t i = 0; i < f->unit.len; i++)
        f->unit.ptr[i].used = 0;
    for (size_t i = 0; i < f->param.len; i++) {
        struct param *p = &f->param.ptr[i];
        struct unit *u = &f->unit.ptr[p->unit];
        p->off = align ? (u->used + align - 1) / align * align : u->used;
        u->used = p->off + p->shape->numel;
    }
}

/* Has the unit's tensor the length that follows from the layout? */
static bool fits(const struct unit *u, uint64_t align)
{
    const uint64_t nrank = u->flat.npiece ? u->flat.npiece : 1;

    if (!align)
        return u->used == u->flat.numel;
    return u->flat.numel % nrank == 0 && u->flat.numel >= u->used &&
           u->flat.numel - u->used < nrank;
}

static bool all_fit(const struct flat *f, uint64_t align)
{
    for (size_t i = 0; i < f->unit.len; i++)
        if (!fits(&f->unit.ptr[i], align))
            return false;
    return true;
}

static int fail_sizes(struct flat *f, struct ckpt_err *err)
{
    lay_out(f, 0);
    for (size_t i = 0; i < f->unit.len; i++) {
        const struct unit *u = &f->unit.ptr[i];
        if (!fits(u, 0))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "flat parameter '%s' has %" PRIu64
                             " elements, the base's parameters in it %" PRIu64
                             ": is base another model's?",
                             u->flat.name, u->flat.numel, u->used);
    }
    return ckpt_fail(err, CKPT_CONFLICT, "flat parameters: no alignment fits all of them");
}

static bool same_layout(struct flat *f, uint64_t a, uint64_t b, uint64_t *off)
{
    bool same = true;

    lay_out(f, a);
    for (size_t i = 0; i < f->param.len; i++)
        off[i] = f->param.ptr[i].off;
    lay_out(f, b);
    for (size_t i = 0; i < f->param.len; i++)
        same &= off[i] == f->param.ptr[i].off;
    return same;
}

/* Find the alignment with which all lengths agree. */
static int find_layout(struct flat *f, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *off = calloc(f->param.len + 1, sizeof *off);
    int found = -1;

    if (!off)
        return ckpt_nomem(err);
    for (int i = 0; i < NALIGNMENT; i++) {
        lay_out(f, alignment[i]);
        if (!all_fit(f, alignment[i]))
            continue;
        if (found >= 0 && !same_layout(f, alignment[found], alignment[i], off))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "flat parameters: alignments of %" PRIu64 " and %" PRIu64
                             " elements both fit; save with SHARDED_STATE_DICT",
                             alignment[found], alignment[i]);
        found = i;
    }
    if (found < 0)
        return fail_sizes(f, err);
    lay_out(f, alignment[found]);
    return 0;
}

/* ---- padding ---- */

static bool is_padding(const void *value, enum ckpt_dtype dtype)
{
    static const double f64 = 42;
    static const float f32 = 42;
    static const uint16_t bf16 = 0x4228, f16 = 0x5140;

    switch (dtype) {
    case CKPT_F64:
        return memcmp(value, &f64, sizeof f64) == 0;
    case CKPT_F32:
        return memcmp(value, &f32, sizeof f32) == 0;
    case CKPT_BF16:
        return memcmp(value, &bf16, sizeof bf16) == 0;
    case CKPT_F16:
        return memcmp(value, &f16, sizeof f16) == 0;
    default:
        return true;
    }
}

static int check_padding(const struct flat *f, const struct unit *u, uint64_t lo, uint64_t hi,
                         struct ckpt_err *err)
{
    const enum ckpt_dtype dtype = (enum ckpt_dtype)u->flat.dtype;
    const size_t size = ckpt_dtype_size(dtype);
    char buf[PADDING_AT_ONCE];

    if (lo == hi)
        return 0;
    if ((hi - lo) * size > sizeof buf)
        return ckpt_fail(err, CKPT_CONFLICT, "flat parameter '%s': %" PRIu64 " elements of padding",
                         u->flat.name, hi - lo);
    if (ckpt_elements_pread(f->cat, &u->flat, &(struct ckpt_reading){0}, buf, lo, hi, err) < 0)
        return ckpt_err_in(err, "the padding of '%s'", u->flat.name);
    for (uint64_t i = 0; i < hi - lo; i++)
        if (!is_padding(buf + i * size, dtype))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "flat parameter '%s': element %" PRIu64
                             " is not padding, as it must be in a model of the base's shapes",
                             u->flat.name, lo + i);
    return 0;
}

/* Check that what lies between the parameters is padding. */
static int check_gaps(struct flat *f, struct ckpt_err *err)
{
    for (size_t i = 0; i < f->unit.len; i++)
        f->unit.ptr[i].used = 0;
    for (size_t i = 0; i < f->param.len; i++) {
        const struct param *p = &f->param.ptr[i];
        struct unit *u = &f->unit.ptr[p->unit];
        if (check_padding(f, u, u->used, p->off, err) < 0)
            return -1;
        u->used = p->off + p->shape->numel;
    }
    for (size_t i = 0; i < f->unit.len; i++)
        if (check_padding(f, &f->unit.ptr[i], f->unit.ptr[i].used, f->unit.ptr[i].flat.numel, err) <
            0)
            return -1;
    return 0;
}

/* ---- the parameters ---- */

static int drop_name(const struct flat *f, const char *name, const char **keep)
{
    const struct unit *root = &f->unit.ptr[0];
    ckpt_cleanup(ckpt_freep) char *whole =
        ckpt_asprintf("%.*s%s", (int)root->prefix, root->flat.name, name);
    const struct ckpt_tensor *t = whole ? ckpt_catalog_find(f->cat, whole) : NULL;

    if (t)
        keep[t - f->cat->tensors.ptr] = NULL;
    return whole ? 0 : -1;
}

/* Leave out the flat tensors, and what has the names of parameters and their tied copies: with
 * use_orig_params each rank stores its own part under them, too. */
static int drop(struct flat *f, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **keep = calloc(f->cat->tensors.len + 1, sizeof *keep);

    if (!keep)
        return ckpt_nomem(err);
    for (size_t i = 0; i < f->cat->tensors.len; i++)
        keep[i] = is_flat(&f->cat->tensors.ptr[i]) ? NULL : f->cat->tensors.ptr[i].name;
    for (size_t i = 0; i < f->param.len; i++)
        if (drop_name(f, f->param.ptr[i].shape->name, keep) < 0)
            return ckpt_nomem(err);
    for (size_t i = 0; i < f->type->ties.n; i++)
        if (drop_name(f, f->type->ties.pair[i].from, keep) < 0)
            return ckpt_nomem(err);
    return ckpt_catalog_select(f->cat, keep, err);
}

typedef CKPT_VEC(struct ckpt_piece_draft) drafts;

/* Place the elements [lo, hi) of the parameter, which begin at byte `src` of the source. */
static int place_run(const struct ckpt_tensor *shape, uint64_t lo, uint64_t hi, uint64_t src,
                     uint32_t source, uint64_t esize, drafts *out)
{
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t stride[CKPT_MAX_RANK];

    ckpt_shape_strides(shape->dim, shape->rank, stride);
    const size_t n = ckpt_axes_clip(shape->dim, stride, shape->rank, lo, hi, span);
    for (size_t i = 0; i < n; i++) {
        struct ckpt_piece_draft *d;
        if (ckpt_vec_add(out, &d) < 0)
            return -1;
        *d = (struct ckpt_piece_draft){.source = source, .naxis = shape->rank};
        for (uint32_t k = 0; k < shape->rank; k++) {
            d->dst += span[i].lo[k] * stride[k];
            d->axis[k] = (struct ckpt_axis){span[i].n[k], stride[k], stride[k] * esize};
        }
        d->src = src + (d->dst - lo) * esize;
    }
    return 0;
}

static int place(const struct flat *f, const struct param *p, drafts *out)
{
    const struct ckpt_tensor *flat = &f->unit.ptr[p->unit].flat;
    const uint64_t end = p->off + p->shape->numel, esize = ckpt_dtype_size(flat->dtype);

    for (size_t i = 0; i < flat->npiece; i++) {
        const struct ckpt_piece *q = &flat->piece[i];
        const uint64_t lo = ckpt_max_u64(p->off, q->dst),
                       hi = ckpt_min_u64(end, ckpt_piece_dst_end(q));
        if (lo < hi && place_run(p->shape, lo - p->off, hi - p->off, q->src + (lo - q->dst) * esize,
                                 q->source, esize, out) < 0)
            return -1;
    }
    return 0;
}

static int add_param(struct flat *f, const struct param *p, struct ckpt_err *err)
{
    const enum ckpt_dtype dtype = (enum ckpt_dtype)f->unit.ptr[p->unit].flat.dtype;
    drafts draft = {0};
    size_t index;
    int result = -1;

    if (place(f, p, &draft) < 0)
        (void)ckpt_nomem(err);
    else if (ckpt_catalog_add(f->cat, p->name, dtype, p->shape->dim, p->shape->rank, &index, err) ==
             0)
        result = ckpt_catalog_set_pieces(f->cat, index, draft.ptr, draft.len, err);
    ckpt_vec_release(&draft);
    return result;
}

static int unflatten(struct flat *f, const struct ckpt_catalog *base, struct ckpt_err *err)
{
    if (find_root(f, err) < 0 || collect_params(f, base, err) < 0 || find_layout(f, err) < 0 ||
        check_gaps(f, err) < 0 || drop(f, err) < 0)
        return -1;
    for (size_t i = 0; i < f->param.len; i++)
        if (add_param(f, &f->param.ptr[i], err) < 0)
            return ckpt_err_in(err, "'%s'", f->param.ptr[i].name);
    return 0;
}

int ckpt_unflatten(struct ckpt_catalog *cat, const struct ckpt_types *types,
                   const struct ckpt_base *base, const json_t *config, struct ckpt_err *err)
{
    const char *model_type = ckpt_json_str(config, "model_type");
    ckpt_cleanup(flat_release) struct flat f = {.cat = cat,
                                                .type = ckpt_types_find(types, model_type)};

    f.tied = ckpt_json_bool(config, "tie_word_embeddings", false);

    if (collect_units(&f, err) < 0)
        return -1;
    if (f.unit.len == 0)
        return 0;
    return f.type->flat_parameters && base && base->cat ? unflatten(&f, base->cat, err)
                                                        : fail_unknown(&f, model_type, base, err);
}
