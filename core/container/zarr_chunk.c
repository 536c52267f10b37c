/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a chunk: its bytes, or those of its inner chunks, stored as they are or decoded. */
#include <inttypes.h>
#include <stdlib.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "base/mem.h"
#include "container/zarr.h"
#include "container/zstd.h"
#include "io/cursor.h"

enum { ENTRY = 16, CHECKSUM = 4 }; /* bytes of an index: of an inner chunk, and at its end */

struct walk {
    const struct ckpt_zarr *z;
    const struct ckpt_zarr_stored *at;
    struct ckpt_decoded *decoded;
    ckpt_zarr_part_fn *add;
    void *ctx;
};

/* Add elements that are stored in these bytes, row-major in the shape `whole`, of which the part's
 * box is the beginning. */
static int add_bytes(const struct walk *w, struct ckpt_zarr_part *part,
                     const struct ckpt_zarr_stored *at, const uint64_t *whole, uint64_t nbyte,
                     struct ckpt_err *err)
{
    const struct ckpt_box box = ckpt_box_whole(whole, w->z->rank);
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *decoded = NULL;

    ckpt_box_strides(&box, ckpt_dtype_size(w->z->dtype), part->stride);
    part->source = part->file = at->source;
    part->off = at->off;
    if (w->z->zstd) {
        if (ckpt_source_zstd_of_size(w->decoded, at->source, at->off, at->len, nbyte, &decoded,
                                     err) < 0)
            return -1;
        part->source = decoded;
        part->off = 0;
    } else if (at->len != nbyte) {
        return ckpt_fail(err, CKPT_FORMAT,
                         "a chunk is stored in %" PRIu64 " bytes, by the shape it has %" PRIu64,
                         at->len, nbyte);
    }
    return w->add(w->ctx, part, err);
}

/* ---- shards ---- */

/* Read the index of a shard: pairs of offset and length, malloc'ed. */
static int read_index(const struct walk *w, unsigned char **ret, struct ckpt_err *err)
{
    const struct ckpt_zarr *z = w->z;
    const struct ckpt_zarr_stored *at = w->at;
    uint64_t len;

    if (ckd_mul(&len, z->ninner, (uint64_t)ENTRY) ||
        ckd_add(&len, len, z->index_checked ? (uint64_t)CHECKSUM : 0) || len > at->len)
        return ckpt_fail(err, CKPT_FORMAT,
                         "a shard of %" PRIu64 " bytes is shorter than its index of %" PRIu64
                         " inner chunks",
                         at->len, z->ninner);
    ckpt_cleanup(ckpt_freep) unsigned char *index = malloc((size_t)len + 1);
    if (!index)
        return ckpt_nomem(err);
    if (ckpt_source_pread(at->source, index, (size_t)len,
                          at->off + (z->index_first ? 0 : at->len - len), err) < 0)
        return -1;
    if (z->index_checked) {
        struct ckpt_cursor sum;
        ckpt_cursor_init(&sum, index + len - CHECKSUM, CHECKSUM, 0, "");
        if (ckpt_crc32c(0, index, (size_t)len - CHECKSUM) != ckpt_cursor_le32(&sum))
            return ckpt_fail(err, CKPT_FORMAT,
                             "the checksum (CRC-32C) of a shard's index is wrong: it is damaged");
    }
    *ret = ckpt_steal(&index);
    return 0;
}

/* The part of the array that the inner chunk at `inner`, counted in the shard, holds; false: it
 * lies outside, in the padding at an edge. */
static bool inner_box(const struct ckpt_zarr *z, const struct ckpt_box *chunk,
                      const uint64_t *inner, struct ckpt_box *ret)
{
    ret->rank = z->rank;
    for (uint32_t d = 0; d < z->rank; d++) {
        const uint64_t lo = inner[d] * z->inner[d];
        if (lo >= chunk->n[d])
            return false;
        ret->lo[d] = chunk->lo[d] + lo;
        ret->n[d] = ckpt_min_u64(chunk->n[d] - lo, z->inner[d]);
    }
    return true;
}

static int add_inner(const struct walk *w, const struct ckpt_box *box, uint64_t off, uint64_t len,
                     struct ckpt_err *err)
{
    struct ckpt_zarr_part part = {.box = *box};

    if (off == UINT64_MAX && len == UINT64_MAX)
        return w->add(w->ctx, &part, err);
    if (!ckpt_range_ok(off, len, w->at->len))
        return ckpt_fail(err, CKPT_FORMAT,
                         "an inner chunk should have %" PRIu64 " bytes at %" PRIu64
                         " of a shard of %" PRIu64,
                         len, off, w->at->len);
    const struct ckpt_zarr_stored at = {w->at->source, w->at->off + off, len};
    return add_bytes(w, &part, &at, w->z->inner, w->z->inner_nbyte, err);
}

static int add_shard(const struct walk *w, const struct ckpt_box *chunk, struct ckpt_err *err)
{
    const struct ckpt_zarr *z = w->z;
    ckpt_cleanup(ckpt_freep) unsigned char *index = NULL;
    uint64_t inner[CKPT_MAX_RANK] = {0};
    struct ckpt_cursor entries;

    if (read_index(w, &index, err) < 0)
        return -1;
    ckpt_cursor_init(&entries, index, (size_t)z->ninner * ENTRY, 0, "");
    for (uint64_t i = 0; i < z->ninner; i++) {
        const uint64_t off = ckpt_cursor_le64(&entries), len = ckpt_cursor_le64(&entries);
        struct ckpt_box box;
        if (inner_box(z, chunk, inner, &box) && add_inner(w, &box, off, len, err) < 0)
            return -1;
        for (uint32_t d = z->rank; d-- > 0; inner[d] = 0)
            if (++inner[d] < z->chunk[d] / z->inner[d])
                break;
    }
    return 0;
}

int ckpt_zarr_chunk_parts(const struct ckpt_zarr *z, const uint64_t *index,
                          const struct ckpt_zarr_stored *at, struct ckpt_decoded *decoded,
                          ckpt_zarr_part_fn *add, void *ctx, struct ckpt_err *err)
{
    const struct walk w = {z, at, decoded, add, ctx};
    struct ckpt_zarr_part part;

    ckpt_zarr_chunk_box(z, index, &part.box);
    return z->sharded ? add_shard(&w, &part.box, err)
                      : add_bytes(&w, &part, at, z->chunk, z->nbyte, err);
}
