/* SPDX-License-Identifier: Apache-2.0 */
/* The CRC-32 of zip archives (PKWARE APPNOTE 4.4.7, ISO 3309: polynomial 0x04c11db7, reflected). */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Returns the CRC-32 of some bytes and of what came before them, whose CRC is `before` (0: nothing
 * came before). */
uint32_t ckpt_crc32(uint32_t before, const void *data, size_t len);
