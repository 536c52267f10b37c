/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a zarr.json, a NUL, and the bytes of one chunk: the parts of what is accepted cover
 * the chunk once, and what decodes has all its bytes. Checksums are not compared. */
#include "fuzz.h"

#include "base/mem.h"
#include "container/zarr.h"

enum { MOST_BYTES = 1 << 16, MOST_PARTS = 4096 };

struct parts {
    struct ckpt_box box[MOST_PARTS];
    size_t n;
    const struct ckpt_zarr *z;
};

static int add(void *ctx, const struct ckpt_zarr_part *part, struct ckpt_err *err)
{
    struct parts *p = ctx;
    uint64_t end = part->off;
    ckpt_cleanup(ckpt_freep) char *all = NULL;

    MUST(ckpt_box_within(&part->box, p->z->dim, p->z->rank));
    if (p->n == MOST_PARTS)
        return ckpt_fail(err, CKPT_LIMIT, "enough");
    p->box[p->n++] = part->box;
    if (!part->source)
        return 0;
    for (uint32_t d = 0; d < p->z->rank; d++)
        end += (part->box.n[d] - 1) * part->stride[d];
    end += ckpt_dtype_size(p->z->dtype);
    MUST(end <= part->source->size);
    MUST((all = malloc(part->source->size)));
    return ckpt_source_pread(part->source, all, part->source->size, 0, err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct parts parts;
    struct input in = {data, size};
    ckpt_cleanup(ckpt_freep) char *text = input_text(&in, '\0');
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *file = NULL;
    uint64_t index[CKPT_MAX_RANK] = {0}, numel;
    struct ckpt_decoded *decoded = NULL;
    struct ckpt_err err = {0};
    struct ckpt_box whole;
    struct ckpt_zarr z;
    size_t bad;

    if (ckpt_zarr3_parse(text, strlen(text), &z, &err) < 0) {
        check_err(&err);
        return 0;
    }
    z.index_checked = false;
    if (!ckpt_shape_numel(z.dim, z.rank, &numel) || !numel || z.nbyte > MOST_BYTES)
        return 0;
    parts.n = 0;
    parts.z = &z;
    MUST(ckpt_source_mem_new("chunk", in.at, in.left, &file, &err) == 0);
    MUST(ckpt_decoded_new(0, NULL, &decoded, &err) == 0);
    const struct ckpt_zarr_stored at = {file, 0, in.left};
    if (ckpt_zarr_chunk_parts(&z, index, &at, decoded, add, &parts, &err) < 0) {
        check_err(&err);
    } else {
        ckpt_zarr_chunk_box(&z, index, &whole);
        for (uint32_t d = 0; d < z.rank; d++)
            MUST(whole.lo[d] == 0);
        MUST(ckpt_boxes_cover(whole.n, z.rank, parts.box, parts.n, &bad, &err) == 0);
    }
    ckpt_decoded_unref(decoded);
    return 0;
}
