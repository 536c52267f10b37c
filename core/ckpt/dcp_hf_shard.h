/* SPDX-License-Identifier: Apache-2.0 */
/* One file of a DCP save in Hugging Face storage: `shard-R-model-I-of-N.safetensors`.
 *
 * An ordinary safetensors file whose metadata says where each tensor's data lies in the whole one:
 * DCP_SHARDING_INFO is JSON text, {"name": {"saved_offsets": [3, 0]}, ...}. The sizes are the
 * tensor's own shape; the shape of the whole tensor is written nowhere. */
#ifndef CKPT_CKPT_DCP_HF_SHARD_H
#define CKPT_CKPT_DCP_HF_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "container/safetensors.h"
#include "io/source.h"

struct ckpt_hfs_name {
    uint64_t rank;  /* of the writer, from 1 */
    uint64_t file;  /* of the finished model, from 1 to nfile */
    uint64_t nfile; /* 1 too when the writer was given no split */
};

/* False if it is no name of such a file. */
bool ckpt_hfs_name_parse(const char *name, struct ckpt_hfs_name *ret);

struct ckpt_hfs_shard {
    const char *name; /* borrowed */
    struct ckpt_hfs_name id;
    struct ckpt_source *source;
    struct ckpt_st st;
    const uint64_t **lo; /* of each tensor of st: where it begins; st's arena */
};

/* Read the header of s->source. On failure the error names the file. */
int ckpt_hfs_shard_read(struct ckpt_hfs_shard *s, struct ckpt_err *err);
void ckpt_hfs_shard_release(struct ckpt_hfs_shard *s);

#endif
