/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of far files and objects that are held or on their way, within one budget of memory.
 * The caller's lock protects all of it. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <xxhash.h>

#include <ckptfs/err.h>

/* Memory is given in units, and touched only as far as it is used: at most 448 MiB. */
enum {
    CKPT_PARTS = 4096,
    CKPT_PARTS_CHAINS = 1024,
    CKPT_PARTS_UNIT = 64 * 1024,
    CKPT_PARTS_UNITS = 7168,
};

/* FREE: it is none. FETCHING: who fetches it may write to its memory. */
enum ckpt_part_state {
    CKPT_PART_FREE,
    CKPT_PART_FETCHING,
    CKPT_PART_READY,
    CKPT_PART_FAILED,
};

/* A part of a file or an object, or a page of a list. */
struct ckpt_part {
    struct ckpt_part *next; /* of its chain, or of those that are free */
    XXH128_hash_t object;   /* zeroes: a list */
    uint64_t off;
    uint32_t len, unit, nunit; /* bytes; where they lie in the memory */
    enum ckpt_part_state state;
    uint32_t pins;     /* threads that wait for it, or copy from it */
    uint64_t tick;     /* of the last use; 0: has been read to its end */
    uint64_t begun_ms; /* when the one request for it was made (ckpt_now_ms); 0: not known */
    bool is_end;       /* of an object: to be kept in the cache when it is first read */
    bool ahead;        /* fetched before a read needed it */
    bool unread;       /* nothing of it was read yet */
    pthread_cond_t done;
    enum ckpt_code code; /* FAILED; and `text` says why. OK: it may be asked for again */
    char *text;          /* of a list: where it continues. NULL: no memory */
};

struct ckpt_parts {
    char *memory;   /* the caller's: nunit units */
    uint32_t nunit; /* at most CKPT_PARTS_UNITS */
    uint32_t used;  /* so many units, the first ones, were used at some time */
    uint64_t tick;
    pthread_cond_t freed; /* signalled when there may be room again */
    struct ckpt_part part[CKPT_PARTS];
    struct ckpt_part *chain[CKPT_PARTS_CHAINS]; /* parts by their objects */
    struct ckpt_part *free;
    bool taken[CKPT_PARTS_UNITS];
};

/* All parts are free, in a memory of so many units. Again after a fork, in the child. */
void ckpt_parts_init(struct ckpt_parts *p, uint32_t nunit);
void ckpt_parts_release(struct ckpt_parts *p);

/* A new part, which is FETCHING, in the place of those that have been read to their ends, then of
 * the one that was read least lately, then of the unread one that was asked for last. NULL: the
 * others are in use. A part to prefetch, which no read needs yet, takes only the place of the first
 * two. */
struct ckpt_part *ckpt_parts_add(struct ckpt_parts *p, XXH128_hash_t object, uint64_t off,
                                 uint32_t len, bool prefetch);
void ckpt_parts_free(struct ckpt_parts *p, struct ckpt_part *part);

/* The part that has byte `off`. NULL: there is none, and *end (if end is not NULL) is where the
 * next part that is held begins, at most what it was. */
struct ckpt_part *ckpt_parts_find(struct ckpt_parts *p, XXH128_hash_t object, uint64_t off,
                                  uint64_t *end);

/* Where its bytes are in the memory. */
static inline char *ckpt_part_bytes(const struct ckpt_parts *p, const struct ckpt_part *part)
{
    return p->memory + (uint64_t)part->unit * CKPT_PARTS_UNIT;
}
