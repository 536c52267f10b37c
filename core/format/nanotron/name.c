/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing nanotron's file names. */
#include "format/nanotron/name.h"

#include <string.h>

#include "base/str.h"
#include "base/take.h"

#define SUFFIX ".safetensors"

bool ckpt_nt_take_rank(const char **s, const char *axis, const char *separator,
                       struct ckpt_nt_rank *ret)
{
    const char *p = *s;
    uint64_t rank, size;

    if (!ckpt_take_text(&p, "_") || !ckpt_take_text(&p, axis) || !ckpt_take_text(&p, separator) ||
        !ckpt_take_u64(&p, &rank) || !ckpt_take_text(&p, "-of-") || !ckpt_take_u64(&p, &size) ||
        rank >= size || size > UINT32_MAX)
        return false;
    *ret = (struct ckpt_nt_rank){(uint32_t)rank, (uint32_t)size};
    *s = p;
    return true;
}

/* Parse the ranks at s. Returns the rest of the name, or NULL. */
static const char *take_ranks(const char *s, struct ckpt_nt_name *ret)
{
    if (!ckpt_nt_take_rank(&s, "pp", "-rank-", &ret->pp) ||
        !ckpt_nt_take_rank(&s, "tp", "-rank-", &ret->tp))
        return NULL;
    ret->has_ep = ckpt_nt_take_rank(&s, "exp", "-rank-", &ret->ep);
    ret->sharded = true;
    return s;
}

static bool leaf_ok(const struct ckpt_nt_name *n)
{
    return n->leaf_len > 0 && !memchr(n->leaf, '.', n->leaf_len);
}

/* Parse the last form of names, "model_LEAF.safetensors_pp-rank-...", of which the part after the
 * first "model_" is given. Real files have the suffix again at the end; copies that have lost it
 * are accepted. */
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
    /* unreleased code wrote shards without LEAF, which is not a parameter's name */
    return leaf_ok(ret) && !ckpt_has_prefix(ret->leaf, "pp-rank-");
}

struct ckpt_nt_topology ckpt_nt_name_topology(const struct ckpt_nt_name *name)
{
    return (struct ckpt_nt_topology){name->pp.size, name->tp.size,
                                     name->has_ep ? name->ep.size : 0};
}

static bool size_fits(uint32_t a, uint32_t b) { return a == b || a == 0 || b == 0; }

bool ckpt_nt_topology_fits(const struct ckpt_nt_topology *a, const struct ckpt_nt_topology *b)
{
    return size_fits(a->pp, b->pp) && size_fits(a->tp, b->tp) && size_fits(a->ep, b->ep);
}
