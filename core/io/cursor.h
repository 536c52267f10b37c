/* SPDX-License-Identifier: Apache-2.0 */
/* The only code that touches undecoded bytes. It knows its end and is sticky: after the first read
 * past the end every read gives zero, so a parser checks once per group. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct ckpt_cursor {
    const unsigned char *at, *end;
    uint64_t base; /* offset of the first byte in its file */
    const unsigned char *start;
    const char *name;   /* of the file, for messages; borrowed */
    uint64_t failed_at; /* offset of the first byte that was not there */
    bool failed;
};

/* Begin at data[0..len), which is borrowed, as is the name. `base` is its offset in the file. */
void ckpt_cursor_init(struct ckpt_cursor *c, const void *data, size_t len, uint64_t base,
                      const char *name);
/* The number of bytes that have not been read, and the offset of the next one in the file. */
size_t ckpt_cursor_left(const struct ckpt_cursor *c);
uint64_t ckpt_cursor_off(const struct ckpt_cursor *c);

/* The next len bytes, or NULL (and the cursor failed). */
const void *ckpt_cursor_take(struct ckpt_cursor *c, uint64_t len);

/* The next number, little-endian; 0 after a failure. */
uint8_t ckpt_cursor_u8(struct ckpt_cursor *c);
uint16_t ckpt_cursor_le16(struct ckpt_cursor *c);
uint32_t ckpt_cursor_le32(struct ckpt_cursor *c);
uint64_t ckpt_cursor_le64(struct ckpt_cursor *c);

/* 0, or -1 with FORMAT naming the file and the offset of the first byte that was not there. */
int ckpt_cursor_report(const struct ckpt_cursor *c, struct ckpt_err *err);
