/* SPDX-License-Identifier: Apache-2.0 */
/* One growing array for every type: `CKPT_VEC(struct foo) foos = {0}; if (ckpt_vec_push(&foos, x) <
 * 0) ...`. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* In place of an index of 32 bits: there is no such item. */
#define CKPT_NONE UINT32_MAX

#define CKPT_VEC(type)                                                                             \
    struct {                                                                                       \
        type *ptr;                                                                                 \
        size_t len, cap;                                                                           \
    }

/* Room for `more` further items of `size` bytes; 0 or -1 (no memory, array unchanged). */
int ckpt_vec_reserve_(void **ptr, size_t *cap, size_t len, size_t more, size_t size);

#define ckpt_vec_reserve(v, more)                                                                  \
    ckpt_vec_reserve_((void **)&(v)->ptr, &(v)->cap, (v)->len, (more), sizeof *(v)->ptr)

/* Append a copy of item; 0 or -1 (no memory). */
#define ckpt_vec_push(v, item)                                                                     \
    (ckpt_vec_reserve((v), 1) < 0 ? -1 : ((v)->ptr[(v)->len++] = (item), 0))

/* Append a zeroed item and point *pp at it; 0 or -1. */
#define ckpt_vec_add(v, pp)                                                                        \
    (ckpt_vec_reserve((v), 1) < 0                                                                  \
         ? -1                                                                                      \
         : (*(pp) = &(v)->ptr[(v)->len++], (void)memset(*(pp), 0, sizeof **(pp)), 0))

/* Give back what is not used. */
void ckpt_vec_shrink_(void **ptr, size_t *cap, size_t len, size_t size);
#define ckpt_vec_shrink(v)                                                                         \
    ckpt_vec_shrink_((void **)&(v)->ptr, &(v)->cap, (v)->len, sizeof *(v)->ptr)

/* For ckpt_cleanup: v is the address of a CKPT_VEC, whose first member is ptr. */
static inline void ckpt_vec_cleanup(void *v) { free(*(void **)v); }

#define ckpt_vec_release(v) (free((v)->ptr), (v)->ptr = NULL, (v)->len = (v)->cap = 0)
