/* SPDX-License-Identifier: Apache-2.0 */
/* A long text made of entries, which is generated whenever it is read. Only the offset of every
 * `step`th entry is kept in memory, and whoever reads an entry writes all between two of these. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"

struct ckpt_segment;

/* Steps for the two kinds of texts. The headers and the index of a model with 10^6 tensors have
 * short entries, and are read from end to end. Archives of one tensor are long, and lie around
 * tensors' bytes: each is read for itself. */
enum { CKPT_TEXT_SHORT = 64, CKPT_TEXT_ARCHIVES = 1 };

struct ckpt_text {
    /* Append entry i. A pure function of ctx: the same bytes every time, from any thread. */
    void (*entry)(const void *ctx, size_t i, struct ckpt_str *out);
    const void *ctx;
    uint64_t *mark; /* offsets of entries 0, step, 2 * step ...; the arena's */
    size_t nentry, step;
    uint64_t len; /* bytes of the whole text */
};

/* Write the text once to measure it. */
int ckpt_text_init(struct ckpt_text *t,
                   void (*entry)(const void *ctx, size_t i, struct ckpt_str *out), const void *ctx,
                   size_t nentry, size_t step, struct ckpt_arena *arena, struct ckpt_err *err);

/* So many segments go before the tensors of a safetensors file: length, header, spaces. */
enum { CKPT_ST_LEADING = 3 };

struct ckpt_st_head {
    struct ckpt_text text; /* the header */
    unsigned char len[8];
};

/* Make these segments of a header's text; they refer to `head`. *ret_len: of all of them. */
void ckpt_st_head_segments(struct ckpt_st_head *head, struct ckpt_segment *ret, uint64_t *ret_len);

/* Bytes [off, off+len), which must lie inside the text (assert). Safe from many threads. */
int ckpt_text_pread(const struct ckpt_text *t, void *buf, size_t len, uint64_t off,
                    struct ckpt_err *err);
