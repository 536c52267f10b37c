/* SPDX-License-Identifier: Apache-2.0 */
/* Putting the ranks' blocks of keys back into order. */
#include "format/dcp/order.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* Does planned contain each of 0 .. n - 1 once? first[i] becomes the position of the smallest
 * number among the positions up to i. */
static bool is_complete(const uint32_t *planned, size_t n, uint32_t *first, bool *seen)
{
    for (size_t i = 0; i < n; i++) {
        if (planned[i] >= n || seen[planned[i]])
            return false;
        seen[planned[i]] = true;
        first[i] = i && planned[first[i - 1]] < planned[i] ? first[i - 1] : (uint32_t)i;
    }
    return true;
}

int ckpt_dcp_order(const uint32_t *planned, size_t nplanned, size_t n, uint32_t *ret)
{
    ckpt_cleanup(ckpt_freep) uint32_t *first = calloc(n + 1, sizeof *first);
    ckpt_cleanup(ckpt_freep) bool *seen = calloc(n + 1, sizeof *seen);
    size_t len = 0;

    if (!first || !seen)
        return -1;
    if (nplanned != n || !is_complete(planned, n, first, seen)) {
        for (size_t i = 0; i < n; i++)
            ret[i] = (uint32_t)i;
        return 0;
    }
    /* `planned` has a block of tensors for each rank, the last rank's first. A block begins with
     * the first tensor of the rank's plan, and the plans are numbered rank after rank: so a block
     * begins where a number is smaller than all before it. Take the last block that is left, and
     * again:
     *
     *     planned   5 6 | 2 4 3 | 0 1      first   0 0 | 2 2 2 | 5 5
     *     ret       0 1 | 2 4 3 | 5 6 */
    for (size_t left = n; left > 0;) {
        const size_t begin = first[left - 1];
        memcpy(ret + len, planned + begin, (left - begin) * sizeof *ret);
        len += left - begin;
        left = begin;
    }
    return 0;
}
