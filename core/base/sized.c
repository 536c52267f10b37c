/* SPDX-License-Identifier: Apache-2.0 */
/* Public structs that a caller allocates: their size is their version. */
#include "base/sized.h"

#include <string.h>

#include "base/err.h"

int ckpt_sized_check(const void *theirs, const char *name, struct ckpt_err *err)
{
    const size_t size = *(const size_t *)theirs;

    return size > sizeof size ? 0
                              : ckpt_fail(err, CKPT_USAGE,
                                          "the caller's struct %s has size %zu: set its size to "
                                          "sizeof(struct %s) before the call",
                                          name, size, name);
}

int ckpt_sized_give(void *theirs, const void *own, size_t len, const char *name,
                    struct ckpt_err *err)
{
    const size_t head = sizeof(size_t), size = *(const size_t *)theirs;

    if (ckpt_sized_check(theirs, name, err) < 0)
        return -1;
    memcpy((char *)theirs + head, (const char *)own + head, (size < len ? size : len) - head);
    return 0;
}

int ckpt_sized_take(void *own, size_t len, const void *theirs, const char *name,
                    struct ckpt_err *err)
{
    const size_t size = *(const size_t *)theirs;

    if (ckpt_sized_check(theirs, name, err) < 0)
        return -1;
    if (size > len)
        return ckpt_fail(err, CKPT_USAGE, "struct %s has %zu bytes here, the caller's %zu", name,
                         len, size);
    memcpy(own, theirs, size);
    *(size_t *)own = len;
    return 0;
}
