/* SPDX-License-Identifier: Apache-2.0 */
/* Loading the tensors of a Megatron checkpoint: one function for each container. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "container/pickle.h"
#include "format/reader.h"
#include "io/source.h"

/* The facts that a Megatron checkpoint records besides its tensors: the run's arguments and the
 * iteration. torch.save writes them in common.pt, in the object common_state/shard_0_1, in a rank's
 * model_optim_rng.pt or in the object args. Classes that are not known are kept as opaque values;
 * no function is called. */

struct ckpt_megatron_state {
    json_t *args; /* a JSON object; NULL: there are none */
    uint64_t iteration;
    double version; /* checkpoint_version */
    bool has_iteration, has_version;
};

/* Free the facts. */
void ckpt_megatron_state_release(struct ckpt_megatron_state *st);

/* A size in the run's arguments, or 0. */
uint64_t ckpt_megatron_state_size(const struct ckpt_megatron_state *st, const char *key);

/* Add the facts in a pickled dict (or a list of one, or the arguments alone). The first value of a
 * fact is kept. UNSUPPORTED: the pickle names a function that only an attack needs. */
int ckpt_megatron_state_take(struct ckpt_megatron_state *st, const struct ckpt_pickle *p, ckpt_pv v,
                             struct ckpt_err *err);

/* Add the facts in the torch.save archive s. */
int ckpt_megatron_state_read(struct ckpt_megatron_state *st, struct ckpt_source *s,
                             struct ckpt_err *err);

/* Add one fact that is an object of its own: "iteration" or "checkpoint_version". */
int ckpt_megatron_state_read_fact(struct ckpt_megatron_state *st, const char *name,
                                  struct ckpt_source *s, struct ckpt_err *err);

/* Each function fills the catalogue with the model's weights, under the names of
 * format/megatron/name.h, and adds to st the facts about the run that the container has. */
int ckpt_megatron_load_dcp(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           bool finished, struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                           struct ckpt_err *err);
int ckpt_megatron_load_zarr(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                            struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                            struct ckpt_err *err);
int ckpt_megatron_load_ranks(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                             struct ckpt_megatron_state *st, struct ckpt_catalog *cat,
                             struct ckpt_err *err);

/* The object of torch_dist that stands in place of common.pt, since Megatron-Core 0.19: a list of
 * one dict. */
extern const char ckpt_megatron_common_state[];

/* Add the optimizer's tensors of another directory of the save, which is a torch_dist, except those
 * that the catalogue has. */
int ckpt_megatron_load_states(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                              struct ckpt_catalog *cat, struct ckpt_err *err);

/* Possible names of a rank's file in its folder mp_rank_*, NULL-terminated. */
extern const char *const ckpt_megatron_rank_files[];
