/* SPDX-License-Identifier: Apache-2.0 */
/* Computing the interval of a data-parallel rank, and the boxes that an interval consists of. */
#include "format/nanotron/zero.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/ckd.h"
#include "base/str.h"

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

size_t ckpt_nt_pair_clip(const struct ckpt_nt_pair *pair, const uint64_t *local_dim,
                         const struct ckpt_nt_interval *in, struct ckpt_nt_pair out[CKPT_MAX_SPANS])
{
    const uint32_t rank = pair->local.rank;
    struct ckpt_span span[CKPT_MAX_SPANS];
    uint64_t stride[CKPT_MAX_RANK], first = 0;

    if (ckpt_box_numel(&pair->local) == 0)
        return 0;
    ckpt_shape_strides(local_dim, rank, stride);
    for (uint32_t d = 0; d < rank; d++)
        first += pair->local.lo[d] * stride[d];
    if (in->hi <= first)
        return 0;
    size_t n = ckpt_axes_clip(pair->local.n, stride, rank, in->lo > first ? in->lo - first : 0,
                              in->hi - first, span);
    for (size_t i = 0; i < n; i++) {
        out[i].local.rank = out[i].global.rank = rank;
        for (uint32_t d = 0; d < rank; d++) {
            out[i].local.lo[d] = pair->local.lo[d] + span[i].lo[d];
            out[i].global.lo[d] = pair->global.lo[d] + span[i].lo[d];
            out[i].local.n[d] = out[i].global.n[d] = span[i].n[d];
        }
    }
    return n;
}
