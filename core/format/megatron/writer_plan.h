/* SPDX-License-Identifier: Apache-2.0 */
/* A model's tensors in a Megatron job: which rank of which stage has what of them.
 *
 * Tensors have the names that Megatron's modules have, with the number of the layer and of the
 * expert. The world is as small as the layout allows: pp stages of lcm(tp, etp * ep) ranks, without
 * data-parallel copies. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "format/writer.h"
#include "tensor/catalog.h"

struct ckpt_pickle_out;

/* All of Megatron's formats have these values (struct ckpt_writer): the options of their layout,
 * and Megatron's default of make_vocab_size_divisible_by. */
enum {
    CKPT_MG_KEYS = 1 << CKPT_CUT_TP | 1 << CKPT_CUT_PP | 1 << CKPT_CUT_EP | 1 << CKPT_CUT_ETP |
                   1 << CKPT_CUT_VPP | 1 << CKPT_CUT_VOCAB,
    CKPT_MG_VOCAB_MULTIPLE = 128,
};

struct ckpt_mg_grid {
    uint32_t tp, pp, vpp, ep, etp;
    uint32_t size;            /* ranks of a stage */
    uint64_t layers, experts; /* of the model; experts 0: it has none */
};

/* ckpt_mg_name_parse finds these parts in a tensor's name. */
struct ckpt_mg_name {
    size_t stem;      /* bytes before the number in a list of equal modules, or 0 */
    const char *rest; /* behind that number; the whole name if it has none */
    const char *leaf; /* behind the expert's number; NULL: it is no expert's */
    size_t before;    /* bytes of the name before the expert's number */
    uint64_t layer, expert;
    bool in_layer; /* of the language model's decoder */
};

/* Take a name apart; the result points into it. */
struct ckpt_mg_name ckpt_mg_name_parse(const char *name);
/* Take the name of a tensor apart; of an optimizer's, that of its parameter. */
struct ckpt_mg_name ckpt_mg_name_of(const struct ckpt_tensor *t);

/* Is the module that has the weight t, and whose name is the first `len` bytes of `name`, one of
 * Megatron's projections? These have an extra state, which is not a tensor. */
bool ckpt_mg_is_projection(const struct ckpt_tensor *t, const char *name, size_t len);

/* The grid of an output. USAGE: the model cannot be divided so. */
int ckpt_mg_grid_init(struct ckpt_mg_grid *g, const struct ckpt_writing *w, struct ckpt_err *err);

/* The stage of a tensor, and its virtual stage there. */
uint32_t ckpt_mg_stage(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name,
                       uint32_t *ret_virtual);

/* How a tensor is divided, and among how many ranks. */
enum ckpt_cut_way ckpt_mg_way(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name,
                              uint32_t *ret_ranks);

/* Can it be divided so? USAGE, with the numbers. */
int ckpt_mg_check(const struct ckpt_mg_grid *g, const struct ckpt_tensor *t, struct ckpt_err *err);

/* The expert-parallel rank of an expert. */
uint32_t ckpt_mg_expert_rank(const struct ckpt_mg_grid *g, uint64_t expert);

/* The rank of the job that writes part `index` of a tensor's cut: the first that has it. */
uint32_t ckpt_mg_rank(const struct ckpt_mg_grid *g, const struct ckpt_mg_name *name,
                      uint32_t index);

/* ---- what is stored besides tensors: the arguments of the run, the tracker, metadata.json ---- */

/* A new string: "iter_0000010/", or "release/" for a model without an iteration. NULL: no memory.
 */
char *ckpt_mg_folder(const struct ckpt_writing *w);

/* Append the items of the common state to an open dict: args (a Namespace), checkpoint_version,
 * iteration. */
int ckpt_mg_put_common(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                       const char *format, struct ckpt_pickle_out *p, struct ckpt_err *err);

/* The argument of a run that says how many samples it has trained on. */
#define CKPT_MG_SAMPLES "consumed_train_samples"

/* How many samples the run has trained on, as the option global_batch_size says, or the arguments
 * of a run of Megatron's; 0: nothing says it. */
uint64_t ckpt_mg_samples(const struct ckpt_writing *w);

/* Append the item "optimizer" to an open dict: the groups of parameters of w->groups; and, if the
 * samples are known, "opt_param_scheduler". UNSUPPORTED: the run divides parameters into groups
 * that Megatron has in one. */
int ckpt_mg_put_optimizer(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                          struct ckpt_pickle_out *p, struct ckpt_err *err);

/* Add the tracker file, and for torch_dist common.pt and metadata.json in the folder. */
int ckpt_mg_common(const struct ckpt_writing *w, const char *folder, const struct ckpt_mg_grid *g,
                   const char *format, struct ckpt_err *err);
