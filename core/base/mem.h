/* SPDX-License-Identifier: Apache-2.0 */
/* Ownership helpers (cleanup, steal) and the arena, which frees many small things at once. */
#pragma once

#include <stddef.h>
#include <stdlib.h>

/* An owning local: `ckpt_cleanup(ckpt_freep) char *s = NULL;`. fn takes a pointer to the variable.
 */
#define ckpt_cleanup(fn) __attribute__((cleanup(fn), unused))

/* The value of an owning local, which gives it up. */
#define ckpt_steal(pp)                                                                             \
    __extension__({                                                                                \
        __typeof__(*(pp)) stolen_ = *(pp);                                                         \
        *(pp) = NULL;                                                                              \
        stolen_;                                                                                   \
    })

/* For ckpt_cleanup: the function `free_`p, which gives up what the variable points to, by `free_`,
 * and clears the variable. */
#define CKPT_CLEANUP_BY(free_, type)                                                               \
    static inline void free_##p(type **variable)                                                   \
    {                                                                                              \
        free_(*variable);                                                                          \
        *variable = NULL;                                                                          \
    }

/* free() for ckpt_cleanup; p is the address of a pointer. Preserves errno. */
void ckpt_freep(void *p);

/* Close the descriptor in *fd unless it is negative. Preserves errno. */
void ckpt_closep(int *fd);

/* Memory that lives as long as the arena. Not safe from several threads. An all-zero struct is an
 * empty arena. */
struct ckpt_arena {
    struct ckpt_arena_block *head;
    size_t left; /* free bytes in head */
    size_t total;
};

/* Free all memory of the arena, which is empty afterwards. */
void ckpt_arena_release(struct ckpt_arena *a);

/* Uninitialised memory aligned for any type, or NULL. */
void *ckpt_arena_alloc(struct ckpt_arena *a, size_t len);

/* A copy of len bytes, aligned likewise, or NULL: no memory. */
void *ckpt_arena_dup(struct ckpt_arena *a, const void *ptr, size_t len);

/* A NUL-terminated copy of s[0..len), or NULL. */
char *ckpt_arena_strndup(struct ckpt_arena *a, const char *s, size_t len);
char *ckpt_arena_strdup(struct ckpt_arena *a, const char *s);
