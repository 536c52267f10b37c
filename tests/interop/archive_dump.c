/* SPDX-License-Identifier: Apache-2.0 */
/* What ckpt_torch_out writes around a tensor: archive_dump DTYPE HEAD TAIL [DIMENSION...] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "container/torch_out.h"
#include "tensor/box.h"

static int save(const char *path, const char *bytes, size_t len)
{
    FILE *f = fopen(path, "wb");
    const size_t n = f ? fwrite(bytes, 1, len, f) : 0;

    return f && fclose(f) == 0 && n == len ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct ckpt_str text = {0};
    struct ckpt_torch_out t = {.rank = (uint32_t)argc - 4};
    uint64_t dim[CKPT_MAX_RANK];
    size_t at;

    if (argc < 4 || t.rank > CKPT_MAX_RANK || !ckpt_dtype_parse(argv[1], strlen(argv[1]), &t.dtype))
        return 2;
    t.dim = dim;
    t.nbytes = ckpt_dtype_size(t.dtype);
    for (uint32_t d = 0; d < t.rank; d++)
        t.nbytes *= dim[d] = strtoull(argv[4 + d], NULL, 10);
    ckpt_torch_out(&t, &text, &at);
    const int bad = text.failed || save(argv[2], text.ptr, at) != 0 ||
                    save(argv[3], text.ptr + at, text.len - at) != 0;
    ckpt_str_release(&text);
    return bad;
}
