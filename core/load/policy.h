/* SPDX-License-Identifier: Apache-2.0 */
/* What a load does is decided here, once, from sizes and rates alone: who reads, how many threads,
 * past the page cache or not, how large windows and pieces are. The load and `ckpt plan` call the
 * same function, so that what is planned is what would run. */
#ifndef CKPT_LOAD_POLICY_H
#define CKPT_LOAD_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "io/direct.h"
#include "load/cost.h"
#include "load/load_inner.h"

/* All but `local` and `cpus` are the same on all ranks. */
struct ckpt_policy_input {
    const struct ckpt_load_options *opt; /* with its defaults filled in */
    struct ckpt_cost_input cost;
    uint32_t local; /* ranks of this rank's node, itself included */
    uint32_t cpus;  /* processors of this rank's node */
};

struct ckpt_policy {
    struct ckpt_rates rates; /* given or assumed */
    struct ckpt_cost cost;
    enum ckpt_readers readers; /* not AUTO */
    enum ckpt_direct direct;
    uint32_t threads;             /* of this rank */
    struct ckpt_load_share share; /* of each thread */
    uint64_t gap, run;            /* for ckpt_box_cost */
    struct ckpt_slots slots;
};

/* Decide. readers: those that opt asks for; AUTO takes the fastest. LIMIT if host_bytes or
 * device_bytes can hold no window; with AUTO only if no rank could read even for itself. */
int ckpt_policy_choose(const struct ckpt_policy_input *in, struct ckpt_policy *ret,
                       struct ckpt_err *err);

/* The same for given readers: what AUTO falls back on when a plan turns out not to fit. */
int ckpt_policy_sizes(const struct ckpt_policy_input *in, enum ckpt_readers readers,
                      struct ckpt_policy *ret, struct ckpt_err *err);

/* Readers of whom fewer share: ONCE, NODE, EACH. False after the last. */
bool ckpt_policy_less(enum ckpt_readers *readers);

#endif
