/* SPDX-License-Identifier: Apache-2.0 */
/* An aligned buffer of one thread, for reads that cannot go directly to their destination. */
#ifndef CKPT_IO_BOUNCE_H
#define CKPT_IO_BOUNCE_H

#include <stddef.h>

#include "base/err.h"

enum { CKPT_BOUNCE_ALIGN = 64 * 1024 };

/* Belongs to one thread at a time. Zeroed: none. */
struct ckpt_bounce {
    unsigned char *buf; /* aligned to CKPT_BOUNCE_ALIGN */
    size_t len;         /* a multiple of it */
};

/* len bytes, rounded down to CKPT_BOUNCE_ALIGN; 0: none. */
int ckpt_bounce_init(struct ckpt_bounce *b, size_t len, struct ckpt_err *err);
void ckpt_bounce_release(struct ckpt_bounce *b);

#endif
