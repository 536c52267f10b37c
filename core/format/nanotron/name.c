/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing nanotron's file names. */
#include "format/nanotron/name.h"

#include <string.h>

#include "base/str.h"
#include "base/take.h"

#define SUFFIX ".safetensors"

/* Parse "_pp-rank-3-of-8" at *s and move *s past it. A rank must be less than its size. */
static bool take_rank(const char **s, const char *axis, struct ckpt_nt_rank *ret)
{
    const char *p = *s;
    uint64_t rank, size;

    if (!ckpt_take_text(&p, "_") || !ckpt_take_text(&p, axis) || !ckpt_take_text(&p, "-rank-") ||
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

bool ckpt_nt_name_fits(const struct ckpt_nt_name *name, const struct ckpt_nt_topology *t)
{
    const struct ckpt_nt_topology own = ckpt_nt_name_topology(name);

    return !name->sharded ||
           (own.pp == t->pp && own.tp == t->tp && (own.ep == 0 || t->ep == 0 || own.ep == t->ep));
}
