/* SPDX-License-Identifier: Apache-2.0 */
/* Reading bytes of a tensor: whole elements, and parts of the first and the last element. */
#include "tensor/read.h"

#include <assert.h>
#include <string.h>

#include "base/ckd.h"

/* A range within one element. */
static int read_part(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                     struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                     struct ckpt_err *err)
{
    unsigned char element[16];
    const size_t esize = ckpt_dtype_size(t->dtype);

    if (ckpt_elements_pread(cat, t, rd, element, off / esize, off / esize + 1, err) < 0)
        return -1;
    memcpy(buf, element + off % esize, len);
    return 0;
}

int ckpt_tensor_pread(const struct ckpt_catalog *cat, const struct ckpt_tensor *t,
                      struct ckpt_reading *rd, void *buf, size_t len, uint64_t off,
                      struct ckpt_err *err)
{
    size_t esize = ckpt_dtype_size(t->dtype);
    unsigned char *at = buf;

    assert(ckpt_range_ok(off, len, ckpt_tensor_nbytes(t)));
    if (rd && rd->stats) {
        atomic_fetch_add_explicit(&rd->stats->requests, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&rd->stats->bytes, len, memory_order_relaxed);
    }
    if (off % esize && len) {
        size_t n = (size_t)ckpt_min_u64(len, esize - off % esize);
        if (read_part(cat, t, rd, at, n, off, err) < 0)
            return -1;
        at += n;
        off += n;
        len -= n;
    }
    if (ckpt_elements_pread(cat, t, rd, at, off / esize, off / esize + len / esize, err) < 0)
        return -1;
    if (len % esize == 0)
        return 0;
    at += len - len % esize;
    return read_part(cat, t, rd, at, len % esize, off + len - len % esize, err);
}
