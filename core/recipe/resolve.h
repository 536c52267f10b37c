/* SPDX-License-Identifier: Apache-2.0 */
/* From the name of a target tensor to the rule that gives it and its sources in the checkpoint.
 *
 * Rules are indexed by the skeletons of their names, so that a look-up costs a hash, not a walk
 * over all rules. */
#ifndef CKPT_RECIPE_RESOLVE_H
#define CKPT_RECIPE_RESOLVE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/file.h"
#include "recipe/lower.h"
#include "recipe/settings.h"
#include "tensor/catalog.h"

/* A side of a rule as an entry of an index. */
struct ckpt_name_entry {
    uint32_t rule, side, spelling;
    uint32_t next;                   /* UINT32_MAX: none */
    uint64_t max[CKPT_NAME_NUMBERS]; /* sources: the greatest numbers found */
    bool found;
};

struct ckpt_name_index {
    struct ckpt_map map;
    CKPT_VEC(struct ckpt_name_entry) entry;
};

/* A rule with the sizes that are known before any tensor is looked at. */
struct ckpt_rule_state {
    struct ckpt_sizes sizes;
    bool active;
};

struct ckpt_resolver {
    const struct ckpt_recipe *recipe;
    const struct ckpt_catalog *src;
    struct ckpt_settings *set;
    struct ckpt_rule_state *state; /* of each rule */
    struct ckpt_name_index targets, sources;
    struct ckpt_arena keys; /* of the indices */
    struct ckpt_str buf;
    struct ckpt_err *err;
};

/* Index the rules, evaluate their conditions, count the numbers in the checkpoint's names. All is
 * borrowed; err is where later failures go, too. Zeroed before; release after failure too. */
int ckpt_resolver_init(struct ckpt_resolver *rs, const struct ckpt_recipe *recipe,
                       const struct ckpt_catalog *src, struct ckpt_settings *set,
                       struct ckpt_err *err);
void ckpt_resolver_release(struct ckpt_resolver *rs);

enum ckpt_presence { CKPT_ABSENT, CKPT_PARTIAL, CKPT_PRESENT };

struct ckpt_resolution {
    enum ckpt_presence presence;
    char *missing; /* a source that is not there; owned; NULL if no rule speaks of the target */
};

/* Free the resolution's instance and text. */
void ckpt_resolution_release(struct ckpt_resolution *r);

/* Find the rule that delivers `name`; if it is PRESENT, `in` is its instance (in->target is name).
 * `all`: also rules whose condition is false. CONFLICT: two rules deliver, or two spellings of one
 * source are there. */
int ckpt_resolve(struct ckpt_resolver *rs, const char *name, size_t len, bool all,
                 struct ckpt_instance *in, struct ckpt_resolution *ret);

/* The other way round: the rule that takes `t`; in->use says as which of its sources, side and
 * target of the instance are the caller's. *ret_found is false if there is none. CONFLICT: two
 * rules do. */
int ckpt_resolve_source(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                        struct ckpt_instance *in, bool *ret_found);

/* A source side of a rule that a tensor's name fits. */
struct ckpt_source_side {
    const struct ckpt_rule *rule;
    const struct ckpt_sizes *sizes; /* known without tensors */
    uint32_t side, spelling;
    uint32_t next; /* inner; UINT32_MAX before the first */
    bool begun;
};

/* The next one; false: there is none. Only of rules whose condition is not false. */
bool ckpt_resolver_next_side(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                             struct ckpt_source_side *at);

/* The name with these values of its axes, into out. False: there is no such number. */
bool ckpt_resolver_render(struct ckpt_resolver *rs, const struct ckpt_name *n,
                          const struct ckpt_sizes *sizes, const uint64_t *at, struct ckpt_str *out);

#endif
