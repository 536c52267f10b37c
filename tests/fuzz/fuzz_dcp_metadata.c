/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a .metadata file; twice, it is those of two ranks. */
#include "fuzz.h"

#include "format/dcp/metadata.h"

static void add(const uint8_t *data, size_t size, int times)
{
    struct ckpt_dcp_metadata m = {0};
    struct ckpt_source *s = NULL;
    struct ckpt_err err = {0};
    int result = 0;

    MUST(ckpt_source_mem_new("input", data, size, &s, &err) == 0);
    for (int i = 0; i < times && result == 0; i++)
        result = ckpt_dcp_metadata_add(&m, s, times > 1, &err);
    if (result == 0)
        result = ckpt_dcp_metadata_finish(&m, &err);
    if (result < 0)
        check_err(&err);
    for (size_t i = 0; result == 0 && i < m.tensors.len; i++) {
        const struct ckpt_dcp_tensor *t = &m.tensors.ptr[i];
        MUST(ckpt_dcp_rank(&m, t->dim) <= CKPT_MAX_RANK && t->first + t->nchunk <= m.chunks.len);
        for (size_t k = t->first; k < t->first + t->nchunk; k++) {
            const struct ckpt_dcp_chunk *c = &m.chunks.ptr[k];
            MUST(c->tensor == i && ckpt_dcp_rank(&m, c->lo) <= CKPT_MAX_RANK);
            MUST(ckpt_dcp_rank(&m, c->n) <= CKPT_MAX_RANK);
            MUST(c->file == CKPT_DCP_NOWHERE || c->file < m.files.len);
        }
    }
    ckpt_dcp_metadata_release(&m);
    ckpt_source_unref(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    add(data, size, 1);
    add(data, size, 2);
    return 0;
}
