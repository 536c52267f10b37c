/* SPDX-License-Identifier: Apache-2.0 */
/* The CRC-32 of zip archives (PKWARE APPNOTE 4.4.7, ISO 3309: polynomial 0x04c11db7, reflected),
 * and CRC-32C (RFC 3720, B.4: polynomial 0x1edc6f41, reflected), which tensorstore's files have. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Returns the CRC-32 of some bytes and of what came before them, whose CRC is `before` (0: nothing
 * came before). */
uint32_t ckpt_crc32(uint32_t before, const void *data, size_t len);

/* Returns the CRC-32C likewise. */
uint32_t ckpt_crc32c(uint32_t before, const void *data, size_t len);
