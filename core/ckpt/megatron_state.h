/* SPDX-License-Identifier: Apache-2.0 */
/* What a Megatron checkpoint says of itself beside its tensors: the run's arguments, the iteration.
 *
 * Written by torch.save: common.pt, the object common_state/shard_0_1, a rank's model_optim_rng.pt,
 * the object args. Classes that are not known are opaque; nothing is called. */
#ifndef CKPT_CKPT_MEGATRON_STATE_H
#define CKPT_CKPT_MEGATRON_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "container/pickle.h"
#include "io/source.h"

struct ckpt_megatron_state {
    json_t *args; /* an object, or NULL: there are none */
    uint64_t iteration;
    double version; /* checkpoint_version */
    bool has_iteration, has_version;
};

void ckpt_megatron_state_release(struct ckpt_megatron_state *st);

/* A size that the run's arguments say, or 0. */
uint64_t ckpt_megatron_state_size(const struct ckpt_megatron_state *st, const char *key);

/* Take what a pickled dict (or a list of one, or the arguments alone) says; the first word counts.
 * UNSUPPORTED: the pickle asks for a call that only an attack needs. */
int ckpt_megatron_state_take(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                             struct ckpt_err *err);

/* The same from a torch.save archive: bytes [off, off+len) of s. */
int ckpt_megatron_state_read(struct ckpt_megatron_state *st, struct ckpt_source *s, uint64_t off,
                             uint64_t len, struct ckpt_err *err);

/* One fact as an object of its own: "iteration" or "checkpoint_version". */
int ckpt_megatron_state_read_fact(struct ckpt_megatron_state *st, const char *name,
                                  struct ckpt_source *s, uint64_t off, uint64_t len,
                                  struct ckpt_err *err);

#endif
