/* SPDX-License-Identifier: Apache-2.0 */
/* The input is a stream compressed by zstd: all of what is accepted reads back, the same each time,
 * and is no longer than was allowed. */
#include "fuzz.h"

#include "base/mem.h"
#include "container/zstd.h"

enum { MOST = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ckpt_cleanup(ckpt_source_unrefp) struct ckpt_source *file = NULL, *s = NULL;
    struct ckpt_decoded *store = NULL;
    struct ckpt_err err = {0};

    MUST(ckpt_source_mem_new("file", data, size, &file, &err) == 0);
    MUST(ckpt_decoded_new(0, NULL, &store, &err) == 0);
    if (ckpt_source_zstd_new(store, file, 0, size, MOST, &s, &err) < 0) {
        check_err(&err);
    } else {
        const size_t len = (size_t)s->size, part = len < 1000 ? len : 1000;
        ckpt_cleanup(ckpt_freep) unsigned char *all = malloc(len + 1), *some = malloc(part + 1);
        MUST(len <= MOST && all && some);
        MUST(ckpt_source_pread(s, some, part, 0, &err) == 0);
        MUST(ckpt_source_pread(s, all, len, 0, &err) == 0 && memcmp(all, some, part) == 0);
        MUST(ckpt_source_pread(s, some, part, len - part, &err) == 0);
        MUST(memcmp(all + len - part, some, part) == 0);
    }
    ckpt_decoded_unref(store);
    return 0;
}
