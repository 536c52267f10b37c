/* SPDX-License-Identifier: Apache-2.0 */
/* Zarr arrays of versions 2 and 3, whose chunks are raw, compressed by zstd, or (version 3) shards:
 * chunks that consist of inner chunks and an index of them.
 *
 * A chunk, when it is decoded, is an ordinary row-major array of the chunk's full shape, also at
 * the edges of the array. A chunk that is not stored has the array's fill value everywhere. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include "container/decoded.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

#define CKPT_ZARR2_HEAD ".zarray"
#define CKPT_ZARR3_HEAD "zarr.json"

enum { CKPT_ZARR_MAX_BYTES = 64 * 1024 }; /* of a .zarray or a zarr.json */

struct ckpt_zarr {
    enum ckpt_dtype dtype;
    bool opaque; /* the file says two bytes ("V2"), which is how bfloat16 looks without its name */
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t chunk[CKPT_MAX_RANK]; /* > 0 */
    uint64_t count[CKPT_MAX_RANK]; /* chunks along each dimension */
    uint64_t nbyte;                /* of a chunk when it is decoded */

    char separator; /* of the numbers in a chunk's name */
    bool prefixed;  /* names of chunks begin with "c" */

    bool zstd;                     /* chunks, of shards inner chunks, are compressed */
    bool sharded;                  /* chunks consist of inner chunks */
    bool index_first;              /* the index is at the beginning of a shard, not at its end */
    bool index_checked;            /* a CRC-32C follows it */
    uint64_t inner[CKPT_MAX_RANK]; /* shape of an inner chunk, which divides that of a chunk */
    uint64_t ninner;               /* inner chunks of a chunk */
    uint64_t inner_nbyte;          /* of an inner chunk when it is decoded */

    unsigned char fill[8]; /* the fill value, an element */
};

/* Parse the text of a .zarray, and of a zarr.json. UNSUPPORTED names a compressor, filter, codec,
 * order or dtype that is not read. */
int ckpt_zarr_parse(const char *text, size_t len, struct ckpt_zarr *ret, struct ckpt_err *err);
int ckpt_zarr3_parse(const char *text, size_t len, struct ckpt_zarr *ret, struct ckpt_err *err);

/* ---- the parts that the descriptions of both versions have in common ---- */

/* Parse a list of sizes, each at least `least`. */
int ckpt_zarr_sizes(const json_t *j, const char *key, uint64_t least, uint64_t *ret,
                    uint32_t *ret_rank, struct ckpt_err *err);

/* Compute counts and bytes, when dtype, shape and chunk are known. */
int ckpt_zarr_measure(struct ckpt_zarr *z, uint32_t chunk_rank, struct ckpt_err *err);

/* Parse the fill value; null is zero. */
int ckpt_zarr_parse_fill(const json_t *value, struct ckpt_zarr *z, struct ckpt_err *err);

/* ---- chunks ---- */

/* Append the name of a chunk: "0.3", "c/0/3"; "0" and "c" for an array without dimensions. */
void ckpt_zarr_chunk_name(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_str *out);

/* The part of the array that the chunk holds. */
void ckpt_zarr_chunk_box(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_box *ret);

/* The next index in row-major order; false: that was the last. Zeros begin, if no count is 0. */
bool ckpt_zarr_next(const struct ckpt_zarr *z, uint64_t *index);

/* The bytes of a chunk as they are stored. */
struct ckpt_zarr_stored {
    struct ckpt_source *source;
    uint64_t off, len;
};

/* Elements of the array, and where they lie when they are decoded. */
struct ckpt_zarr_part {
    struct ckpt_box box;
    struct ckpt_source *source; /* NULL: all of them are the fill value */
    struct ckpt_source *file;   /* which has the stored bytes: `source`, or that it is made from */
    uint64_t off;               /* in the source */
    uint64_t stride[CKPT_MAX_RANK]; /* in bytes */
};

/* Gets a part, and references its source and its file if it keeps it. */
typedef int ckpt_zarr_part_fn(void *ctx, const struct ckpt_zarr_part *part, struct ckpt_err *err);

/* Call add(ctx, part, err) for each part of a stored chunk: one, or one for each inner chunk, for
 * which the shard's index is read. No chunk is decoded before it is read: then it is decoded as a
 * whole, and kept in a place that many chunks share. Safe from many threads. */
int ckpt_zarr_chunk_parts(const struct ckpt_zarr *z, const uint64_t *index,
                          const struct ckpt_zarr_stored *at, struct ckpt_decoded *decoded,
                          ckpt_zarr_part_fn *add, void *ctx, struct ckpt_err *err);
