/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for replies. The buffer that was given back last is handed out next, whichever worker
 * asks: a sequential reader then keeps one or two of them in the processor's cache, not one per
 * worker. */
#ifndef CKPT_FS_BUFFERS_H
#define CKPT_FS_BUFFERS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

/* Bytes of the largest read request that we agree to. */
enum { CKPTFS_MAX_READ = 1 << 20 };

struct ckptfs_buffer {
    struct ckptfs_buffer *next;
    void *mem; /* page-aligned, so that preads can land in it */
    size_t size;
};

/* As many buffers as were ever in use at once; none is freed before the end. All zero is an empty
 * pool but for the lock. */
struct ckptfs_buffers {
    pthread_mutex_t lock; /* innermost */
    struct ckptfs_buffer *free;
    bool constant; /* fill new ones with one byte: for -o null */
};

/* A buffer of at least `size` bytes; NULL: no memory. */
struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b, size_t size);
void ckptfs_buffer_put(struct ckptfs_buffers *b, struct ckptfs_buffer *buffer);

/* Free all. None may be in use. */
void ckptfs_buffers_release(struct ckptfs_buffers *b);

#endif
