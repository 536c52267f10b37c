/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a virtual file: clamping the range to the file, and reading its segments. */
#include <assert.h>
#include <string.h>

#include "base/ckd.h"
#include "view/ahead.h"
#include "view/text.h"
#include "view/view.h"

size_t ckpt_segment_at(const struct ckpt_vnode *file, uint64_t off)
{
    size_t lo = 0, hi = file->nsegment;

    while (hi - lo > 1) {
        size_t mid = lo + (hi - lo) / 2;
        if (file->segment[mid].off <= off)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

static int read_source(struct ckpt_source *s, void *buf, size_t len, uint64_t off,
                       struct ckpt_err *err)
{
    if (ckpt_source_pread(s, buf, len, off, err) < 0)
        return -1;
    return ckpt_source_check(s, err);
}

static int read_segment(struct ckpt_reading *rd, const struct ckpt_segment *s, void *buf,
                        size_t len, uint64_t off, struct ckpt_err *err)
{
    assert(ckpt_range_ok(off, len, s->len));
    switch (s->kind) {
    case CKPT_SEGMENT_MEM:
        memcpy(buf, (const char *)s->mem + off, len);
        return 0;
    case CKPT_SEGMENT_TEXT:
        return ckpt_text_pread(s->text, buf, len, s->from + off, err);
    case CKPT_SEGMENT_TENSOR:
        return ckpt_tensor_pread(s->tensor, rd, buf, len, s->from + off, err);
    case CKPT_SEGMENT_SOURCE:
        return read_source(s->source, buf, len, off, err);
    }
    return 0;
}

int ckpt_vfile_pread(struct ckpt_reading *rd, const struct ckpt_vnode *file, void *buf, size_t len,
                     uint64_t off, size_t *ret_len, struct ckpt_err *err)
{
    unsigned char *out = buf;
    uint64_t left = off < file->size ? ckpt_min_u64(len, file->size - off) : 0;

    assert(file->kind == CKPT_NODE_FILE);
    len = (size_t)left;
    if (rd)
        ckpt_ahead_note(rd, file, off, off + left);
    for (size_t i = left ? ckpt_segment_at(file, off) : 0; left; i++) {
        const struct ckpt_segment *s = &file->segment[i];
        size_t n = (size_t)ckpt_min_u64(left, s->off + s->len - off);
        if (n && read_segment(rd, s, out, n, off - s->off, err) < 0)
            return ckpt_err_in(err, "%s", file->name);
        out += n;
        off += n;
        left -= n;
    }
    *ret_len = len;
    return 0;
}
