/* SPDX-License-Identifier: Apache-2.0 */
/* torch.save files (torch/serialization.py): a zip archive with a pickle, data.pkl, that refers to
 * storages, the members data/KEY. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "container/pickle.h"
#include "container/zip.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

/* Rows of the table of globals of torch.save files. */
enum ckpt_torch_global {
    CKPT_TORCH_TENSOR_V2,
    CKPT_TORCH_TENSOR_V3,
    CKPT_TORCH_PARAMETER,
    CKPT_TORCH_PARAMETER_STATE,
    CKPT_TORCH_DEVICE_TENSOR,
    CKPT_TORCH_SUBCLASS_V2,
    CKPT_TORCH_WRAPPER,
    CKPT_TORCH_DTENSOR_SPEC,
    CKPT_TORCH_DEVICE_MESH,
    CKPT_TORCH_MESH_LAYOUT,
    CKPT_TORCH_FLAT_LAYOUT,
    CKPT_TORCH_SHARD,
    CKPT_TORCH_STRIDED_SHARD,
    CKPT_TORCH_REPLICATE,
    CKPT_TORCH_PARTIAL,
    CKPT_TORCH_LOCAL_SHARD,
    CKPT_TORCH_SHARD_METADATA,
    CKPT_TORCH_SHARDED_METADATA,
    CKPT_TORCH_GET_LAYOUT,
    CKPT_TORCH_BYTES,
    CKPT_TORCH_SET,
    CKPT_TORCH_NAMESPACE,
    CKPT_TORCH_SIMPLE_NAMESPACE,
};
/* The rules for pickles of torch.save files. */
extern const struct ckpt_pickle_rules ckpt_torch_rules;

/* Is the value certainly not a tensor: a number, a string, bytes, a set, the run's arguments? Is it
 * a tensor, by its class? */
bool ckpt_torch_is_data(const struct ckpt_pickle *p, ckpt_pv v);
bool ckpt_torch_is_tensor(const struct ckpt_pickle *p, ckpt_pv v);

/* How a tensor lies in its storage; sizes, strides and `first` in elements. */
struct ckpt_torch_layout {
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t stride[CKPT_MAX_RANK];
    uint64_t first;
    uint64_t nbyte; /* bytes of the storage that are needed, from its beginning; 0: the tensor has
                       no element */
    char key[24];   /* of the storage */
};

/* Compute the layout of the tensor that the call v of a rebuild function makes. UNSUPPORTED: it is
 * not a plain tensor; the text says what it is. */
int ckpt_torch_layout_of(const struct ckpt_pickle *p, ckpt_pv v, struct ckpt_torch_layout *ret,
                         struct ckpt_err *err);

/* The dtype that a global names ("torch.bfloat16"). False: none that safetensors has. */
bool ckpt_torch_dtype(const struct ckpt_pickle *p, ckpt_pv v, enum ckpt_dtype *ret);

/* Bounds of "PREFIX/" in the names of the members; its pickle, and that it is little-endian. */
struct ckpt_torch {
    struct ckpt_zip zip;
    const char *prefix; /* not terminated; with the slash */
    size_t prefix_len;
    const struct ckpt_zip_entry *pickle; /* data.pkl */
    uint64_t pickle_off;                 /* in the source */
};

/* Bytes [off, off+len) of s. The pickle is located, not read. */
int ckpt_torch_open(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_torch *ret,
                    struct ckpt_err *err);
void ckpt_torch_release(struct ckpt_torch *t);

/* Read the pickle, by ckpt_torch_rules. FORMAT if its bytes are not those of its CRC. */
int ckpt_torch_pickle(const struct ckpt_torch *t, struct ckpt_pickle *ret, struct ckpt_err *err);

/* Where a tensor is stored. */
struct ckpt_torch_tensor {
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t stride[CKPT_MAX_RANK]; /* bytes */
    uint64_t numel;
    uint64_t off;    /* of the first element in the source; 0 if numel is 0 */
    bool contiguous; /* row-major, without gaps */
};

/* Find out where a tensor of this layout is stored. */
int ckpt_torch_locate(const struct ckpt_torch *t, const struct ckpt_torch_layout *l,
                      struct ckpt_torch_tensor *ret, struct ckpt_err *err);

/* For archives with one tensor each, such as DCP's items: most items of a file have the same
 * pickle, so the result of the last one is kept. Belongs to one thread; zero-initialised. */
struct ckpt_torch_memo {
    unsigned char *pickle;
    size_t len;
    struct ckpt_torch_layout layout;
};

/* Free what was kept. */
void ckpt_torch_memo_release(struct ckpt_torch_memo *memo);
/* Find the only tensor of the archive in bytes [off, off+len) of s. */
int ckpt_torch_item(struct ckpt_source *s, uint64_t off, uint64_t len, struct ckpt_torch_memo *memo,
                    struct ckpt_torch_tensor *ret, struct ckpt_err *err);

/* The class of storages of a type ("FloatStorage"); NULL: torch has none, such tensors lie in
 * storages without a type. */
const char *ckpt_torch_storage_name(enum ckpt_dtype dtype);
