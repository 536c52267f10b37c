/* SPDX-License-Identifier: Apache-2.0 */
/* What the pickle's stack machine and the tree that it makes share. */
#ifndef CKPT_CONTAINER_PICKLE_MACHINE_H
#define CKPT_CONTAINER_PICKLE_MACHINE_H

#include "container/pickle.h"

static inline ckpt_pv ckpt_pv_make(enum ckpt_pv_kind kind, uint64_t id)
{
    return id << 4 | (uint64_t)kind;
}

/* Slots of an object of this row of the table. */
static inline unsigned ckpt_pickle_nslot(const struct ckpt_pickle *p, int rule)
{
    const char *const *slot = rule >= 0 ? p->rules->global[rule].slot : NULL;
    unsigned n = 0;

    while (slot && slot[n])
        n++;
    return slot ? n : 2;
}

#endif
