/* SPDX-License-Identifier: Apache-2.0 */
/* A stack of buffers. */
#include "mount/buffers.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096 };

/* A buffer's size is that of the largest request, so that any serves. */
static struct ckptfs_buffer *buffer_new(const struct ckptfs_buffers *b, size_t size)
{
    struct ckptfs_buffer *n = calloc(1, sizeof *n);

    if (!n)
        return NULL;
    n->size = size < CKPTFS_MAX_READ ? CKPTFS_MAX_READ : size;
    if (posix_memalign(&n->mem, PAGE, n->size) != 0) {
        free(n);
        return NULL;
    }
    if (b->constant)
        memset(n->mem, 0x5a, n->size);
    return n;
}

static void buffer_free(struct ckptfs_buffer *n)
{
    free(n->mem);
    free(n);
}

struct ckptfs_buffer *ckptfs_buffer_get(struct ckptfs_buffers *b, size_t size)
{
    struct ckptfs_buffer *n;

    (void)pthread_mutex_lock(&b->lock);
    if ((n = b->free))
        b->free = n->next;
    (void)pthread_mutex_unlock(&b->lock);
    if (n && n->size >= size)
        return n;
    if (n)
        buffer_free(n);
    return buffer_new(b, size);
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
        buffer_free(n);
    }
}
