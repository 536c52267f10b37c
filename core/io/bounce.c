/* SPDX-License-Identifier: Apache-2.0 */
/* Allocating the buffer. */
#include "io/bounce.h"

#include <stdlib.h>

int ckpt_bounce_init(struct ckpt_bounce *b, size_t len, struct ckpt_err *err)
{
    void *buf = NULL;

    *b = (struct ckpt_bounce){0};
    len -= len % CKPT_BOUNCE_ALIGN;
    if (len && posix_memalign(&buf, CKPT_BOUNCE_ALIGN, len) != 0)
        return ckpt_nomem(err);
    b->buf = buf;
    b->len = len;
    return 0;
}

void ckpt_bounce_release(struct ckpt_bounce *b)
{
    free(b->buf);
    *b = (struct ckpt_bounce){0};
}
