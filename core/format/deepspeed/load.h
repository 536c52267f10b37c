/* SPDX-License-Identifier: Apache-2.0 */
/* Loading the tensors of a DeepSpeed tag: all of them, and those of one layout. */
#pragma once

#include "base/regex.h"
#include "format/deepspeed/zero.h"

/* Fill job->cat with the tensors of job->tag, and its `about` with the facts about the run. */
int ckpt_ds_load(const struct ckpt_ds_job *job, struct ckpt_err *err);

/* ---- a pipeline ---- */

/* The parameters of all ranks of a pipeline, by name, as the model files of a universal checkpoint
 * list them: those of a stage are listed by each of its tensor-parallel ranks, and those of a tied
 * layer (tied_modules.KEY.NAME) by every stage that has the layer. */

struct ckpt_ds_listed {
    const struct ckpt_ds_zero *z; /* the first rank that lists the parameter */
    const struct ckpt_ds_param *param;
    uint64_t nrank; /* number of ranks that list it */
    uint64_t numel; /* of all their parts */
};

struct ckpt_ds_pipe {
    CKPT_VEC(struct ckpt_ds_listed) listed;
    struct ckpt_map by_name;
    uint64_t ntp; /* number of tensor-parallel ranks */
    enum ckpt_dtype trained;
    bool has_trained; /* ds_config says in which dtype the model was trained */
};

/* Read the lists of the n ranks. Of a parameter that several stages list, ds_to_universal has kept
 * one copy, and a warning says so. UNSUPPORTED: the checkpoint has no rules for joining
 * tensor-parallel ranks, or there are experts. MISSING: buffers. */
int ckpt_ds_pipe_read(const struct ckpt_ds_zero *rank, uint64_t n, struct ckpt_ds_pipe *ret,
                      struct ckpt_err *err);
void ckpt_ds_pipe_release(struct ckpt_ds_pipe *p);

/* Has a tensor this parameter's elements, joined? `cut`: the rows of the padded vocabulary were
 * removed. */
bool ckpt_ds_pipe_fits(const struct ckpt_ds_pipe *p, const struct ckpt_ds_listed *listed,
                       const struct ckpt_torch_tensor *s, bool cut);

/* ---- one tensor-parallel rank, or one stage of a pipeline ---- */

/* Add the module's tensors to `weights`, under its names and in its order: the masters if the
 * reader's options ask for them, else the 16-bit weights. With ZeRO 3, which stores masters only,
 * they are the masters, to be shown in the module's dtype. If the options ask for states, add the
 * optimizer's states to `moments` as optim.state.NAME.KEY. */
int ckpt_ds_module_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                        struct ckpt_ds_parts *moments, struct ckpt_err *err);

/* ---- its parts, for modules that lie in layers ---- */

/* Read the optimizer files if the options, or ZeRO 3, need them. A warning lists what is not
 * available. */
int ckpt_ds_module_read_ranks(struct ckpt_ds_zero *z, bool *ret_read, struct ckpt_err *err);

/* Make the buffers of the masters, and check them. *ret must be freed after a failure too. */
int ckpt_ds_masters_new(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer **ret,
                        struct ckpt_err *err);
void ckpt_ds_masters_free(const struct ckpt_ds_zero *z, struct ckpt_ds_buffer *b);

/* Add the moments of all parameters to out. */
int ckpt_ds_moments_add(struct ckpt_ds_zero *z, struct ckpt_ds_parts *out, struct ckpt_err *err);

/* ---- layers of a pipeline, each of which has a file: a state dict ---- */

/* Add the layers of a pipeline, whose stages' model files are open, under the names LL.NAME; also
 * masters and moments if the options ask for them. MISSING: there is no file for a layer, and the
 * model files do not prove that the layer has no parameters. */
int ckpt_ds_layers_read(const struct ckpt_ds_job *job, struct ckpt_ds_zero *stage, uint64_t n,
                        struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                        struct ckpt_err *err);

/* Call fn for all tensors of a file that is a state dict; it becomes a source of the catalogue. */
typedef int ckpt_ds_add_fn(void *ctx, const char *name, const struct ckpt_torch_file *f,
                           const struct ckpt_torch_tensor *s, uint32_t source,
                           struct ckpt_err *err);
int ckpt_ds_layers_each(const struct ckpt_ds_job *job, const char *file, ckpt_ds_add_fn *fn,
                        void *ctx, struct ckpt_err *err);

/* ---- experts of DeepSpeed-MoE, each of which has a file; their masters and moments are
 * partitioned over fewer ranks than those of the other parameters ---- */

/* Add the experts of the module z under the names in their files: masters and moments too if the
 * options ask for them and the optimizer's files, which z must have read before, are there.
 * MISSING: an expert that the model file counts. */
int ckpt_ds_experts_read(struct ckpt_ds_zero *z, struct ckpt_ds_parts *weights,
                         struct ckpt_ds_parts *moments, struct ckpt_err *err);

/* ---- tensor-parallel ranks (DeepSpeed's AutoTP) ---- */

/* Join parts[0..n) of the n ranks into whole tensors, by the rules in rank 0's model file
 * (universal_checkpoint_info), and add them to the catalogue. Order and names are those of rank 0.
 */
int ckpt_ds_tp_join(const struct ckpt_ds_zero *rank0, const struct ckpt_ds_parts *parts, uint64_t n,
                    struct ckpt_catalog *cat, struct ckpt_err *err);

/* ---- universal checkpoints (deepspeed/checkpoint/ds_to_universal.py), which have a folder for
 * each parameter ---- */

/* Add the tensors of zero/NAME/fp32.pt, to be shown in the dtype of the copied module. Tensors that
 * the optimizer did not have (buffers, frozen parameters) are read from the module. nmp is the
 * number of tensor-parallel ranks whose model files were copied; the parameters are already whole.
 * If `pipe` is not NULL, there is no module, but the pipeline of which z is the first rank; names
 * are those of the model files, LL.NAME or tied_modules.KEY.NAME. */
int ckpt_ds_universal_read(struct ckpt_ds_zero *z, uint64_t nmp, const struct ckpt_ds_pipe *pipe,
                           struct ckpt_ds_parts *weights, struct ckpt_ds_parts *moments,
                           struct ckpt_err *err);

/* ---- checks by samples that masters and 16-bit weights are of one save: a master, rounded, is
 * the weight ---- */

/* Compare up to a few hundred elements of every extent of those tensors of `masters` that are
 * parameters of z with the module's tensors. CONFLICT: they differ. */
int ckpt_ds_spot_check(const struct ckpt_ds_zero *z, ckpt_pv module,
                       const struct ckpt_ds_parts *masters, struct ckpt_err *err);

/* Is tensor `index` of `masters`, rounded, the tensor s of file f? Compares the first and the last
 * elements of every extent; *ret is true if nothing can be compared, too. */
int ckpt_ds_spot_same(const struct ckpt_ds_job *job, const struct ckpt_ds_parts *masters,
                      size_t index, const struct ckpt_torch_file *f,
                      const struct ckpt_torch_tensor *s, bool *ret, struct ckpt_err *err);

/* CONFLICT: it is not; the file's name is `file`. */
int ckpt_ds_spot_check_part(const struct ckpt_ds_job *job, const struct ckpt_torch_file *f,
                            const char *file, const struct ckpt_torch_tensor *s,
                            const struct ckpt_ds_parts *masters, size_t index,
                            struct ckpt_err *err);

/* ---- rules ---- */

/* The rules in universal_checkpoint_info: how the parts of the tensor-parallel ranks are joined,
 * parameter by parameter. */

enum ckpt_ds_join {
    CKPT_DS_CAT_0,      /* no pattern: concatenate along dimension 0 */
    CKPT_DS_CAT_1,      /* concatenate along dimension 1 */
    CKPT_DS_REPLICATED, /* all ranks have the same tensor */
    CKPT_DS_VOCABULARY, /* concatenate along dimension 0, and truncate to the unpadded vocabulary */
    CKPT_DS_HALVES,     /* each part is two matrices, one above the other; each of the two is joined
                           separately */
    CKPT_DS_AVERAGE,
    CKPT_DS_SUB_PARAMS,
    CKPT_DS_AFFINE, /* as entry `map` of the affine_map says */
};

struct ckpt_ds_rule {
    struct ckpt_regex *regex;
    enum ckpt_ds_join join;
    ckpt_pv map;
};

struct ckpt_ds_rules {
    CKPT_VEC(struct ckpt_ds_rule) rule; /* those of the affine map come first */
    bool has_vocabulary;
    uint64_t vocabulary; /* original_vocab_size */
};

/* Read the rules. UNSUPPORTED: the file has none, or their version is not known. */
int ckpt_ds_rules_read(const struct ckpt_torch_file *f, struct ckpt_ds_rules *ret,
                       struct ckpt_err *err);
void ckpt_ds_rules_release(struct ckpt_ds_rules *r);

/* Find the rule of a parameter; *ret->regex is NULL if no pattern matches. CONFLICT: several
 * patterns match. */
int ckpt_ds_rules_find(const struct ckpt_ds_rules *r, const char *name, struct ckpt_ds_rule *ret,
                       struct ckpt_err *err);

/* Does a pattern of a list, which the key names, match the name? */
int ckpt_ds_rules_match(const struct ckpt_torch_file *f, const char *key, const char *name,
                        bool *ret, struct ckpt_err *err);
