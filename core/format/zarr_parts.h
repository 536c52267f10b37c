/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a zarr array while a reader collects them, chunk by chunk, and the tensor that they
 * make. */
#pragma once

#include "base/map.h"
#include "container/zarr.h"
#include "tensor/catalog.h"

/* All zero: no parts. Their sources are referenced. */
struct ckpt_zarr_parts {
    CKPT_VEC(struct ckpt_zarr_part) part;
};

/* Give back the sources, and free the list. */
void ckpt_zarr_parts_release(struct ckpt_zarr_parts *p);

/* Keep a part: a ckpt_zarr_part_fn, whose ctx is the struct ckpt_zarr_parts. */
int ckpt_zarr_parts_keep(void *ctx, const struct ckpt_zarr_part *part, struct ckpt_err *err);

/* The number of a file in the catalogue, to which it is added if it is new: by the sources that are
 * files, a save is told from another. `files` has the numbers of those that were added so, and
 * borrows *file, the pointer. UINT32_MAX: no memory. */
uint32_t ckpt_zarr_file(struct ckpt_source *const *file, struct ckpt_map *files,
                        struct ckpt_catalog *cat, struct ckpt_err *err);

/* Add a tensor of these parts to the catalogue, with their sources and files. `files` is that of
 * all arrays. */
int ckpt_zarr_parts_catalog(const struct ckpt_zarr_parts *p, const struct ckpt_zarr *z,
                            const char *name, struct ckpt_map *files, struct ckpt_catalog *cat,
                            struct ckpt_err *err);
