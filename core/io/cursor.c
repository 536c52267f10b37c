/* SPDX-License-Identifier: Apache-2.0 */
/* Reading numbers and bytes from a cursor. */
#include "io/cursor.h"

#include <inttypes.h>

void ckpt_cursor_init(struct ckpt_cursor *c, const void *data, size_t len, uint64_t base,
                      const char *name)
{
    *c = (struct ckpt_cursor){.at = data, .base = base, .start = data, .name = name};
    c->end = c->at + len;
}

size_t ckpt_cursor_left(const struct ckpt_cursor *c)
{
    return c->failed ? 0 : (size_t)(c->end - c->at);
}

uint64_t ckpt_cursor_off(const struct ckpt_cursor *c)
{
    return c->base + (uint64_t)(c->at - c->start);
}

const void *ckpt_cursor_take(struct ckpt_cursor *c, uint64_t len)
{
    const unsigned char *p = c->at;

    if (c->failed)
        return NULL;
    if (len > (uint64_t)(c->end - c->at)) {
        c->failed = true;
        c->failed_at = c->base + (uint64_t)(c->end - c->start);
        return NULL;
    }
    c->at += len;
    return p;
}

static uint64_t take_le(struct ckpt_cursor *c, unsigned n)
{
    const unsigned char *p = ckpt_cursor_take(c, n);
    uint64_t v = 0;

    for (unsigned i = n; p && i-- > 0;)
        v = v << 8 | p[i];
    return v;
}

uint8_t ckpt_cursor_u8(struct ckpt_cursor *c) { return (uint8_t)take_le(c, 1); }

uint16_t ckpt_cursor_le16(struct ckpt_cursor *c) { return (uint16_t)take_le(c, 2); }

uint32_t ckpt_cursor_le32(struct ckpt_cursor *c) { return (uint32_t)take_le(c, 4); }

uint64_t ckpt_cursor_le64(struct ckpt_cursor *c) { return take_le(c, 8); }

int ckpt_cursor_report(const struct ckpt_cursor *c, struct ckpt_err *err)
{
    if (!c->failed)
        return 0;
    return ckpt_fail(err, CKPT_FORMAT,
                     "'%s' ends at byte %" PRIu64 ", where more data was expected", c->name,
                     c->failed_at);
}
