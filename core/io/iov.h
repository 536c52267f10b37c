/* SPDX-License-Identifier: Apache-2.0 */
/* Scattered memory that is filled from front to back. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "base/ckd.h"

static inline uint64_t ckpt_iov_len(const struct iovec *iov, int n)
{
    uint64_t len = 0;

    for (int i = 0; i < n; i++)
        len += iov[i].iov_len;
    return len;
}

/* The position of the next byte: `at` in *iov. */
struct ckpt_iov_cursor {
    const struct iovec *iov;
    size_t at;
};

/* Copy len bytes there and go on behind them; from == NULL: leave them out. */
static inline void ckpt_iov_put(struct ckpt_iov_cursor *c, const unsigned char *from, size_t len)
{
    while (len > 0) {
        const size_t n = (size_t)ckpt_min_u64(len, c->iov->iov_len - c->at);
        if (from) {
            memcpy((char *)c->iov->iov_base + c->at, from, n);
            from += n;
        }
        len -= n;
        c->at += n;
        if (c->at == c->iov->iov_len) {
            c->iov++;
            c->at = 0;
        }
    }
}
