/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and writing the header of a safetensors file: 8 bytes of length (little-endian), JSON,
 * then the tensors' bytes.
 *
 * As strict as the official library (safetensors/src/tensor.rs): offsets tile the data without
 * holes or overlaps and the file ends with the last tensor. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "io/source.h"
#include "tensor/catalog.h"
#include "tensor/dtype.h"

/* The official library's limit on the header; ours on a name; a rank that no tensor has. */
#define CKPT_ST_MAX_HEADER 100000000
#define CKPT_ST_MAX_NAME 4096

/* A view keeps at most so many bytes of __metadata__ (container/st_metadata.h), and splits files so
 * that their headers have room for them beside the tensors. */
#define CKPT_ST_MAX_KEPT (32 << 20)

struct ckpt_st_tensor {
    const char *name; /* the arena's; the first member, as that of the metadata */
    const uint64_t *dim;
    const char *opaque; /* of dtype CKPT_OPAQUE: the word that is not known; else NULL */
    uint64_t off;       /* of the first byte, in the file */
    uint64_t len;
    uint32_t rank;
    enum ckpt_dtype dtype;
};

struct ckpt_st {
    struct ckpt_arena arena;
    struct ckpt_st_tensor *tensor; /* by offset */
    size_t ntensor;
    bool keep_unknown; /* set before reading: dtypes that are not known are opaque, no error */
    bool has_metadata; /* __metadata__ is there, though it may be empty */
    struct ckpt_st_meta {
        const char *key, *value; /* in `text` */
    } * metadata;
    size_t nmetadata;
    char *text; /* of the header, changed by reading it; NULL: there is no metadata */
};

/* Read and check the header of s; *ret is all zero before, but for keep_unknown. On failure the
 * error names the file. */
int ckpt_st_read(struct ckpt_source *s, struct ckpt_st *ret, struct ckpt_err *err);
void ckpt_st_release(struct ckpt_st *st);

/* The value of a key of __metadata__, or NULL. Linear. */
const char *ckpt_st_metadata(const struct ckpt_st *st, const char *key);

/* Free the metadata, which may be long. Its keys are not found any more. */
void ckpt_st_forget_metadata(struct ckpt_st *st);

/* By name, or NULL. Linear. */
const struct ckpt_st_tensor *ckpt_st_find(const struct ckpt_st *st, const char *name);

/* Add a whole tensor to a catalogue, under its own name; its bytes are those of source `source` of
 * cat. */
int ckpt_st_catalog(const struct ckpt_st_tensor *t, uint32_t source, struct ckpt_catalog *cat,
                    struct ckpt_err *err);

/* ---- writing a header, byte for byte as the official library does ---- */

/* safetensors/src/tensor.rs, `prepare`:
 *
 *     8 bytes: length of the rest, little-endian
 *     {"__metadata__":{"format":"pt"},"NAME":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},...}
 *     spaces up to a multiple of 8
 *
 * Tensors stand in the order of their data (ckpt_st_cmp). */

/* Can a tensor have this name in a safetensors file? FORMAT if it is not UTF-8 or means something
 * else there. */
int ckpt_st_check_name(const char *name, struct ckpt_err *err);

/* The library's order: by type (enum ckpt_dtype, greatest first), then by name. */
int ckpt_st_cmp(const struct ckpt_tensor *a, const struct ckpt_tensor *b);

/* The text without length and spaces: begin, each tensor with the offset of its data, end. `bare`:
 * without __metadata__, as the library's save_file(tensors, path) leaves it; then `first` says that
 * nothing stands before the tensor. */
void ckpt_st_header_begin(struct ckpt_str *out, bool bare);

/* Begins a header with these entries of __metadata__ ({key: value}, in their order; NULL: none).
 * `"format":"pt"` is added if they have no format, as transformers refuses a file without one. */
void ckpt_st_header_begin_with(struct ckpt_str *out, const json_t *entries);

/* These two write a tensor whose data begins at `off`, and the end. */
void ckpt_st_header_tensor(struct ckpt_str *out, const struct ckpt_tensor *t, uint64_t off,
                           bool first);
void ckpt_st_header_end(struct ckpt_str *out);

/* Write the entry of a part of a tensor: shape `dim`, and `len` bytes from `off` on. */
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
