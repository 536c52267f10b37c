/* SPDX-License-Identifier: Apache-2.0 */
/* How a dimension is divided over ranks, as the annotations of its pattern say: "X/tp". */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "recipe/language/pattern.h"

enum ckpt_way { CKPT_TP, CKPT_EP, CKPT_FSDP, CKPT_DP, CKPT_PP, CKPT_WAYS }; /* WAYS: none */

enum { CKPT_SHARES = 64 };

/* How [lo, lo+n) of a dimension is divided over the ranks of `way` (WAYS: not divided). `groups` is
 * a number of equal groups (such as heads) that must each stay whole, or 0. If it is shared,
 * several ranks may have the same group: key and value heads, state groups. */
struct ckpt_share {
    uint64_t lo, n, groups;
    enum ckpt_way way;
    bool shared;
    bool of_experts;  /* the ranks are those that divide an expert, which are TP's of their own */
    const char *what; /* name of the groups, for messages */
};

struct ckpt_shares {
    struct ckpt_share share[CKPT_SHARES];
    size_t n;
};

/* Is the factor, or one inside it, annotated? */
bool ckpt_factor_is_marked(const struct ckpt_factor *f);

/* Get the shares of a dimension of n elements with the pattern f; NULL: it is not divided. A dim
 * whose size is not known is solved for. `tensor` is for messages. MISSING: a size is not known.
 * CONFLICT: the sizes do not give n. */
int ckpt_shares_of(const struct ckpt_factor *f, uint64_t n, struct ckpt_sizes *sizes,
                   const char *tensor, struct ckpt_shares *ret, struct ckpt_err *err);

/* The number of different parts among `tp` ranks: less than tp if heads are shared; 0: the division
 * is not possible. */
uint32_t ckpt_share_parts(const struct ckpt_share *s, uint32_t tp);
