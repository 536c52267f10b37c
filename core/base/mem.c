/* SPDX-License-Identifier: Apache-2.0 */
/* Cleanup functions and the block arena. */
#include "base/mem.h"

#include <errno.h>
#include <stdalign.h>
#include <string.h>
#include <unistd.h>

#include "base/ckd.h"

enum { FIRST_BYTES = 1024, BLOCK_BYTES = 64 * 1024 }; /* blocks grow: there are many small arenas */

struct ckpt_arena_block {
    struct ckpt_arena_block *next;
    size_t size;
    alignas(max_align_t) unsigned char data[];
};

void ckpt_freep(void *p)
{
    int saved = errno;
    void **pp = p;
    free(*pp);
    *pp = NULL;
    errno = saved;
}

void ckpt_closep(int *fd)
{
    int saved = errno;
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
    errno = saved;
}

void ckpt_arena_release(struct ckpt_arena *a)
{
    int saved = errno;
    while (a->head) {
        struct ckpt_arena_block *next = a->head->next;
        free(a->head);
        a->head = next;
    }
    *a = (struct ckpt_arena){0};
    errno = saved;
}

static struct ckpt_arena_block *block_new(struct ckpt_arena *a, size_t size)
{
    struct ckpt_arena_block *b;
    size_t bytes;

    if (ckd_add(&bytes, sizeof *b, size) || !(b = malloc(bytes)))
        return NULL;
    b->size = size;
    a->total += bytes;
    return b;
}

/* Strings need no alignment, and packing them keeps a large catalogue small. */
static void *arena_take(struct ckpt_arena *a, size_t len, size_t align)
{
    struct ckpt_arena_block *b;
    size_t pad = a->left % align;

    if (a->head && a->left >= pad && a->left - pad >= len) {
        unsigned char *end = a->head->data + a->head->size;
        a->left -= pad;
        void *p = end - a->left;
        a->left -= len;
        return p;
    }
    if (len > BLOCK_BYTES / 4) { /* its own block, behind the current one */
        if (!(b = block_new(a, len)))
            return NULL;
        if (a->head) {
            b->next = a->head->next;
            a->head->next = b;
        } else {
            b->next = NULL;
            a->head = b;
            a->left = 0;
        }
        return b->data;
    }
    size_t size = a->head ? 4 * a->head->size : FIRST_BYTES;
    size = ckpt_min_u64(ckpt_max_u64(size, len), BLOCK_BYTES);
    if (!(b = block_new(a, size)))
        return NULL;
    b->next = a->head;
    a->head = b;
    a->left = size - len;
    return b->data;
}

void *ckpt_arena_alloc(struct ckpt_arena *a, size_t len)
{
    size_t rounded;

    if (ckd_add(&rounded, len, alignof(max_align_t) - 1))
        return NULL;
    rounded -= rounded % alignof(max_align_t);
    return arena_take(a, rounded, alignof(max_align_t));
}

void *ckpt_arena_dup(struct ckpt_arena *a, const void *ptr, size_t len)
{
    void *copy = ckpt_arena_alloc(a, len ? len : 1);

    return copy && len ? memcpy(copy, ptr, len) : copy;
}

char *ckpt_arena_strndup(struct ckpt_arena *a, const char *s, size_t len)
{
    size_t bytes;
    char *p;

    if (ckd_add(&bytes, len, (size_t)1) || !(p = arena_take(a, bytes, 1)))
        return NULL;
    memcpy(p, s, len);
    p[len] = '\0';
    return p;
}

char *ckpt_arena_strdup(struct ckpt_arena *a, const char *s)
{
    return ckpt_arena_strndup(a, s, strlen(s));
}
