/* SPDX-License-Identifier: Apache-2.0 */
/* Reading what is far: parts are fetched, many at once, into a memory from which readers copy. What
 * was fetched is kept there within a budget, so that no byte is fetched twice while it is held.
 *
 * Who fetches is a table of functions: a bucket's client (io/bucket/client.h) asks a helper
 * process, files of a network's filesystem (files.h) are read by threads. Safe from many threads.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include <xxhash.h>

#include "base/err.h"
#include "io/dir.h"
#include "io/far/parts.h"

/* The largest part. A request waits for a round trip before its bytes flow: of half the size, more
 * of the time is waiting; with twice as large ones a reader of one tensor waits for what it does
 * not read. */
enum { CKPT_FAR_BLOCK = 8 << 20 };

/* Bytes of an object's beginning or end that are fetched when some of them are read: headers and
 * tables of contents lie there, and most fit. It takes about as long as the round trip. */
enum { CKPT_FAR_END = 64 * 1024 };

struct ckpt_far;

/* A file or an object. */
struct ckpt_far_object {
    XXH128_hash_t name; /* of these bytes: what was changed has another one. Not zero */
    uint64_t size;
    const void *what;    /* for the functions below */
    uint32_t timeout_ms; /* of a request without an answer; 0: answers always come */
};

/* All functions are called with the lock held. */
struct ckpt_far_ops {
    /* Make ready for requests: 0; -1 and *err: there will be no more answers. */
    int (*begin)(struct ckpt_far *f, struct ckpt_err *err);
    /* Begin to fetch a new part; ckpt_far_answer follows, from any thread. Else the part has been
     * freed: -1 and *err, or 1: not now. */
    int (*ask)(struct ckpt_far *f, struct ckpt_part *part, const struct ckpt_far_object *o,
               struct ckpt_err *err);
    /* Get bytes from a cache, and keep those of a part there; both without the lock. NULL: there is
     * none. */
    bool (*recall)(struct ckpt_far *f, XXH128_hash_t object, uint64_t off, void *buf, size_t len);
    void (*keep)(struct ckpt_far *f, const struct ckpt_part *part);
    /* Bytes at an object's beginning or end that are fetched when some of them are read; bytes
     * around what looks like an item of many. 0: only what is asked for. */
    uint32_t end, around;
    /* Parts begin and end at multiples of it, or at the end of the object. */
    uint32_t align;
    /* A large read that is waited for is cut into parts of at least so many bytes, so that several
     * are fetched at the same time. */
    uint32_t least;
    uint32_t block; /* the largest part */
};

/* Whoever fetches embeds this first. */
struct ckpt_far {
    const struct ckpt_far_ops *ops;
    pthread_mutex_t lock;
    pid_t owner; /* the process whose parts these are */
    bool dead;   /* no answers come any more: `begin` says why */
    /* ckpt_now_ms: when the last part came or failed; when the latest one of those was begun that
     * have come. */
    uint64_t answered_ms, latest_ms;
    struct ckpt_parts parts;
};

/* Fill iov[0..n) from `off` on. 0 or -1; 1: bytes are missing (CKPT_READ_CACHED), or there is no
 * room for them now (CKPT_READ_PREFETCH). */
int ckpt_far_read(struct ckpt_far *f, const struct ckpt_far_object *o, const struct iovec *iov,
                  int n, uint64_t off, enum ckpt_read_how how, struct ckpt_err *err);

/* Is each of these bytes held, or on its way? */
bool ckpt_far_has_all(struct ckpt_far *f, const struct ckpt_far_object *o, uint64_t off,
                      uint64_t end);

/* ---- for those who fetch; with the lock held ---- */

/* The part has arrived. */
void ckpt_far_arrived(struct ckpt_far *f, struct ckpt_part *part);
/* The part will not come, and the text (copied) says why. With the code CKPT_OK it is asked for
 * again. */
void ckpt_far_failed(struct ckpt_far *f, struct ckpt_part *part, enum ckpt_code code,
                     const char *text);
/* No part that is on its way will come. */
void ckpt_far_all_failed(struct ckpt_far *f, enum ckpt_code code, const char *text);

/* Wait until the part, which the caller has pinned, is fetched; 1: it must be asked for again.
 * TIMEOUT: it has not come for timeout_ms (0: no matter how long), and no other part either, or one
 * that was begun so much later. Who fetches it may still write to its memory. */
int ckpt_far_wait(struct ckpt_far *f, struct ckpt_part *part, uint32_t timeout_ms,
                  struct ckpt_err *err);
/* Wait until there may be room for a part. TIMEOUT: no part has come since begin_ms (ckpt_now_ms),
 * for timeout_ms (0: no matter how long). */
int ckpt_far_wait_for_room(struct ckpt_far *f, uint64_t begin_ms, uint32_t timeout_ms,
                           struct ckpt_err *err);
