/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the rule, and the sources in the checkpoint, for the name of a target tensor. Rules are
 * indexed by the skeletons of their names, so a look-up costs a hash instead of a search through
 * all rules. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/apply/instance.h"
#include "recipe/library/file.h"
#include "recipe/library/settings.h"
#include "tensor/catalog.h"

/* A side of a rule as an entry of an index. */
struct ckpt_name_entry {
    uint32_t rule, side, spelling;
    uint32_t next;                   /* UINT32_MAX: none */
    uint64_t max[CKPT_NAME_NUMBERS]; /* for sources: the largest numbers found */
    bool found;
};

struct ckpt_name_index {
    struct ckpt_map map;
    CKPT_VEC(struct ckpt_name_entry) entry;
};

/* A rule with the sizes that are known before any tensor is read. */
struct ckpt_rule_state {
    struct ckpt_sizes sizes;
    bool active;
};

struct ckpt_resolver {
    const struct ckpt_recipe *recipe;
    const struct ckpt_catalog *src;
    struct ckpt_settings *set;
    struct ckpt_rule_state *state; /* one per rule */
    struct ckpt_name_index targets, sources;
    struct ckpt_arena keys; /* memory of the indices */
    struct ckpt_str buf;
    struct ckpt_err *err;
};

/* Index the rules, evaluate their conditions, and find the numbers in the checkpoint's names. All
 * arguments are borrowed; later failures are recorded in err too. *rs is zeroed by the caller, and
 * must be released after a failure too. */
int ckpt_resolver_init(struct ckpt_resolver *rs, const struct ckpt_recipe *recipe,
                       const struct ckpt_catalog *src, struct ckpt_settings *set,
                       struct ckpt_err *err);
void ckpt_resolver_release(struct ckpt_resolver *rs);

enum ckpt_presence { CKPT_ABSENT, CKPT_PARTIAL, CKPT_PRESENT };

struct ckpt_resolution {
    enum ckpt_presence presence;
    char *missing; /* a source that is missing; owned; NULL if no rule makes the target */
};

/* Free the resolution's instance and text. */
void ckpt_resolution_release(struct ckpt_resolution *r);

/* Find the rule that makes `name`; if the result is PRESENT, `in` is its instance (in->target is
 * name). all: include rules whose condition is false. CONFLICT: two rules make the tensor, or two
 * spellings of one source are stored. */
int ckpt_resolve(struct ckpt_resolver *rs, const char *name, size_t len, bool all,
                 struct ckpt_instance *in, struct ckpt_resolution *ret);

/* Find the rule that uses `t` as a source; in->use says which of its sources t is. The caller sets
 * the instance's side and target. *ret_found is false if there is none. CONFLICT: two rules use it.
 */
int ckpt_resolve_source(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                        struct ckpt_instance *in, bool *ret_found);

/* A source side of a rule that matches a tensor's name. */
struct ckpt_source_side {
    const struct ckpt_rule *rule;
    const struct ckpt_sizes *sizes; /* sizes that are known without tensors */
    uint32_t side, spelling;
    uint64_t at[CKPT_SCOPE_AXES]; /* values of the axes in the name */
    uint32_t next;                /* internal */
    bool begun;
};

/* Find the next source side that matches; false: there is none. *at is all zero before the first
 * call. Rules whose condition is false are skipped. */
bool ckpt_resolver_next_side(struct ckpt_resolver *rs, const struct ckpt_tensor *t,
                             struct ckpt_source_side *at);

/* Append the name with these values of its axes to out. False: the name cannot have these values.
 */
bool ckpt_resolver_render(struct ckpt_resolver *rs, const struct ckpt_name *n,
                          const struct ckpt_sizes *sizes, const uint64_t *at, struct ckpt_str *out);

/* ---- ranks ---- */

/* Ranked tensors, of which files only say "rank t of T", become ordinary ones: the sharding
 * annotations in the recipe say which part of a dimension rank t has.
 *
 *     (gate=f/tp + up=f/tp) h      rank t has the t-th part of gate, then the t-th part of up
 *     h f/tp                       rank t has the t-th part of the columns
 *     h                            every rank has all: the first one's serves
 *
 * A marked part whose local length is the known size of the whole is a copy too. */

/* Does any tensor have parts of ranks to be joined? */
bool ckpt_join_needed(const struct ckpt_catalog *src);

/* Make a new catalogue over the same sources in which ranked tensors are joined. Those that no rule
 * uses stay as they are. CONFLICT: two rules join a tensor differently, or the parts do not match.
 */
int ckpt_join(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
              struct ckpt_settings *set, struct ckpt_catalog **ret, struct ckpt_err *err);
