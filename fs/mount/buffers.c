/* SPDX-License-Identifier: Apache-2.0 */
/* A stack of buffers. */
#include "mount/buffers.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

static struct ckptfs_buffer *buffer_new(const struct ckptfs_buffers *b)
{
    struct ckptfs_buffer *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    if (posix_memalign(&n->mem, PAGE, CKPTFS_MAX_READ) != 0) {
        free(n);
        return NULL;
    }
    if (b->constant)
        memset(n->mem, 0x5a, CKPTFS_MAX_READ);
    return n;
}

struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b)
{
    struct ckptfs_buffer *n;

    (void)pthread_mutex_lock(&b->lock);
    if ((n = b->free))
        b->free = n->next;
    (void)pthread_mutex_unlock(&b->lock);
    return n ? n : buffer_new(b);
}

void ckptfs_buffer_put(struct ckptfs_buffers *b, struct ckptfs_buffer *buffer)
{
    (void)pthread_mutex_lock(&b->lock);
    buffer->next = b->free;
    b->free = buffer;
    (void)pthread_mutex_unlock(&b->lock);
}

void ckptfs_buffers_release(struct ckptfs_buffers *b)
{
    while (b->free) {
        struct ckptfs_buffer *n = b->free;
        b->free = n->next;
        free(n->mem);
        free(n);
    }
}
