/* SPDX-License-Identifier: Apache-2.0 */
/* Loading the tensors of a Megatron checkpoint: one function for each container. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include "base/vec.h"
#include "container/pickle.h"
#include "container/torch_file.h"
#include "format/reader.h"
#include "format/states.h"
#include "io/dir.h"
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

/* Decide about a torch_dist without metadata.json, which Megatron writes last: in a raw view it is
 * read if it has torch's .metadata, which ends what a save strategy writes, with a warning; else it
 * is MISSING. */
int ckpt_megatron_unmarked(const struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                           struct ckpt_catalog *cat, struct ckpt_err *err);

/* The object of torch_dist that stands in place of common.pt, since Megatron-Core 0.19: a list of
 * one dict. */
extern const char ckpt_megatron_common_state[];

/* Add the optimizer's tensors of another directory of the save, which is a torch_dist, except those
 * that the catalogue has. */
int ckpt_megatron_load_states(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                              struct ckpt_catalog *cat, struct ckpt_err *err);

/* Possible names of a rank's file in its folder mp_rank_*, NULL-terminated. */
extern const char *const ckpt_megatron_rank_files[];

/* ---- the mesh of ranks of a legacy checkpoint ---- */

/* A directory each, mp_rank_TT[_PPP][_EEE] or NeMo's tp_rank_TT_pp_rank_PPP, with one file in it.
 */

struct ckpt_megatron_rank {
    const char *folder;
    char *path;
    uint64_t field[2]; /* the numbers after mp_rank_TT */
    uint32_t nfield;
    uint64_t tp, pp, ep;
    struct ckpt_torch_file file;
    uint32_t index; /* number of its source in the catalogue; set by the reader */
};

/* Set the first three members, which are borrowed, and all others to zero. */
struct ckpt_megatron_mesh {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    struct ckpt_megatron_state *st;
    CKPT_VEC(struct ckpt_megatron_rank)
    ranks;                        /* sorted by pp, ep, tp after ckpt_megatron_mesh_place */
    uint64_t ntp, npp, nep, netp; /* sizes; netp: expert tensor parallelism */
};

/* Free the ranks with their pickles. */
void ckpt_megatron_mesh_release(struct ckpt_megatron_mesh *m);

/* Read the pickles of all ranks, and add the facts about the run to m->st. MISSING: there are none.
 */
int ckpt_megatron_mesh_read(struct ckpt_megatron_mesh *m, struct ckpt_err *err);

/* Assign coordinates to every rank, and check that no rank is missing. Files of ranks that the run
 * did not have are left out, with a warning in cat. */
int ckpt_megatron_mesh_place(struct ckpt_megatron_mesh *m, struct ckpt_catalog *cat,
                             struct ckpt_err *err);

/* The state dict in a rank's file: `model`, or `modelN` for virtual stage N. The value may be
 * another type than a dict. */
ckpt_pv ckpt_megatron_rank_model(const struct ckpt_megatron_rank *r, uint32_t stage, bool numbered);

/* ---- names ---- */

/* Names of a Megatron checkpoint's tensors, converted to the form that recipes use, which is that
 * of torch_dist.
 *
 *     module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight
 *         -> decoder.layers.4.mlp.experts.experts.5.linear_fc1.weight   of layers from 4, experts
 * from 4 module.decoder.layers.0.mlp.experts.linear_fc1.weight1_w
 *         -> decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_w */

/* The first global numbers of layers and experts in one rank's file. */
struct ckpt_megatron_place {
    uint64_t layer, expert;
};

/* Write into `out` the name without the prefixes of wrappers and with global numbers; false: the
 * name is not one of the model's weights. If memory runs out, out->failed is set. */
bool ckpt_megatron_name(const char *name, const struct ckpt_megatron_place *at,
                        struct ckpt_str *out);

/* The number after "decoder.layers." in a stripped name; false: there is none. */
bool ckpt_megatron_layer(const char *name, uint64_t *ret);

/* Does the name belong to an optimizer's state? */
bool ckpt_megatron_is_state(const char *name);

/* Takes the name of an optimizer's tensor apart: optimizer.state.KIND.PARAMETER of torch_dist and
 * zarr, below chained_N. if there are several, where the master is "param" or "fp32_param";
 * optimizer.state.PARAMETER.KIND of fsdp_dtensor. Buckets name no parameter. */
ckpt_state_parse_fn ckpt_megatron_state_parse;

/* Does the name belong to an adapter of NeMo 1, or to a module that an adapter wraps? */
bool ckpt_megatron_is_wrapped(const char *name);

/* ---- layouts ---- */

/* Which Megatron format a directory is of, and where its parts lie: Megatron's own layout, and
 * those that NeMo puts around it.
 *
 *     iter_0000010/                     metadata.json, or mp_rank_*, or a DCP's .metadata
 *     CKPT/weights/, CKPT/context/      NeMo 2
 *     CKPT/model_weights/               NeMo 1, unpacked; CKPT/model_config.yaml */

enum ckpt_megatron_format {
    CKPT_MEGATRON_NONE,
    CKPT_MEGATRON_DIST,       /* torch_dist */
    CKPT_MEGATRON_ZARR,       /* zarr */
    CKPT_MEGATRON_RANKS,      /* torch: one file per rank */
    CKPT_MEGATRON_DCP,        /* torch_dcp, fsdp_dtensor */
    CKPT_MEGATRON_OTHER,      /* metadata.json names another back end */
    CKPT_MEGATRON_UNFINISHED, /* files of a format, but no metadata.json, so the save is not
                                 finished */
};

struct ckpt_megatron_layout {
    enum ckpt_megatron_format format;
    const char *below; /* folder of the weights: "", "weights" ... */
};

/* Recognise the layout. Reads names, metadata.json and the beginning of .metadata. */
struct ckpt_megatron_layout ckpt_megatron_layout_of(struct ckpt_dir *dir);

/* Open the part ("optimizer", "extra") of a save of verl whose weights are in another directory, if
 * it is there and finished; else *ret is NULL. */
int ckpt_megatron_beside(struct ckpt_dir *dir, const struct ckpt_megatron_layout *layout,
                         const char *part, struct ckpt_dir **ret, struct ckpt_err *err);
