/* SPDX-License-Identifier: Apache-2.0 */
/* A bounded number of open shard files.
 *
 * A checkpoint may have 10^5 files; descriptors are opened on first use and one not used lately is
 * closed when the budget is spent (by the clock algorithm). A reopened file must still be the one
 * that was registered (device, inode, size, mtime, ctime), or it is STALE. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/dir.h"

struct ckpt_fdpool;

/* `max_open` descriptors (0: what RLIMIT_NOFILE allows, less a reserve, at most 1024). Safe from
 * many threads. Counted. */
int ckpt_fdpool_new(size_t max_open, struct ckpt_fdpool **ret, struct ckpt_err *err);
struct ckpt_fdpool *ckpt_fdpool_ref(struct ckpt_fdpool *pool);
void ckpt_fdpool_unref(struct ckpt_fdpool *pool);

/* One file of the pool; belongs to the source that embeds it, which must drop it before the pool
 * goes. Zero-initialised, but fd is -1. */
struct ckpt_fdslot {
    int fd;        /* -1: not open */
    uint32_t pins; /* users right now; > 0 is never evicted */
    uint32_t at;   /* place in the pool's ring while open */
    bool recent;   /* used since the hand of the clock passed */
};

/* Descriptor of the file, open until ckpt_fdpool_put. Opens `name` below `dir` if need be and
 * checks it against `id`. */
int ckpt_fdpool_get(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot, const struct ckpt_dir *dir,
                    const char *name, const struct ckpt_file_id *id, int *ret_fd,
                    struct ckpt_err *err);
void ckpt_fdpool_put(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot);

/* Give the pool an open descriptor for the slot: *fd becomes -1 if it was taken, else it stays the
 * caller's. */
int ckpt_fdpool_adopt(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot, int *fd,
                      struct ckpt_err *err);

/* Close the file if open. Nobody may hold it. */
void ckpt_fdpool_drop(struct ckpt_fdpool *pool, struct ckpt_fdslot *slot);

/* The number of descriptors that are open now. */
size_t ckpt_fdpool_open_count(struct ckpt_fdpool *pool);
