/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor as torch.save writes it into a stream (torch 2.7 to 2.14), all but the tensor's bytes:
 *
 *     head, nbytes bytes of the tensor, tail
 *
 * The archive has a CRC of every record, which needs all of the tensor's bytes. It is written as
 * after torch.serialization.set_crc32_options(False): the CRCs are 0, and torch does not look at
 * them. Byte for byte what torch writes then, the serialization_id included. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "tensor/dtype.h"

struct ckpt_torch_out {
    enum ckpt_dtype dtype;
    const uint64_t *dim; /* contiguous, row-major */
    uint32_t rank;       /* CKPT_MAX_RANK at most */
    uint64_t nbytes;
};

/* Append the archive of a tensor, all but the tensor's bytes, which belong behind *ret_at bytes of
 * what is appended. */
void ckpt_torch_out(const struct ckpt_torch_out *t, struct ckpt_str *text, size_t *ret_at);

struct ckpt_pickle_out;

/* Push the tensor; its bytes are record data/KEY of the archive. */
void ckpt_torch_out_tensor(struct ckpt_pickle_out *p, const struct ckpt_torch_out *t,
                           const char *key);

/* What torch.save writes into a file: a pickled object with n tensors (0, 1 ...). */
struct ckpt_torch_archive {
    const char *folder; /* of its records: "archive/", or a file's name without its suffix */
    const char *pickle; /* len bytes */
    size_t len;
    const uint64_t *nbytes; /* of each tensor */
    size_t n;
};

/* Append the file, all but the bytes of its tensors: those of tensor i belong behind ret_at[i]
 * bytes of what is appended. NOMEM. */
int ckpt_torch_out_file(const struct ckpt_torch_archive *f, struct ckpt_str *text, size_t *ret_at,
                        struct ckpt_err *err);

/* Append the file of an object that has no tensors. */
void ckpt_torch_out_pickle(const char *folder, const char *pickle, size_t len,
                           struct ckpt_str *out);

/* The same for [None]. */
void ckpt_torch_out_none(struct ckpt_str *out);
