/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes in memory as a source. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "io/iov.h"
#include "io/source.h"

struct source_mem {
    struct ckpt_source source;
    char *name;
    unsigned char data[];
};

static int mem_preadv(struct ckpt_source *s, struct iovec *iov, int n, uint64_t off,
                      struct ckpt_err *err)
{
    struct ckpt_iov_cursor to = {iov, 0};

    (void)err;
    ckpt_iov_put(&to, ((struct source_mem *)s)->data + off, ckpt_iov_len(iov, n));
    return 0;
}

static char *mem_name(const struct ckpt_source *s)
{
    return strdup(((const struct source_mem *)s)->name);
}

static void mem_free(struct ckpt_source *s)
{
    free(((struct source_mem *)s)->name);
    free(s);
}

static const struct ckpt_source_ops mem_ops = {
    .preadv = mem_preadv, .name = mem_name, .free = mem_free};

int ckpt_source_mem_new(const char *name, const void *data, size_t len, struct ckpt_source **ret,
                        struct ckpt_err *err)
{
    size_t bytes;
    struct source_mem *m;

    if (ckd_add(&bytes, offsetof(struct source_mem, data), len) || !(m = calloc(1, bytes)))
        return ckpt_nomem(err);
    if (!(m->name = strdup(name))) {
        free(m);
        return ckpt_nomem(err);
    }
    m->source.ops = &mem_ops;
    m->source.size = len;
    atomic_init(&m->source.refs, 1);
    if (len)
        memcpy(m->data, data, len);
    *ret = &m->source;
    return 0;
}
