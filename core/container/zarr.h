/* SPDX-License-Identifier: Apache-2.0 */
/* Zarr arrays of version 2 whose chunks are raw: what Megatron wrote until Core 0.15. A chunk file
 * is an ordinary row-major array of the chunk's full shape, also at the edges. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

enum { CKPT_ZARR_MAX_BYTES = 64 * 1024 }; /* of a .zarray */

struct ckpt_zarr {
    enum ckpt_dtype dtype;
    bool opaque; /* the file says two bytes ("V2"), which is how bfloat16 looks without its name */
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t chunk[CKPT_MAX_RANK]; /* > 0 */
    uint64_t count[CKPT_MAX_RANK]; /* chunks along each dimension */
    uint64_t nbyte;                /* of a chunk file */
    char separator;
};

/* Parse the text of a .zarray. UNSUPPORTED names a compressor, filter, order or dtype that is not
 * read. */
int ckpt_zarr_parse(const char *text, size_t len, struct ckpt_zarr *ret, struct ckpt_err *err);

/* Append the name of the chunk's file: "0.3", "0" for an array without dimensions. */
void ckpt_zarr_chunk_name(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_str *out);

/* The part of the array that the chunk holds. */
void ckpt_zarr_chunk_box(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_box *ret);

/* The next index in row-major order; false: that was the last. Zeros begin, if no count is 0. */
bool ckpt_zarr_next(const struct ckpt_zarr *z, uint64_t *index);
