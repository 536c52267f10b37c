/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors as bytes of an older version and changes, one after the other, as sources of the newest
 * bytes. Nothing is patched on disk.
 *
 * A change is compressed by zstd. XOR: as many bytes as the tensor has, which are combined with
 * those of the version before. OVERWRITE (all numbers little-endian): a uint32_t n, n positions of
 * bytes, each a uint32_t, ascending, and then n bytes, one for each position. (slime's
 * disk_delta.py, which also writes the names of the checksums; SkyRL writes XOR.)
 *
 * The first read of a tensor folds its changes into one buffer, which is kept in a cache that the
 * sources of one store share. A tensor that is longer than CKPT_DELTA_WHOLE is folded in parts, one
 * after the other; after its last part has been checked once, and from where the last read ended.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/source.h"

/* A longer tensor is folded in parts. */
#define CKPT_DELTA_WHOLE (256ULL << 20)

/* Checksums of a tensor's bytes, as hexadecimal digits: XXH3 of 128 bits, and Adler-32. */
enum ckpt_delta_sum { CKPT_DELTA_UNCHECKED, CKPT_DELTA_XXH3, CKPT_DELTA_ADLER32 };

/* The kind of that name ("xxh3-128", "adler32"); UNCHECKED for one that is not known. */
enum ckpt_delta_sum ckpt_delta_sum_find(const char *name);

/* A change of one tensor. */
struct ckpt_delta {
    struct ckpt_source *of; /* where the compressed bytes are; referenced */
    uint64_t off, len;
    bool overwrite;
    enum ckpt_delta_sum sum;      /* of the tensor's bytes after the change */
    const char *digits;           /* borrowed, as is what follows */
    const char *tensor, *version; /* for messages */
};

/* The cache that several sources share; each of them counts a reference. */
struct ckpt_delta_store;
int ckpt_delta_store_new(struct ckpt_delta_store **ret, struct ckpt_err *err);
void ckpt_delta_store_unref(struct ckpt_delta_store *store);

/* The `size` bytes at `off` of `base` after n changes, which are copied, oldest first. `base` and
 * the changes' sources are referenced. Reads fail with FORMAT if a change is damaged, or the bytes
 * after it have another checksum. */
int ckpt_source_delta_new(struct ckpt_delta_store *store, struct ckpt_source *base, uint64_t off,
                          uint64_t size, const struct ckpt_delta *delta, size_t n,
                          struct ckpt_source **ret, struct ckpt_err *err);

/* `next` is likely to be read after s; both are of one store. A thread that would wait for s folds
 * it meanwhile. Neither is referenced: they are freed together. */
void ckpt_source_delta_next(struct ckpt_source *s, struct ckpt_source *next);

/* The change that makes tensor b of tensor a, which has as many bytes (ckpt_view_change). */
struct ckpt_change;
struct ckpt_reading;
struct ckpt_tensor;
int ckpt_delta_make(const struct ckpt_tensor *a, struct ckpt_reading *of_a,
                    const struct ckpt_tensor *b, struct ckpt_reading *of_b, bool overwrite,
                    struct ckpt_change *ret, struct ckpt_err *err);
