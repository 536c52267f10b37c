/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps what a checkpoint's compressed parts hold when they are decoded: in memory within a budget
 * or, if they are more than that together and there is a temporary file, all of them in that, so
 * that each is decoded once. A part is decoded as a whole. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "io/source.h"
#include "io/spill.h"

enum { CKPT_DECODED_BUDGET = 256 << 20 }; /* bytes in memory, of a checkpoint */

struct ckpt_decoded;

/* Make a place with a budget in bytes, which grows to what the two largest parts need. The file may
 * be NULL, and is referenced. Counted. */
int ckpt_decoded_new(size_t budget, struct ckpt_spill *spill, struct ckpt_decoded **ret,
                     struct ckpt_err *err);
struct ckpt_decoded *ckpt_decoded_ref(struct ckpt_decoded *d);
void ckpt_decoded_unref(struct ckpt_decoded *d); /* NULL is allowed */

/* The bytes that memory has now. */
size_t ckpt_decoded_bytes(struct ckpt_decoded *d);

/* Takes the next bytes of what is decoded. False: it wants no more. */
typedef bool ckpt_decoded_put(void *to, const void *buf, size_t len);

/* A part, which its source embeds. */
struct ckpt_decoded_part {
    uint64_t len;
    /* Decode it: give exactly len bytes to put(to, ...), in order and in pieces of any size. 1: it
     * wanted no more. */
    int (*decode)(const struct ckpt_decoded_part *part, ckpt_decoded_put *put, void *to,
                  struct ckpt_err *err);
    /* These are of the place: where the part is in the file. */
    _Atomic(int) state;
    uint64_t off;
};

/* Announce a part that may be read, whose first two members are set and whose others are zero. */
void ckpt_decoded_add(struct ckpt_decoded *d, const struct ckpt_decoded_part *part);

/* Read bytes of a part as ckpt_source_read does; it is decoded if it has to be. Safe from many
 * threads. */
int ckpt_decoded_read(struct ckpt_decoded *d, struct ckpt_decoded_part *part,
                      const struct ckpt_source_way *way, const struct ckpt_source_run *run,
                      size_t n, struct ckpt_err *err);

/* Decode a part before it is read, unless it is there or another thread decodes it now. */
enum ckpt_prepared ckpt_decoded_prepare(struct ckpt_decoded *d, struct ckpt_decoded_part *part);

/* Forget a part, which nobody reads. */
void ckpt_decoded_forget(struct ckpt_decoded *d, struct ckpt_decoded_part *part);
