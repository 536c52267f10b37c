/* SPDX-License-Identifier: Apache-2.0 */
/* Wants by chance: what ranks share is drawn from the job's generator, the rest from the rank's. */
#include "random_wants.h"

#include <string.h>

#include "random.h"

static void random_box(uint64_t *rng, const struct ckpt_tensor_info *t, uint64_t *lo, uint64_t *n)
{
    for (uint32_t d = 0; d < t->rank; d++) {
        lo[d] = t->shape[d] ? random_range(rng, 0, t->shape[d]) : 0;
        n[d] = t->shape[d] ? random_range(rng, 0, t->shape[d] - lo[d]) + 1 : 0;
    }
}

/* The same mesh and placements on all ranks. */
static int random_part(struct ckpt_load *load, uint64_t *shared, uint32_t ranks,
                       const struct ckpt_tensor_info *t, const struct ckpt_dest *dest,
                       struct ckpt_err *err)
{
    uint32_t dim[2] = {1, ranks};
    struct ckpt_placement place[2];

    for (uint32_t k = 2; k <= ranks; k++)
        if (ranks % k == 0 && random_range(shared, 0, 2)) {
            dim[0] = k;
            dim[1] = ranks / k;
        }
    for (int m = 0; m < 2; m++) {
        place[m].kind =
            t->rank ? (enum ckpt_placement_kind)random_range(shared, 0, 3) : CKPT_REPLICATE;
        place[m].dim = t->rank ? (uint32_t)random_range(shared, 0, t->rank) : 0;
    }
    const struct ckpt_mesh mesh = {.size = sizeof mesh, .ndim = 2, .dim = dim};
    return ckpt_load_want_part(load, t->name, NULL, NULL, &mesh, place, dest, NULL, err);
}

/* One tensor's. */
static int random_want(struct ckpt_load *load, const struct ckpt_tensor_info *t, uint32_t ranks,
                       uint64_t *shared, uint64_t *own, struct ckpt_err *err)
{
    static const char *const dtypes[] = {"F32", "bfloat16", "F16", NULL};
    const bool is_float =
        (t->dtype[0] == 'F' && t->dtype[1] != '8') || strcmp(t->dtype, "BF16") == 0;
    uint64_t lo[CKPT_LOAD_RANK], n[CKPT_LOAD_RANK];
    struct ckpt_dest dest = {.size = sizeof dest};

    if (is_float && random_range(own, 0, 3) == 0)
        dest.dtype = dtypes[random_range(own, 0, 4)];
    random_box(own, t, lo, n);
    switch (random_range(shared, 0, 4)) {
    case 0:
        return ckpt_load_want(load, t->name, lo, n, &dest, NULL, err);
    case 1: /* some do not want it at all */
        if (!random_range(own, 0, 2))
            return 0;
        return ckpt_load_want(load, t->name, NULL, NULL, &dest, NULL, err);
    default:
        return random_part(load, shared, ranks, t, &dest, err);
    }
}

int random_wants(struct ckpt_load *load, struct ckpt_view *view, uint32_t ranks, uint32_t number,
                 uint64_t seed, struct ckpt_err *err)
{
    uint64_t shared = seed, own = seed * 31 + number + 1;

    for (size_t i = 0; i < ckpt_view_tensors(view); i++) {
        struct ckpt_tensor_info t = {.size = sizeof t};
        (void)ckpt_view_tensor(view, i, &t, NULL);
        if (random_want(load, &t, ranks, &shared, &own, err) < 0)
            return -1;
    }
    return 0;
}
