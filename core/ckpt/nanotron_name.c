/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing nanotron's file names. */
#include "ckpt/nanotron_name.h"

#include <string.h>

#include "base/str.h"

#define SUFFIX ".safetensors"

/* "_pp-rank-3-of-8" at *s; moves *s past it. A rank is below its size. */
static bool take_rank(const char **s, const char *axis, struct ckpt_nt_rank *ret)
{
    unsigned long long rank, size;
    const char *p = *s;

    if (*p++ != '_' || strncmp(p, axis, strlen(axis)) != 0)
        return false;
    p += strlen(axis);
    if (!ckpt_has_prefix(p, "-rank-"))
        return false;
    p += strlen("-rank-");
    size_t n = strspn(p, "0123456789");
    if (!ckpt_parse_u64(p, n, &rank) || !ckpt_has_prefix(p + n, "-of-"))
        return false;
    p += n + strlen("-of-");
    n = strspn(p, "0123456789");
    if (!ckpt_parse_u64(p, n, &size) || rank >= size || size > UINT32_MAX)
        return false;
    *ret = (struct ckpt_nt_rank){(uint32_t)rank, (uint32_t)size};
    *s = p + n;
    return true;
}

/* The ranks at s; what follows them in the name, or NULL. */
static const char *take_ranks(const char *s, struct ckpt_nt_name *ret)
{
    if (!take_rank(&s, "pp", &ret->pp) || !take_rank(&s, "tp", &ret->tp))
        return NULL;
    ret->has_ep = take_rank(&s, "exp", &ret->ep);
    ret->sharded = true;
    return s;
}

static bool leaf_ok(const struct ckpt_nt_name *n)
{
    return n->leaf_len > 0 && !memchr(n->leaf, '.', n->leaf_len);
}

/* "model_LEAF.safetensors_pp-rank-...", what follows the first "model_" of a broken name. Real
 * files have the suffix once more at their end; copies that lost it are read as well. */
static bool parse_broken(const char *ranks, struct ckpt_nt_name *ret)
{
    ret->broken = true;
    ret->leaf += strlen("model_");
    if (ranks <= ret->leaf)
        return false;
    ret->leaf_len = (size_t)(ranks - ret->leaf);
    const char *end = take_ranks(ranks + strlen(SUFFIX), ret);
    return leaf_ok(ret) && end && (!*end || strcmp(end, SUFFIX) == 0);
}

bool ckpt_nt_name_parse(const char *name, struct ckpt_nt_name *ret)
{
    const char *ranks, *end;

    *ret = (struct ckpt_nt_name){.leaf = name + strlen("model_")};
    if (!ckpt_has_prefix(name, "model_"))
        return false;
    if ((ranks = strstr(name, SUFFIX "_pp-rank-")) && ckpt_has_prefix(ret->leaf, "model_"))
        return parse_broken(ranks, ret);
    if (!ckpt_has_suffix(name, SUFFIX))
        return false;
    if ((ranks = strstr(ret->leaf, "_pp-rank-"))) {
        ret->leaf_len = (size_t)(ranks - ret->leaf);
        end = take_ranks(ranks, ret);
        return leaf_ok(ret) && end && strcmp(end, SUFFIX) == 0;
    }
    size_t len = strlen(ret->leaf);
    if (len < strlen(SUFFIX))
        return false;
    ret->leaf_len = len - strlen(SUFFIX);
    /* some unreleased code wrote shards without LEAF: that is no parameter's name */
    return leaf_ok(ret) && !ckpt_has_prefix(ret->leaf, "pp-rank-");
}
