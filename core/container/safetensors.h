/* SPDX-License-Identifier: Apache-2.0 */
/* Reading the header of a safetensors file: 8 bytes of length (little-endian), JSON, then the
 * tensors' bytes.
 *
 * As strict as the official library (safetensors/src/tensor.rs): offsets tile the data without
 * holes or overlaps and the file ends with the last tensor. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "io/source.h"
#include "tensor/catalog.h"
#include "tensor/dtype.h"

/* The official library's limit on the header; ours on a name; a rank that no tensor has. */
#define CKPT_ST_MAX_HEADER 100000000
#define CKPT_ST_MAX_NAME 4096

struct ckpt_st_tensor {
    const char *name; /* the arena's; the first member, as that of the metadata */
    const uint64_t *dim;
    uint64_t off; /* of the first byte, in the file */
    uint64_t len;
    uint32_t rank;
    enum ckpt_dtype dtype;
};

struct ckpt_st {
    struct ckpt_arena arena;
    struct ckpt_st_tensor *tensor; /* by offset */
    size_t ntensor;
    bool has_metadata; /* __metadata__ is there, though it may be empty */
    struct ckpt_st_meta {
        const char *key, *value; /* in `text` */
    } * metadata;
    size_t nmetadata;
    char *text; /* of the header, changed by reading it; NULL: there is no metadata */
};

/* Read and check the header of s. On failure the error names the file. */
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
