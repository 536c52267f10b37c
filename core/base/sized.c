/* SPDX-License-Identifier: Apache-2.0 */
/* Public structs that a caller allocates: their size is their version. */
#include "base/sized.h"

#include <string.h>

#include "base/err.h"

void ckpt_sized_give(void *theirs, const void *own, size_t len)
{
    const size_t head = sizeof(size_t), size = *(const size_t *)theirs;
    const size_t n = size < len ? size : len;

    if (n > head)
        memcpy((char *)theirs + head, (const char *)own + head, n - head);
}

int ckpt_sized_take(void *own, size_t len, const void *theirs, const char *name,
                    struct ckpt_err *err)
{
    const size_t size = *(const size_t *)theirs;

    if (size <= sizeof size || size > len)
        return ckpt_fail(err, CKPT_USAGE, "struct %s has %zu bytes here, the caller's %zu", name,
                         len, size);
    memcpy(own, theirs, size);
    *(size_t *)own = len;
    return 0;
}
