/* SPDX-License-Identifier: Apache-2.0 */
/* Growth of CKPT_VEC. */
#include "base/vec.h"

#include "base/ckd.h"

int ckpt_vec_reserve_(void **ptr, size_t *cap, size_t len, size_t more, size_t size)
{
    size_t need, bytes, grown;

    if (ckd_add(&need, len, more))
        return -1;
    if (need <= *cap)
        return 0;
    grown = *cap < 8 ? 8 : *cap + *cap / 2;
    if (grown < need)
        grown = need;
    if (ckd_mul(&bytes, grown, size))
        return -1;
    void *p = realloc(*ptr, bytes);
    if (!p)
        return -1;
    *ptr = p;
    *cap = grown;
    return 0;
}

void ckpt_vec_shrink_(void **ptr, size_t *cap, size_t len, size_t size)
{
    void *p = len && len < *cap ? realloc(*ptr, len * size) : NULL;

    if (p) {
        *ptr = p;
        *cap = len;
    }
}
