/* SPDX-License-Identifier: Apache-2.0 */
/* O_DIRECT: aligned reads around what is asked for. */
#include "io/direct.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/ckd.h"
#include "io/iov.h"

enum {
    USUAL = 4096,      /* alignment, where the kernel does not say */
    WORTH = 64 * 1024, /* least that is read straight to its place: around it go two small reads */
};

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

static uint32_t alignment_of(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx st;

    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 &&
        (st.stx_mask & STATX_DIOALIGN) != 0) {
        const uint32_t a = st.stx_dio_mem_align > st.stx_dio_offset_align ? st.stx_dio_mem_align
                                                                          : st.stx_dio_offset_align;
        const bool good =
            st.stx_dio_offset_align > 0 && a <= CKPT_BOUNCE_ALIGN && (a & (a - 1)) == 0;
        return good ? (uint32_t)ckpt_max_u64(a, USUAL) : 0;
    }
#endif
    return USUAL;
}

uint32_t ckpt_direct_begin(int fd)
{
    const uint32_t align = alignment_of(fd);
    const int flags = fcntl(fd, F_GETFL);

    if (align == 0 || flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) < 0)
        return 0;
    return align;
}

/* Bytes [lo, lo+need) into buf; len, a multiple of the alignment, may go beyond the file's end. One
 * call, not base/fdio.h's loop, which would go on behind the file's last bytes at an offset that is
 * not aligned. */
static bool read_aligned(int fd, unsigned char *buf, size_t len, size_t need, uint64_t lo)
{
    ssize_t got;

    do
        got = pread(fd, buf, len, (off_t)lo);
    while (got < 0 && errno == EINTR);
    return got >= 0 && (size_t)got >= need;
}

/* Bytes from the next one on that lie one behind the other. */
static size_t run_of(const struct ckpt_iov_cursor *c, const struct iovec *last)
{
    size_t len = c->iov->iov_len - c->at;

    for (const struct iovec *v = c->iov;
         v < last && (char *)v->iov_base + v->iov_len == (char *)v[1].iov_base; v++)
        len += v[1].iov_len;
    return len;
}

/* How much can be read straight to its place: whole blocks of the file, where memory is aligned as
 * the file is. They begin after *ret_skip bytes. 0: nothing. */
static size_t straight(const struct ckpt_iov_cursor *c, const struct iovec *last, uint64_t off,
                       uint32_t align, size_t *ret_skip)
{
    const size_t skip = (size_t)((align - off % align) % align), len = run_of(c, last);

    *ret_skip = skip;
    if (len < skip + WORTH || ((uintptr_t)c->iov->iov_base + c->at + skip) % align != 0)
        return 0;
    return (len - skip) / align * align;
}

bool ckpt_direct_read(int fd, uint32_t align, const struct iovec *iov, int n, uint64_t off,
                      const struct ckpt_bounce *bounce)
{
    struct ckpt_iov_cursor to = {iov, 0};
    const uint64_t end = off + ckpt_iov_len(iov, n);

    while (off < end) {
        size_t skip;
        const size_t blocks = straight(&to, &iov[n - 1], off, align, &skip);
        if (blocks && skip == 0) {
            unsigned char *place = (unsigned char *)to.iov->iov_base + to.at;
            if (!read_aligned(fd, place, blocks, blocks, off))
                return false;
            ckpt_iov_put(&to, NULL, blocks);
            off += blocks;
            continue;
        }
        const uint64_t lo = off / align * align, stop = blocks ? off + skip : end;
        const uint64_t hi = ckpt_min_u64(stop, lo + bounce->len / align * align);
        const size_t len = (size_t)((hi - lo + align - 1) / align * align);
        if (!read_aligned(fd, bounce->buf, len, (size_t)(hi - lo), lo))
            return false;
        ckpt_iov_put(&to, bounce->buf + (off - lo), (size_t)(hi - off));
        off = hi;
    }
    return true;
}
