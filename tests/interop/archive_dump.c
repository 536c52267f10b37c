/* SPDX-License-Identifier: Apache-2.0 */
/* What ckpt_torch_out writes around a tensor: archive_dump DTYPE HEAD TAIL [DIMENSION...] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "container/torch_out.h"
#include "tensor/box.h"

static int save(const char *path, const struct ckpt_str *text)
{
    FILE *f = fopen(path, "wb");
    const size_t n = f ? fwrite(text->ptr, 1, text->len, f) : 0;

    return f && fclose(f) == 0 && n == text->len && !text->failed ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct ckpt_str head = {0}, tail = {0};
    struct ckpt_torch_out t = {.rank = (uint32_t)argc - 4};
    uint64_t dim[CKPT_MAX_RANK];

    if (argc < 4 || t.rank > CKPT_MAX_RANK || !ckpt_dtype_parse(argv[1], strlen(argv[1]), &t.dtype))
        return 2;
    t.dim = dim;
    t.nbytes = ckpt_dtype_size(t.dtype);
    for (uint32_t d = 0; d < t.rank; d++)
        t.nbytes *= dim[d] = strtoull(argv[4 + d], NULL, 10);
    ckpt_torch_out(&t, &head, &tail);
    const int bad = save(argv[2], &head) | save(argv[3], &tail);
    ckpt_str_release(&head);
    ckpt_str_release(&tail);
    return bad;
}
