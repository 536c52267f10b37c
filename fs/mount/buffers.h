/* SPDX-License-Identifier: Apache-2.0 */
/* A pool of buffers for replies. The buffer that was returned last is handed out first, to
 * whichever worker asks, so that a sequential reader keeps one or two buffers in the processor's
 * cache instead of one per worker. */
#pragma once

#include <pthread.h>
#include <stdbool.h>

/* Size in bytes of the largest read request that we accept. */
enum { CKPTFS_MAX_READ = 1 << 20 };

struct ckptfs_buffer {
    struct ckptfs_buffer *next;
    void *mem; /* page-aligned, so that preads can land in it */
};

/* The pool grows to the largest number of buffers in use at one time; no buffer is freed before the
 * end. Except for the lock, an all-zero struct is an empty pool. */
struct ckptfs_buffers {
    pthread_mutex_t lock; /* no other lock is taken while it is held */
    struct ckptfs_buffer *free;
    bool constant; /* fill new buffers with one byte, for -o null */
};

/* Take a buffer of CKPTFS_MAX_READ bytes; NULL: out of memory. Return it with ckptfs_buffer_put. */
struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b);
void ckptfs_buffer_put(struct ckptfs_buffers *b, struct ckptfs_buffer *buffer);

/* Free all buffers. None may be in use. */
void ckptfs_buffers_release(struct ckptfs_buffers *b);
