/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring and rewriting texts that are not kept. */
#include "view/text.h"

#include <assert.h>
#include <string.h>

#include "base/ckd.h"
#include "base/sort.h"
#include "container/safetensors.h"
#include "view/view.h"

int ckpt_text_init(struct ckpt_text *t,
                   void (*entry)(const void *ctx, size_t i, struct ckpt_str *out), const void *ctx,
                   size_t nentry, size_t step, struct ckpt_arena *arena, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str one = {0};

    *t = (struct ckpt_text){.entry = entry, .ctx = ctx, .nentry = nentry, .step = step};
    if (!(t->mark = ckpt_arena_alloc(arena, (nentry / step + 1) * sizeof *t->mark)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < nentry; i++) {
        if (i % step == 0)
            t->mark[i / step] = t->len;
        ckpt_str_clear(&one);
        entry(ctx, i, &one);
        t->len += one.len;
    }
    return one.failed ? ckpt_nomem(err) : 0;
}

void ckpt_st_head_segments(struct ckpt_st_head *head, struct ckpt_segment *ret, uint64_t *ret_len)
{
    static const char spaces[8] = "        ";
    const size_t pad = ckpt_st_header_pad(head->text.len);
    const uint64_t len = head->text.len + pad;

    for (int i = 0; i < 8; i++)
        head->len[i] = (unsigned char)(len >> 8 * i);
    ret[0] = ckpt_segment_mem(head->len, sizeof head->len);
    ret[1] = ckpt_segment_text(&head->text, 0, head->text.len);
    ret[2] = ckpt_segment_mem(spaces, pad);
    ret[1].off = sizeof head->len;
    ret[2].off = sizeof head->len + head->text.len;
    *ret_len = sizeof head->len + len;
}

int ckpt_text_pread(const struct ckpt_text *t, void *buf, size_t len, uint64_t off,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str group = {0};
    unsigned char *out = buf;

    assert(ckpt_range_ok(off, len, t->len));
    const size_t ngroup = (t->nentry + t->step - 1) / t->step;
    for (size_t g = ckpt_last_at(t->mark, sizeof *t->mark, ngroup, off); len; g++) {
        ckpt_str_clear(&group);
        for (size_t i = g * t->step; i < t->nentry && i < (g + 1) * t->step; i++)
            t->entry(t->ctx, i, &group);
        if (group.failed)
            return ckpt_nomem(err);
        size_t skip = (size_t)(off - t->mark[g]);
        size_t n = (size_t)ckpt_min_u64(len, group.len - skip);
        memcpy(out, group.ptr + skip, n);
        out += n;
        off += n;
        len -= n;
    }
    return 0;
}
