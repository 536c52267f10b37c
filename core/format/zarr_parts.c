/* SPDX-License-Identifier: Apache-2.0 */
#include "format/zarr_parts.h"

#include "format/pieces.h"

void ckpt_zarr_parts_release(struct ckpt_zarr_parts *p)
{
    for (size_t i = 0; i < p->part.len; i++) {
        ckpt_source_unref(p->part.ptr[i].source);
        ckpt_source_unref(p->part.ptr[i].file);
    }
    ckpt_vec_release(&p->part);
}

int ckpt_zarr_parts_keep(void *ctx, const struct ckpt_zarr_part *part, struct ckpt_err *err)
{
    struct ckpt_zarr_parts *p = ctx;

    if (ckpt_vec_push(&p->part, *part) < 0)
        return ckpt_nomem(err);
    if (part->source) {
        (void)ckpt_source_ref(part->source);
        (void)ckpt_source_ref(part->file);
    }
    return 0;
}

uint32_t ckpt_zarr_file(struct ckpt_source *const *file, struct ckpt_map *files,
                        struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const uint32_t next = (uint32_t)cat->sources.len;
    uint32_t at;
    bool is_new;

    if (ckpt_map_put(files, (const char *)file, sizeof *file, next, &at, &is_new) < 0) {
        (void)ckpt_nomem(err);
        return UINT32_MAX;
    }
    return is_new ? ckpt_catalog_add_source(cat, *file, err) : at;
}

/* The source of a part, whose file the catalogue gets, too. */
static uint32_t add_stored(const struct ckpt_zarr_part *p, struct ckpt_map *files,
                           struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const uint32_t file = ckpt_zarr_file(&p->file, files, cat, err);

    return p->source == p->file || file == UINT32_MAX
               ? file
               : ckpt_catalog_add_source(cat, p->source, err);
}

/* The source of the fill value, which has one element. */
static uint32_t add_fill(const struct ckpt_zarr *z, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *made = NULL;

    return ckpt_source_mem_new("the fill value", z->fill, ckpt_dtype_size(z->dtype), &made, err) < 0
               ? UINT32_MAX
               : ckpt_catalog_add_source(cat, made, err);
}

int ckpt_zarr_parts_catalog(const struct ckpt_zarr_parts *p, const struct ckpt_zarr *z,
                            const char *name, struct ckpt_map *files, struct ckpt_catalog *cat,
                            struct ckpt_err *err)
{
    static const uint64_t everywhere[CKPT_MAX_RANK] = {0};
    ckpt_cleanup(ckpt_pieces_release) struct ckpt_pieces pieces = {0};
    uint32_t fill = UINT32_MAX;

    for (size_t i = 0; i < p->part.len; i++) {
        const struct ckpt_zarr_part *part = &p->part.ptr[i];
        if (!part->source && fill == UINT32_MAX)
            fill = add_fill(z, cat, err);
        const uint32_t source = part->source ? add_stored(part, files, cat, err) : fill;
        if (source == UINT32_MAX ||
            ckpt_pieces_add(&pieces, z->dim, &part->box, source, part->source ? part->off : 0,
                            part->source ? part->stride : everywhere, err) < 0)
            return -1;
    }
    return ckpt_pieces_catalog(&pieces, cat, name, z->dtype, z->dim, z->rank, err);
}
