/* SPDX-License-Identifier: Apache-2.0 */
/* Converting extents of flat buffers to pieces of tensors. */
#include "format/deepspeed/zero.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"

enum { MAX_NAME = 4096 };

void ckpt_ds_parts_release(struct ckpt_ds_parts *p)
{
    ckpt_arena_release(&p->names);
    ckpt_vec_release(&p->part);
    ckpt_vec_release(&p->extent);
    ckpt_map_release(&p->by_name);
}

int ckpt_ds_parts_add(struct ckpt_ds_parts *p, const char *name, enum ckpt_dtype dtype,
                      const uint64_t *dim, uint32_t rank, struct ckpt_err *err)
{
    struct ckpt_ds_part *part;
    uint32_t at;
    char *own;

    if (!*name || strlen(name) > MAX_NAME || !ckpt_utf8_ok(name))
        return ckpt_fail(err, CKPT_FORMAT, "'%.64s' is not a valid name of a tensor", name);
    if (!(own = ckpt_arena_strdup(&p->names, name)) ||
        (at = ckpt_map_add(&p->by_name, own, (uint32_t)p->part.len)) == CKPT_NONE)
        return ckpt_nomem(err);
    if (at != p->part.len)
        return ckpt_fail(err, CKPT_CONFLICT, "tensor '%s' is listed twice", name);
    if (ckpt_vec_add(&p->part, &part) < 0)
        return ckpt_nomem(err);
    part->name = part->param = own;
    part->dtype = dtype;
    part->rank = rank;
    part->first = p->extent.len;
    memcpy(part->dim, dim, rank * sizeof *dim);
    return ckpt_shape_numel(dim, rank, &part->numel)
               ? 0
               : ckpt_fail(err, CKPT_FORMAT, "tensor '%s' is larger than any file", name);
}

int ckpt_ds_parts_extend(struct ckpt_ds_parts *p, uint32_t source, uint64_t off, uint64_t n,
                         struct ckpt_err *err)
{
    struct ckpt_ds_part *part = ckpt_ds_parts_last(p);
    struct ckpt_ds_extent *last = part->n ? &p->extent.ptr[p->extent.len - 1] : NULL;

    if (n == 0)
        return 0;
    if (last && last->source == source &&
        last->off + last->n * ckpt_dtype_size(part->dtype) == off) {
        last->n += n;
        return 0;
    }
    part->n++;
    return ckpt_vec_push(&p->extent,
                         ((struct ckpt_ds_extent){.n = n, .off = off, .source = source})) < 0
               ? ckpt_nomem(err)
               : 0;
}

int ckpt_ds_parts_stored(struct ckpt_ds_parts *p, const char *name,
                         const struct ckpt_torch_tensor *s, uint32_t source, struct ckpt_err *err)
{
    if (ckpt_ds_parts_add(p, name, s->dtype, s->dim, s->rank, err) < 0)
        return -1;
    struct ckpt_ds_part *part = ckpt_ds_parts_last(p);
    part->strided = !s->contiguous;
    memcpy(part->stride, s->stride, s->rank * sizeof *s->stride);
    return ckpt_ds_parts_extend(p, source, s->off, s->numel, err);
}

int ckpt_ds_parts_alias(struct ckpt_ds_parts *p, const char *name, size_t of, struct ckpt_err *err)
{
    const struct ckpt_ds_part owner = p->part.ptr[of];

    if (ckpt_ds_parts_add(p, name, owner.dtype, owner.dim, owner.rank, err) < 0)
        return -1;
    struct ckpt_ds_part *part = ckpt_ds_parts_last(p);
    const char *own = part->name;
    *part = owner;
    part->name = part->param = own;
    return 0;
}

uint32_t ckpt_ds_parts_find(const struct ckpt_ds_parts *p, const char *name)
{
    return ckpt_map_find(&p->by_name, name);
}

/* ---- flat buffers ---- */

void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b) { ckpt_vec_release(&b->stretch); }

int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err)
{
    const struct ckpt_ds_stretch s = {b->n, {.n = n, .off = off, .source = source}};

    if (n == 0)
        return 0;
    if (b->stretch.len && dtype != b->dtype)
        return ckpt_fail(err, CKPT_CONFLICT, "one rank's part is %s, another's %s",
                         ckpt_dtype_name(b->dtype), ckpt_dtype_name(dtype));
    b->dtype = dtype;
    if (ckd_add(&b->n, b->n, n))
        return ckpt_fail(err, CKPT_FORMAT, "a buffer would be larger than any file");
    return ckpt_vec_push(&b->stretch, s) < 0 ? ckpt_nomem(err) : 0;
}

int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err)
{
    if (at > b->n || n > b->n - at)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "it needs elements %" PRIu64 "..%" PRIu64
                         " of a buffer of which the files hold %" PRIu64,
                         at, at + n, b->n);
    size_t i = ckpt_last_at(&b->stretch.ptr->begin, sizeof *b->stretch.ptr, b->stretch.len, at);
    for (; n; i++) {
        const struct ckpt_ds_stretch *s = &b->stretch.ptr[i];
        const uint64_t skip = at - s->begin, len = ckpt_min_u64(n, s->at.n - skip);
        if (ckpt_ds_parts_extend(p, s->at.source, s->at.off + skip * ckpt_dtype_size(b->dtype), len,
                                 err) < 0)
            return -1;
        at += len;
        n -= len;
    }
    return 0;
}

/* ---- pieces ---- */

static int check_length(const struct ckpt_ds_parts *p, const struct ckpt_ds_part *part,
                        struct ckpt_err *err)
{
    uint64_t n = 0;

    for (size_t i = 0; i < part->n; i++)
        n += p->extent.ptr[part->first + i].n;
    if (n == part->numel)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT,
                     "tensor '%s' has %" PRIu64 " elements, the files hold %" PRIu64 " of them",
                     part->name, part->numel, n);
}

int ckpt_ds_parts_place(const struct ckpt_ds_parts *p, size_t i, const struct ckpt_box_pair *pair,
                        const uint64_t *dim, struct ckpt_pieces *out, struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = &p->part.ptr[i];
    const struct ckpt_box box = ckpt_box_whole(part->dim, part->rank);
    const struct ckpt_box_pair whole = {box, box};
    const uint64_t esize = ckpt_dtype_size(part->dtype);
    uint64_t lo = 0, stride[CKPT_MAX_RANK];

    if (part->numel == 0)
        return 0;
    if (check_length(p, part, err) < 0)
        return -1;
    const struct ckpt_ds_extent *e = &p->extent.ptr[part->first]; /* an empty part has none */
    if (part->strided && pair)
        return ckpt_fail(
            err, CKPT_UNSUPPORTED,
            "tensor '%s' is stored with gaps or transposed, so that its parts cannot be located",
            part->name);
    if (part->strided)
        return ckpt_pieces_add(out, dim, &box, e->source, e->off, part->stride, err);
    ckpt_box_strides(&box, esize, stride);
    for (size_t k = 0; k < part->n; lo += e[k].n, k++)
        if (ckpt_pieces_add_part(out, dim, pair ? pair : &whole, part->dim, lo, lo + e[k].n,
                                 e[k].source, e[k].off - lo * esize, stride, err) < 0)
            return -1;
    return 0;
}

int ckpt_ds_parts_catalog(const struct ckpt_ds_parts *p, size_t i, struct ckpt_catalog *cat,
                          struct ckpt_err *err)
{
    const struct ckpt_ds_part *part = &p->part.ptr[i];
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};

    if (ckpt_ds_parts_place(p, i, NULL, part->dim, &pieces, err) < 0 ||
        ckpt_pieces_catalog(&pieces, cat, part->name, part->dtype, part->dim, part->rank, err) < 0)
        return -1;
    cat->tensors.ptr[cat->tensors.len - 1].wanted = part->wanted;
    return 0;
}
