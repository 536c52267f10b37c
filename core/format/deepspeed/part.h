/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors made of consecutive parts of flat buffers, which describe the content of DeepSpeed's
 * files before it is put into a catalogue. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/deepspeed/file.h"
#include "tensor/catalog.h"

/* Contiguous elements in a source. */
struct ckpt_ds_extent {
    uint64_t n, off; /* number of elements; offset in bytes */
    uint32_t source; /* index in the catalogue */
};

/* One tensor. Its extents follow one another in its row-major order, or it is one strided extent.
 */
struct ckpt_ds_part {
    const char *name;
    const char *param; /* for a moment, the name of its parameter; else the tensor's name */
    enum ckpt_dtype dtype;
    uint8_t wanted; /* as in struct ckpt_tensor */
    bool strided;   /* one extent, with these strides in bytes */
    uint32_t rank;
    size_t first, n; /* its range in the list of extents */
    uint64_t numel;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t stride[CKPT_MAX_RANK];
};

struct ckpt_ds_parts {
    struct ckpt_arena names;
    CKPT_VEC(struct ckpt_ds_part) part;
    CKPT_VEC(struct ckpt_ds_extent) extent;
    struct ckpt_map by_name;
};

/* Free the lists and names. */
void ckpt_ds_parts_release(struct ckpt_ds_parts *p);

/* Begin a tensor, whose extents are added next. FORMAT: the name is invalid. CONFLICT: there is a
 * tensor with this name. */
int ckpt_ds_parts_add(struct ckpt_ds_parts *p, const char *name, enum ckpt_dtype dtype,
                      const uint64_t *dim, uint32_t rank, struct ckpt_err *err);

/* Add an extent to the last tensor; adjacent extents are joined. */
int ckpt_ds_parts_extend(struct ckpt_ds_parts *p, uint32_t source, uint64_t off, uint64_t n,
                         struct ckpt_err *err);

/* Add a tensor as stored in a file, or as another name of a tensor that was added. */
int ckpt_ds_parts_stored(struct ckpt_ds_parts *p, const char *name,
                         const struct ckpt_torch_tensor *s, uint32_t source, struct ckpt_err *err);
int ckpt_ds_parts_alias(struct ckpt_ds_parts *p, const char *name, size_t of, struct ckpt_err *err);

/* The tensor that was added last. */
static inline struct ckpt_ds_part *ckpt_ds_parts_last(struct ckpt_ds_parts *p)
{
    return &p->part.ptr[p->part.len - 1];
}

/* Find the index of a tensor by its name; CKPT_NONE: it is not there. */
uint32_t ckpt_ds_parts_find(const struct ckpt_ds_parts *p, const char *name);

/* ---- flat buffers ---- */

/* A flat buffer that is stored as several consecutive parts, for example a flat group that is
 * divided over its ranks. */
struct ckpt_ds_stretch {
    uint64_t begin; /* first element, counted in the whole buffer */
    struct ckpt_ds_extent at;
};

struct ckpt_ds_buffer {
    CKPT_VEC(struct ckpt_ds_stretch) stretch;
    uint64_t n; /* number of elements */
    enum ckpt_dtype dtype;
};

/* Free the list of parts. */
void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b);

/* Append a part. CONFLICT: it has another dtype than the parts before. */
int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err);

/* Append elements [at, at + n) of the buffer to the last tensor of p. CONFLICT: the buffer is
 * shorter. */
int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err);

/* ---- pieces ---- */

/* A mapping from the elements of a part to those of a whole tensor: for every tuple 0 <= i[j] <
 * n[j], element local_off + sum i[j] * local[j] of the part is element global_off + sum i[j] *
 * global[j] of the whole. Strides are in elements; on both sides, each is a multiple of the extent
 * of the next. */
struct ckpt_ds_map {
    uint32_t naxis;
    uint64_t n[CKPT_MAX_RANK], local[CKPT_MAX_RANK], global[CKPT_MAX_RANK];
    uint64_t local_off, global_off;
};

typedef CKPT_VEC(struct ckpt_piece_draft) ckpt_ds_drafts;

/* Add to `out` the pieces that the mapping makes of part `i`; m NULL: the part is the whole tensor.
 * UNSUPPORTED: the part is strided and m is not NULL. */
int ckpt_ds_parts_place(const struct ckpt_ds_parts *p, size_t i, const struct ckpt_ds_map *m,
                        ckpt_ds_drafts *out, struct ckpt_err *err);

/* Add part i to the catalogue, under its name. */
int ckpt_ds_parts_catalog(const struct ckpt_ds_parts *p, size_t i, struct ckpt_catalog *cat,
                          struct ckpt_err *err);
