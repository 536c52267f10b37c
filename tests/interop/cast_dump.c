/* SPDX-License-Identifier: Apache-2.0 */
/* cast_dump FROM TO [plain] < elements > elements: ckpt_dtype_cast as a filter. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/dtype.h"

int main(int argc, char **argv)
{
    enum ckpt_dtype from, to;
    size_t len = 0, cap = 1 << 20, n;
    char *in = malloc(cap);

    if (argc < 3 || !ckpt_dtype_parse(argv[1], strlen(argv[1]), &from) ||
        !ckpt_dtype_parse(argv[2], strlen(argv[2]), &to))
        return 2;
    while (in && (n = fread(in + len, 1, cap - len, stdin)) > 0)
        if ((len += n) == cap)
            in = realloc(in, cap *= 2);
    size_t numel = len / ckpt_dtype_size(from);
    char *out = malloc(numel * ckpt_dtype_size(to) + 1);
    if (!in || !out)
        return 2;
    (argc > 3 ? ckpt_dtype_cast_plain : ckpt_dtype_cast)(out, to, in, from, numel);
    n = fwrite(out, ckpt_dtype_size(to), numel, stdout);
    free(in);
    free(out);
    return n == numel ? 0 : 2;
}
