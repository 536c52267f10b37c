/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a .zarray or a zarr.json: the chunks of what is accepted lie within the array and
 * follow each other. */
#include "fuzz.h"

#include "container/zarr.h"

enum { MOST_CHUNKS = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t index[CKPT_MAX_RANK] = {0}, numel;
    struct ckpt_zarr z;
    struct ckpt_err err = {0};
    struct ckpt_str name = {0};
    struct ckpt_box box;

    if (ckpt_zarr_parse((const char *)data, size, &z, &err) < 0 &&
        ckpt_zarr3_parse((const char *)data, size, &z, &(struct ckpt_err){0}) < 0) {
        check_err(&err);
        return 0;
    }
    MUST(z.rank <= CKPT_MAX_RANK);
    if (!ckpt_shape_numel(z.dim, z.rank, &numel) || numel == 0)
        return 0;
    for (int i = 0; i < MOST_CHUNKS; i++) {
        ckpt_str_clear(&name);
        ckpt_zarr_chunk_name(&z, index, &name);
        MUST(name.len > 0);
        ckpt_zarr_chunk_box(&z, index, &box);
        MUST(ckpt_box_within(&box, z.dim, z.rank) && ckpt_box_numel(&box) > 0);
        if (!ckpt_zarr_next(&z, index))
            break;
    }
    ckpt_str_release(&name);
    return 0;
}
