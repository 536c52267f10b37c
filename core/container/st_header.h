/* SPDX-License-Identifier: Apache-2.0 */
/* Writing the header of a safetensors file, byte for byte as the official library does
 * (safetensors/src/tensor.rs, `prepare`):
 *
 *     8 bytes: length of the rest, little-endian
 *     {"__metadata__":{"format":"pt"},"NAME":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},...}
 *     spaces up to a multiple of 8
 *
 * Tensors stand in the order of their data (ckpt_st_cmp). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "tensor/catalog.h"

/* The library refuses to read a longer header. */
#define CKPT_ST_MAX_HEADER 100000000

/* Can a tensor have this name in a safetensors file? FORMAT if it is not UTF-8 or means something
 * else there. */
int ckpt_st_check_name(const char *name, struct ckpt_err *err);

/* The library's order: by type (enum ckpt_dtype, greatest first), then by name. */
int ckpt_st_cmp(const struct ckpt_tensor *a, const struct ckpt_tensor *b);

/* The text without length and spaces: begin, each tensor with the offset of its data, end. `bare`:
 * without __metadata__, as the library's save_file(tensors, path) leaves it; then `first` says that
 * nothing stands before the tensor. */
void ckpt_st_header_begin(struct ckpt_str *out, bool bare);
void ckpt_st_header_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, uint64_t off,
                           bool first);
void ckpt_st_header_end(struct ckpt_str *out);

/* The same for a part of a tensor, of that shape and size. */
void ckpt_st_header_part(struct ckpt_str *out, const struct ckpt_tensor *t, const uint64_t *dim,
                         uint64_t off, uint64_t len, bool first);

/* A JSON string as serde_json writes it. */
void ckpt_st_put_string(struct ckpt_str *out, const char *s);

/* An upper bound of what ckpt_st_header_tensor writes, in bytes. */
size_t ckpt_st_header_bound(const struct ckpt_tensor *t);

/* Spaces (0 to 7) that follow a text of len bytes. */
size_t ckpt_st_header_pad(uint64_t len);

/* Length, text and spaces in one piece of the arena's memory; NULL: there is none. */
const void *ckpt_st_header_mem(struct ckpt_str *text, struct ckpt_arena *arena, uint64_t *ret_len);
