/* SPDX-License-Identifier: Apache-2.0 */
/* Element types, under the names that safetensors gives them, and casts between the floating ones.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In safetensors' order of writing: a file holds its tensors by this order, greatest first, then by
 * name (safetensors/src/tensor.rs, enum Dtype, and `prepare`).
 *
 * Types of less than a byte are counted in packs, the fewest elements that are whole bytes: a
 * tensor of them has packs in its last dimension, as torch's float4_e2m1fn_x2 has, and "element"
 * means a pack everywhere but in the headers of safetensors files and where shapes are shown to
 * people (ckpt_tensor_shape). */
enum ckpt_dtype {
    CKPT_OPAQUE, /* of a word that is not known (ckpt_tensor.opaque): counted in bytes, only copied
                  */
    CKPT_BOOL,
    CKPT_F4,
    CKPT_F6_E2M3,
    CKPT_F6_E3M2,
    CKPT_U8,
    CKPT_I8,
    CKPT_F8_E5M2,
    CKPT_F8_E4M3,
    CKPT_F8_E8M0,
    CKPT_F8_E4M3FNUZ,
    CKPT_F8_E5M2FNUZ,
    CKPT_I16,
    CKPT_U16,
    CKPT_F16,
    CKPT_BF16,
    CKPT_I32,
    CKPT_U32,
    CKPT_F32,
    CKPT_C64,
    CKPT_F64,
    CKPT_I64,
    CKPT_U64,
    CKPT_NDTYPE,
};

/* Bytes of one element, or of a pack. */
size_t ckpt_dtype_size(enum ckpt_dtype t);

/* The elements of a pack: 2 of F4, 4 of F6, else 1; of CKPT_OPAQUE, 0: it is not known. */
unsigned ckpt_dtype_pack(enum ckpt_dtype t);

/* safetensors' name ("BF16"); torch's ("bfloat16"). Static. */
const char *ckpt_dtype_name(enum ckpt_dtype t);
const char *ckpt_dtype_torch_name(enum ckpt_dtype t);

/* From safetensors' name, torch's name, with or without "torch.", or torch's short ("half",
 * "float", "double"). False if unknown. */
bool ckpt_dtype_parse(const char *name, size_t len, enum ckpt_dtype *ret);

/* F16, BF16, F32, F64: what a `dtype=` option may convert from and to. */
bool ckpt_dtype_is_castable(enum ckpt_dtype t);

/* Any floating type, fp8 included. */
bool ckpt_dtype_is_float(enum ckpt_dtype t);

/* Convert n elements; to nearest, ties to even; NaN stays NaN, overflow is infinity, bit for bit as
 * torch's `to` on a CPU (which NaN: see dtype_cast.c; it depends on the element alone, never on its
 * place). Both castable, the buffers do not overlap, no alignment needed. */
void ckpt_dtype_cast(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from,
                     size_t n);

/* Casts likewise, without special instructions; for tests. */
void ckpt_dtype_cast_plain(void *dst, enum ckpt_dtype to, const void *src, enum ckpt_dtype from,
                           size_t n);
