/* SPDX-License-Identifier: Apache-2.0 */
/* Moving all bytes of many items (files or tensors of a view) through a few threads: read, hash,
 * hand on.
 *
 * The items are cut into chunks with ascending tickets. Each thread takes a chunk, reads it, waits
 * for its turn to add it to the item's running hash while it is still warm in the cache, and hands
 * it on. Reading and handing on overlap; only the hash is in order, and XXH3 is several times
 * faster than either. A lower ticket never waits for a higher one. */
#ifndef CKPT_FS_PUMP_H
#define CKPT_FS_PUMP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "items.h"

enum {
    CKPT_PUMP_CHUNK = 1 << 20, /* bytes; a buffer per thread */
    CKPT_PUMP_MARK = 1 << 30,  /* bytes between marks; a multiple of the chunk */
};

/* Where to begin an item: leave it out altogether. */
#define CKPT_PUMP_SKIP UINT64_MAX

struct ckpt_pump {
    struct ckpt_view *view;
    const struct ckpt_items *items;
    unsigned jobs; /* 0: one for each processor that we may use, 2 to 16 */
    bool quiet;    /* no progress bar */
    bool hash;

    /* Per item, or NULL: the byte to begin at, and the hash's state after the bytes before it
     * (NULL: at 0). */
    const uint64_t *start;
    XXH3_state_t *const *state;

    /* All are called from many threads; 0 or -1 with *err filled. `scratch` is CKPT_PUMP_CHUNK
     * bytes of the calling thread. */
    void *ctx;
    int (*sink)(void *ctx, size_t item, const void *buf, size_t len, uint64_t off, void *scratch,
                struct ckpt_err *err);
    /* Bytes [0, off) of the item have been through sink: after every CKPT_PUMP_MARK bytes, and at
     * its end; in order for each item. */
    int (*mark)(void *ctx, size_t item, uint64_t off, const XXH128_hash_t *prefix,
                struct ckpt_err *err);
};

/* Run to the end, or to the first failure. *ret_seconds may be NULL. */
int ckpt_pump_run(const struct ckpt_pump *p, double *ret_seconds, struct ckpt_err *err);

/* A hash as xxhsum writes it. */
#define CKPT_HEX 33
const char *ckpt_hash_hex(const XXH128_hash_t *hash, char buf[CKPT_HEX]);

/* The digest of a whole: of the lines "HEX  PATH\n" of all items, ordered by path. */
int ckpt_hash_whole(const struct ckpt_items *items, const XXH128_hash_t *hash, XXH128_hash_t *ret,
                    struct ckpt_err *err);

#endif
