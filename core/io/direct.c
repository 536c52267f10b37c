/* SPDX-License-Identifier: Apache-2.0 */
/* O_DIRECT: aligned reads around what is asked for. */
#include "io/direct.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/mem.h"

enum {
    CHUNK = 1 << 20, /* read at once */
    USUAL = 4096,    /* alignment, where the kernel does not say */
    MOST = 64 * 1024,
};

static uint32_t alignment_of(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx st;

    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 &&
        (st.stx_mask & STATX_DIOALIGN) != 0) {
        const uint32_t a = st.stx_dio_mem_align > st.stx_dio_offset_align ? st.stx_dio_mem_align
                                                                          : st.stx_dio_offset_align;
        const bool good = st.stx_dio_offset_align > 0 && a <= MOST && (a & (a - 1)) == 0;
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

/* Bytes [lo, lo+need) into buf; len, a multiple of the alignment, may go beyond the file's end. */
static bool read_aligned(int fd, unsigned char *buf, size_t len, size_t need, uint64_t lo)
{
    ssize_t got;

    do
        got = pread(fd, buf, len, (off_t)lo);
    while (got < 0 && errno == EINTR);
    return got >= 0 && (size_t)got >= need;
}

struct scatter {
    const struct iovec *iov;
    size_t at; /* in *iov */
};

static void scatter(struct scatter *s, const unsigned char *from, size_t len)
{
    while (len > 0) {
        const size_t n = (size_t)ckpt_min_u64(len, s->iov->iov_len - s->at);
        memcpy((char *)s->iov->iov_base + s->at, from, n);
        from += n;
        len -= n;
        s->at += n;
        if (s->at == s->iov->iov_len) {
            s->iov++;
            s->at = 0;
        }
    }
}

bool ckpt_direct_read(int fd, uint32_t align, const struct iovec *iov, int n, uint64_t off)
{
    struct scatter to = {iov, 0};
    uint64_t end = off;
    void *memory = NULL;
    bool good = true;

    for (int i = 0; i < n; i++)
        end += iov[i].iov_len;
    const size_t room = (size_t)ckpt_min_u64(CHUNK, end - off) + 2 * (size_t)align;
    if (posix_memalign(&memory, align, room) != 0)
        return false;
    while (off < end && good) {
        const uint64_t lo = off / align * align;
        const uint64_t hi = ckpt_min_u64(end, (lo + CHUNK) / align * align);
        const size_t len = (size_t)((hi - lo + align - 1) / align * align);
        good = read_aligned(fd, memory, len, (size_t)(hi - lo), lo);
        if (good)
            scatter(&to, (unsigned char *)memory + (off - lo), (size_t)(hi - off));
        off = hi;
    }
    free(memory);
    return good;
}
