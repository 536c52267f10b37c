/* SPDX-License-Identifier: Apache-2.0 */
/* CRC-32 and CRC-32C, four bits at a time. */
#include "base/crc32.h"

static uint32_t run(const uint32_t table[16], uint32_t before, const void *data, size_t len)
{
    const unsigned char *p = data;
    uint32_t c = ~before;

    for (size_t i = 0; i < len; i++) {
        c ^= p[i];
        c = c >> 4 ^ table[c & 15];
        c = c >> 4 ^ table[c & 15];
    }
    return ~c;
}

uint32_t ckpt_crc32(uint32_t before, const void *data, size_t len)
{
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };

    return run(table, before, data, len);
}

uint32_t ckpt_crc32c(uint32_t before, const void *data, size_t len)
{
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };

    return run(table, before, data, len);
}
