/* SPDX-License-Identifier: Apache-2.0 */
/* Reading, hashing and passing on all bytes of many items (files or tensors of a view) with a few
 * threads.
 *
 * The items are cut into chunks with ascending tickets. A thread takes a chunk, reads it, passes it
 * to the sink, and leaves it in its buffer. Reads and sinks run in parallel; only the items' hashes
 * are computed in order, by one thread at a time: whoever sees that the next chunk is there adds it
 * and those behind it. So no thread waits for its turn while there is a buffer to read into; a
 * thread that is woken costs more than the hash of a chunk. A lower ticket never waits for a higher
 * one, so there is no deadlock. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>
#include <xxhash.h>

#include <ckptfs/ckptfs.h>

#include "tool/items.h"

enum {
    CKPT_PUMP_CHUNK = 1 << 20, /* size in bytes; there are two such buffers more than threads */
    CKPT_PUMP_MARK = 1 << 30,  /* bytes between two calls of mark; a multiple of the chunk */
};

/* A value of struct ckpt_item.start that leaves the item out. */
#define CKPT_PUMP_SKIP UINT64_MAX

struct ckpt_pump {
    struct ckpt_view *view;
    struct ckpt_items *items;
    unsigned jobs; /* threads; 0: one for each available processor, from 4 to 16 */
    bool quiet;    /* no progress bar */
    bool hash;     /* compute the items' hashes */

    /* Callbacks, which are called from many threads and return 0, or -1 with *err filled. `scratch`
     * is a buffer of CKPT_PUMP_CHUNK bytes that belongs to the calling thread. */
    void *ctx;
    int (*sink)(void *ctx, size_t item, const void *buf, size_t len, uint64_t off, void *scratch,
                struct ckpt_err *err);
    /* All bytes [0, off) of the item have passed through sink, and are in its hash. Called after
     * every CKPT_PUMP_MARK bytes and at the end of the item, in order for each item. NULL: nobody
     * needs to know. */
    int (*mark)(void *ctx, size_t item, uint64_t off, struct ckpt_err *err);
};

/* Run to the end, or to the first failure. *ret_seconds may be NULL. */
int ckpt_pump_run(const struct ckpt_pump *p, double *ret_seconds, struct ckpt_err *err);

/* The number of threads where `given` are asked for (0: the default above). */
unsigned ckpt_pump_jobs(unsigned given);

/* How many bytes at the beginning of a and b are equal. */
size_t ckpt_same_bytes(const void *a, const void *b, size_t len);

/* A hash in the notation of xxhsum. */
#define CKPT_HEX 33
const char *ckpt_hash_hex(const XXH128_hash_t *hash, char buf[CKPT_HEX]);
bool ckpt_hash_of_hex(const char *hex, XXH128_hash_t *ret);

/* A new list of {"name", "bytes", "xxh3"}; NULL: no memory. */
json_t *ckpt_hash_list(const struct ckpt_items *items);

/* The digest of a set of items: the hash of the lines "HEX  PATH\n" of all items, sorted by path.
 */
int ckpt_hash_whole(const struct ckpt_items *items, XXH128_hash_t *ret, struct ckpt_err *err);
