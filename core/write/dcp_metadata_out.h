/* SPDX-License-Identifier: Apache-2.0 */
/* The `.metadata` of a distributed checkpoint: a pickle of torch.distributed.checkpoint.metadata's
 * Metadata, written whenever it is read, an entry per tensor and per part. */
#ifndef CKPT_WRITE_DCP_METADATA_OUT_H
#define CKPT_WRITE_DCP_METADATA_OUT_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "tensor/catalog.h"
#include "view/text.h"

/* A part of a tensor, and the archive that holds it. */
struct ckpt_dcp_part {
    uint32_t tensor; /* in the catalogue */
    uint32_t rank;   /* whose file it is in; its parts of one tensor begin with rank 0 */
    uint64_t off;    /* of the archive in the file */
    uint64_t len;    /* of the archive */
};

struct ckpt_dcp_metadata {
    const struct ckpt_catalog *cat;
    uint32_t ranks;
    const struct ckpt_dcp_part *part; /* by rank, then as they stand in the file */
    size_t npart;
};

/* m, which is borrowed, must outlive the text. */
int ckpt_dcp_metadata_text(const struct ckpt_dcp_metadata *m, struct ckpt_arena *arena,
                           struct ckpt_text *ret, struct ckpt_err *err);

#endif
