/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's slice metadata. Input: shape, the file's shape, pairs, version, a line each. */
#include "fuzz.h"

#include "format/nanotron/shards.h"

/* What three ranks have of a pair is all of it. */
static void check_clip(const struct ckpt_box_pair *pair, const uint64_t *local)
{
    struct ckpt_box_pair piece[CKPT_MAX_SPANS];
    const uint32_t rank = pair->local.rank;
    uint64_t numel, sum = 0;

    if (!ckpt_shape_numel(local, rank, &numel) || numel >= UINT64_MAX / 2)
        return;
    for (uint32_t dp = 0; dp < 3; dp++) {
        const struct ckpt_nt_interval in = ckpt_nt_zero_share(numel, dp, 3);
        const size_t n = ckpt_pair_clip(pair, local, in.lo, in.hi, piece);
        MUST(n < CKPT_MAX_SPANS);
        for (size_t i = 0; i < n; i++) {
            MUST(ckpt_box_within(&piece[i].local, local, rank));
            sum += ckpt_box_numel(&piece[i].local);
        }
    }
    MUST(sum == ckpt_box_numel(&pair->local));
}

static void check_pairs(const char *text, const uint64_t *local, const uint64_t *dim, uint32_t rank)
{
    struct ckpt_box_pair *pair;
    struct ckpt_err err = {0};
    size_t n;

    if (ckpt_nt_pairs_parse(text, local, dim, rank, &pair, &n, &err) < 0) {
        check_err(&err);
        return;
    }
    MUST(n > 0 && n <= CKPT_NT_MAX_PAIRS);
    for (size_t i = 0; i < n; i++) {
        MUST(ckpt_box_within(&pair[i].local, local, rank));
        MUST(ckpt_box_within(&pair[i].global, dim, rank));
        MUST(memcmp(pair[i].local.n, pair[i].global.n, rank * sizeof pair[i].local.n[0]) == 0);
        check_clip(&pair[i], local);
    }
    free(pair);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, size};
    char *shape = input_text(&in, '\n'), *local = input_text(&in, '\n');
    char *pairs = input_text(&in, '\n'), *version = input_text(&in, '\n');
    char *file = input_text(&in, '\n');
    uint64_t dim[CKPT_MAX_RANK], local_dim[CKPT_MAX_RANK];
    uint32_t rank, local_rank;
    struct ckpt_nt_name name;
    struct ckpt_err err = {0};

    if (ckpt_nt_shape_parse(shape, dim, &rank, &err) < 0)
        check_err(&err);
    else if (ckpt_nt_shape_parse(local, local_dim, &local_rank, &err) == 0 && local_rank == rank)
        check_pairs(pairs, local_dim, dim, rank);
    err.code = CKPT_OK;
    if (ckpt_nt_version_check(version, &err) < 0)
        check_err(&err);
    if (ckpt_nt_name_parse(file, &name)) {
        MUST(name.leaf >= file && name.leaf_len > 0 &&
             name.leaf + name.leaf_len <= file + strlen(file));
        MUST(!name.sharded || (name.tp.rank < name.tp.size && name.pp.rank < name.pp.size));
    }
    free(shape);
    free(local);
    free(pairs);
    free(version);
    free(file);
    return 0;
}
