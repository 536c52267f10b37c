/* SPDX-License-Identifier: Apache-2.0 */
/* One file of a DCP save in Hugging Face storage: `shard-R-model-I-of-N.safetensors`.
 *
 * It is a safetensors file whose metadata gives the position of each box in the whole tensor:
 * DCP_SHARDING_INFO is JSON text, {"name": {"saved_offsets": [3, 0]}, ...}. The size of the box is
 * the tensor's shape in the file; the shape of the whole tensor is not recorded anywhere. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "container/safetensors.h"
#include "io/source.h"

struct ckpt_hfs_name {
    uint64_t rank;  /* rank of the writer, from 1 */
    uint64_t file;  /* number of the finished model's file, from 1 to nfile */
    uint64_t nfile; /* 1 also if the writer was not given a split */
};

/* Parse a name; false if it is not the name of such a file. */
bool ckpt_hfs_name_parse(const char *name, struct ckpt_hfs_name *ret);

struct ckpt_hfs_shard {
    const char *name; /* borrowed */
    struct ckpt_hfs_name id;
    struct ckpt_source *source;
    struct ckpt_st st;
    const uint64_t *
        *lo; /* for each tensor of st, the position of its first element; memory of st's arena */
};

/* Read the header of s->source. On failure the error names the file. */
int ckpt_hfs_shard_read(struct ckpt_hfs_shard *s, struct ckpt_err *err);
void ckpt_hfs_shard_release(struct ckpt_hfs_shard *s);
