/* SPDX-License-Identifier: Apache-2.0 */
/* Rearranging by a temporary rule with one source and one target. */
#include "recipe/apply/rearrange.h"

#include <string.h>

#include "recipe/apply/instance.h"

static int rearrange(struct ckpt_catalog *cat, struct ckpt_instance *in,
                     const struct ckpt_tensor *t, ckpt_drafts *drafts, struct ckpt_tensor *ret,
                     struct ckpt_err *err)
{
    static const struct ckpt_family no_dims;
    const struct ckpt_settings none = {.family = &no_dims};
    const struct ckpt_source_use use = {.tensor = t};
    struct ckpt_tensor own = *t;
    uint64_t dim[CKPT_MAX_RANK], *own_dim;
    uint32_t rank;

    if (ckpt_vec_push(&in->use, use) < 0)
        return ckpt_nomem(err);
    if (ckpt_instance_solve(in, &none, err) < 0 || ckpt_instance_shape(in, dim, &rank, err) < 0 ||
        ckpt_instance_lower(in, dim, rank, drafts, err) < 0)
        return -1;
    if (!(own_dim = ckpt_arena_alloc(&cat->arena, rank * sizeof *dim)))
        return ckpt_nomem(err);
    memcpy(own_dim, dim, rank * sizeof *dim);
    own.dim = own_dim;
    own.rank = (uint8_t)rank;
    if (ckpt_tensor_set_pieces(cat, &own, drafts->ptr, drafts->len, err) < 0)
        return -1;
    *ret = own;
    return 0;
}

int ckpt_rearrange(struct ckpt_catalog *cat, const struct ckpt_tensor *t, const char *from,
                   const char *to, struct ckpt_tensor *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    ckpt_cleanup(ckpt_instance_release) struct ckpt_instance in = {.target = t->name};
    const struct ckpt_rule_context cx = {
        .arena = &arena, .where = t->name, .from_at = "x  ", .to_at = "x  "};
    ckpt_rules rules = {0};
    ckpt_drafts drafts = {0};
    int result = -1;

    if (t->value)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'%s' is a computed tensor: it can't be mapped",
                         t->name);
    if (ckpt_rule_parse(&cx, &from, 1, &to, 1, &rules, err) == 0) {
        in.rule = &rules.ptr[0];
        in.sizes.scope = in.rule->scope;
        result = rearrange(cat, &in, t, &drafts, ret, err);
    }
    ckpt_vec_release(&drafts);
    ckpt_vec_release(&rules);
    return result;
}
