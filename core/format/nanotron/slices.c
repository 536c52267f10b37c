/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing nanotron's slice metadata, and the names of its files. */
#include "format/nanotron/shards.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"

static bool take_number(const char **s, uint64_t *ret)
{
    return ckpt_take_u64(s, ret) && *ret <= INT64_MAX;
}

/* Parse 64, or np.int64(64) of any width. */
static bool take_size(const char **s, uint64_t *ret)
{
    if (!ckpt_take_text(s, "np.int"))
        return take_number(s, ret);
    *s += strspn(*s, "0123456789");
    return ckpt_take_text(s, "(") && take_number(s, ret) && ckpt_take_text(s, ")");
}

int ckpt_nt_shape_parse(const char *text, uint64_t *ret_dim, uint32_t *ret_rank,
                        struct ckpt_err *err)
{
    const char *s = text;
    uint32_t rank = 0;
    bool ok = ckpt_take_text(&s, "("), closed = ckpt_take_text(&s, ")");

    while (ok && !closed) {
        if (rank == CKPT_MAX_RANK)
            return ckpt_fail(err, CKPT_LIMIT, "unsharded_shape '%s' has more than %d dimensions",
                             text, CKPT_MAX_RANK);
        ok = take_size(&s, &ret_dim[rank]);
        rank++;
        bool comma = ok && ckpt_take_text(&s, ",");
        if (comma)
            (void)ckpt_take_text(&s, " ");
        closed = ok && ckpt_take_text(&s, ")");
        if (closed && rank == 1 && !comma)
            ok = false; /* "(64)" is a number, not a tuple */
        if (!closed && !comma)
            ok = false;
    }
    if (!ok || *s)
        return ckpt_fail(err, CKPT_FORMAT, "unsharded_shape '%s' is not a tuple of sizes", text);
    *ret_rank = rank;
    return 0;
}

static bool take_bound(const char **s, uint64_t none, uint64_t *ret)
{
    if (ckpt_take_text(s, "None")) {
        *ret = none;
        return true;
    }
    return take_number(s, ret);
}

/* Parse start,stop,step for a dimension of this size. The writer uses no step except None (or 1)
 * and no negative numbers. */
static bool take_slice(const char **s, uint64_t dim, uint64_t *ret_lo, uint64_t *ret_n)
{
    uint64_t lo, hi, step;

    if (!take_bound(s, 0, &lo) || !ckpt_take_text(s, ",") || !take_bound(s, dim, &hi) ||
        !ckpt_take_text(s, ",") || !take_bound(s, 1, &step) || step != 1 || lo > hi || hi > dim)
        return false;
    *ret_lo = lo;
    *ret_n = hi - lo;
    return true;
}

static bool take_slices(const char **s, const uint64_t *dim, uint32_t rank, struct ckpt_box *ret)
{
    ret->rank = rank;
    for (uint32_t d = 0; d < rank; d++)
        if ((d > 0 && !ckpt_take_text(s, "|")) || !take_slice(s, dim[d], &ret->lo[d], &ret->n[d]))
            return false;
    return true;
}

int ckpt_nt_pairs_parse(const char *text, const uint64_t *local_dim, const uint64_t *dim,
                        uint32_t rank, struct ckpt_box_pair **ret_pairs, size_t *ret_n,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_box_pair *pairs = NULL;
    const char *s = text;
    size_t n = 1;

    for (const char *at = text; (at = strchr(at, ';')); at++)
        n++;
    if (n > CKPT_NT_MAX_PAIRS)
        return ckpt_fail(err, CKPT_LIMIT, "local_global_slices_pairs: more than %d pairs",
                         CKPT_NT_MAX_PAIRS);
    if (!(pairs = malloc(n * sizeof *pairs)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        if ((i > 0 && !ckpt_take_text(&s, ";")) ||
            !take_slices(&s, local_dim, rank, &pairs[i].local) || !ckpt_take_text(&s, "#") ||
            !take_slices(&s, dim, rank, &pairs[i].global))
            return ckpt_fail(err, CKPT_FORMAT,
                             "local_global_slices_pairs: not slices of the file's and the whole "
                             "tensor's shape at byte %td of '%s'",
                             s - text, text);
        if (memcmp(pairs[i].local.n, pairs[i].global.n, rank * sizeof pairs[i].local.n[0]) != 0)
            return ckpt_fail(err, CKPT_FORMAT,
                             "local_global_slices_pairs: pair %zu of '%s' has two sizes", i, text);
    }
    if (*s)
        return ckpt_fail(err, CKPT_FORMAT, "local_global_slices_pairs has an unexpected '%s'", s);
    *ret_pairs = ckpt_steal(&pairs);
    *ret_n = n;
    return 0;
}

int ckpt_nt_version_check(const char *text, struct ckpt_err *err)
{
    static const uint64_t newest[2] = {1, 5};
    const char *s = text;
    uint64_t part;
    int order = 0; /* of the parts so far, against newest */

    for (size_t i = 0; i == 0 || ckpt_take_text(&s, "."); i++) {
        uint64_t ref = i < 2 ? newest[i] : 0;
        if (!take_number(&s, &part))
            return ckpt_fail(err, CKPT_FORMAT,
                             "version '%s' is not a sequence of integers and dots", text);
        if (order == 0)
            order = (part > ref) - (part < ref);
    }
    if (*s)
        return ckpt_fail(err, CKPT_FORMAT, "version '%s' is not a sequence of integers and dots",
                         text);
    if (order > 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "checkpoint version %s is newer than 1.5, the newest that is known", text);
    return 0;
}

/* ---- ZeRO-1 ---- */

struct ckpt_nt_interval ckpt_nt_zero_share(uint64_t numel, uint32_t rank, uint32_t size)
{
    const uint64_t each = numel / size, longer = numel % size;
    const uint64_t lo = rank * each + ckpt_min_u64(rank, longer);

    return (struct ckpt_nt_interval){lo, lo + each + (rank < longer)};
}

/* An offset, which is the string "118" or the number 118. */
static bool offset_of(const json_t *j, uint64_t *ret)
{
    const char *text = json_string_value(j);
    unsigned long long v;

    if (text && !ckpt_parse_u64(text, strlen(text), &v))
        return false;
    if (!text && (!json_is_integer(j) || json_integer_value(j) < 0))
        return false;
    *ret = text ? v : (uint64_t)json_integer_value(j);
    return true;
}

int ckpt_nt_zero_interval(const json_t *offsets, const char *param, uint64_t numel, uint32_t rank,
                          uint32_t size, struct ckpt_nt_interval *ret, struct ckpt_err *err)
{
    const json_t *ranks = json_object_get(offsets, param);
    struct ckpt_nt_interval own;
    char key[16];

    if (!ranks) {
        *ret = ckpt_nt_zero_share(numel, rank, size);
        return 0;
    }
    (void)snprintf(key, sizeof key, "%" PRIu32, rank);
    const json_t *pair = json_object_get(ranks, key);
    if (!pair)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "param_name_to_dp_rank_offsets says that dp-rank %s has nothing of it",
                         key);
    if (json_array_size(pair) != 2 || !offset_of(json_array_get(pair, 0), &own.lo) ||
        !offset_of(json_array_get(pair, 1), &own.hi))
        return ckpt_fail(err, CKPT_FORMAT,
                         "param_name_to_dp_rank_offsets of dp-rank %s are not two offsets", key);
    if (own.lo > own.hi || own.hi > numel)
        return ckpt_fail(err, CKPT_FORMAT,
                         "param_name_to_dp_rank_offsets of dp-rank %s are %" PRIu64 "..%" PRIu64
                         ", the parameter has %" PRIu64 " elements",
                         key, own.lo, own.hi, numel);
    *ret = own;
    return 0;
}

/* ---- names of files ---- */

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
