/* SPDX-License-Identifier: Apache-2.0 */
/* The files of one tensor-parallel rank (or pipeline stage) of a DeepSpeed tag: their list, the
 * parameters that they describe, and the flat buffers that they form together.
 *
 *     stages 1, 2  a group of parameters is one buffer, cut into equal parts over the ranks
 *     stage 3      each parameter is cut by itself; a rank's parts lie one after the other */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/deepspeed/file.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "tensor/catalog.h"

/* ---- parts ---- */

/* Tensors made of consecutive parts of flat buffers, which describe the content of DeepSpeed's
 * files before it is put into a catalogue. */

/* Contiguous elements in a source. */
struct ckpt_ds_extent {
    uint64_t n, off; /* number of elements; offset in bytes */
    uint32_t source; /* index in the catalogue */
};

/* One tensor. Its extents follow one another in its row-major order, or it is one strided extent.
 */
struct ckpt_ds_part {
    const char *name;
    const char *param; /* for a moment, the name of its parameter; else the tensor's name */
    enum ckpt_dtype dtype;
    uint8_t wanted; /* as in struct ckpt_tensor */
    bool strided;   /* one extent, with these strides in bytes */
    uint32_t rank;
    size_t first, n; /* its range in the list of extents */
    uint64_t numel;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t stride[CKPT_MAX_RANK];
};

struct ckpt_ds_parts {
    struct ckpt_arena names;
    CKPT_VEC(struct ckpt_ds_part) part;
    CKPT_VEC(struct ckpt_ds_extent) extent;
    struct ckpt_map by_name;
};

/* Free the lists and names. */
void ckpt_ds_parts_release(struct ckpt_ds_parts *p);

/* Begin a tensor, whose extents are added next. FORMAT: the name is invalid. CONFLICT: there is a
 * tensor with this name. */
int ckpt_ds_parts_add(struct ckpt_ds_parts *p, const char *name, enum ckpt_dtype dtype,
                      const uint64_t *dim, uint32_t rank, struct ckpt_err *err);

/* Add an extent to the last tensor; adjacent extents are joined. */
int ckpt_ds_parts_extend(struct ckpt_ds_parts *p, uint32_t source, uint64_t off, uint64_t n,
                         struct ckpt_err *err);

/* Add a tensor as stored in a file, or as another name of a tensor that was added. */
int ckpt_ds_parts_stored(struct ckpt_ds_parts *p, const char *name,
                         const struct ckpt_torch_tensor *s, uint32_t source, struct ckpt_err *err);
int ckpt_ds_parts_alias(struct ckpt_ds_parts *p, const char *name, size_t of, struct ckpt_err *err);

/* The tensor that was added last. */
static inline struct ckpt_ds_part *ckpt_ds_parts_last(struct ckpt_ds_parts *p)
{
    return &p->part.ptr[p->part.len - 1];
}

/* Find the index of a tensor by its name; CKPT_NONE: it is not there. */
uint32_t ckpt_ds_parts_find(const struct ckpt_ds_parts *p, const char *name);

/* ---- flat buffers ---- */

/* A flat buffer that is stored as several consecutive parts, for example a flat group that is
 * divided over its ranks. */
struct ckpt_ds_stretch {
    uint64_t begin; /* first element, counted in the whole buffer */
    struct ckpt_ds_extent at;
};

struct ckpt_ds_buffer {
    CKPT_VEC(struct ckpt_ds_stretch) stretch;
    uint64_t n; /* number of elements */
    enum ckpt_dtype dtype;
};

/* Free the list of parts. */
void ckpt_ds_buffer_release(struct ckpt_ds_buffer *b);

/* Append a part. CONFLICT: it has another dtype than the parts before. */
int ckpt_ds_buffer_add(struct ckpt_ds_buffer *b, enum ckpt_dtype dtype, uint32_t source,
                       uint64_t off, uint64_t n, struct ckpt_err *err);

/* Append elements [at, at + n) of the buffer to the last tensor of p. CONFLICT: the buffer is
 * shorter. */
int ckpt_ds_buffer_take(const struct ckpt_ds_buffer *b, uint64_t at, uint64_t n,
                        struct ckpt_ds_parts *p, struct ckpt_err *err);

/* ---- pieces ---- */

/* Add to `out` the pieces of a tensor of shape `dim` that a pair makes of part `i`; pair NULL: the
 * part is the whole tensor. UNSUPPORTED: the part is strided and pair is not NULL. */
int ckpt_ds_parts_place(const struct ckpt_ds_parts *p, size_t i, const struct ckpt_box_pair *pair,
                        const uint64_t *dim, struct ckpt_pieces *out, struct ckpt_err *err);

/* Add part i to the catalogue, under its name. */
int ckpt_ds_parts_catalog(const struct ckpt_ds_parts *p, size_t i, struct ckpt_catalog *cat,
                          struct ckpt_err *err);

/* ---- one rank's optimizer file: flat partitions of masters and of moments ---- */

/* A one-dimensional tensor. */
struct ckpt_ds_flat {
    enum ckpt_dtype dtype;
    uint64_t n, off;
};

struct ckpt_ds_moment {
    uint64_t group;
    const char *key; /* for example "exp_avg" */
    struct ckpt_ds_flat at;
};

struct ckpt_ds_group_step {
    uint64_t group;
    double step;
};

struct ckpt_ds_optim {
    struct ckpt_source *source;
    uint32_t index; /* number of the source in the catalogue, once added */
    struct ckpt_arena names;
    bool zero3; /* the file has fp32_flat_groups, which are divided parameter by parameter */
    CKPT_VEC(struct ckpt_ds_flat) master; /* one per group */
    CKPT_VEC(uint64_t) count; /* partition_count, one per group; with ZeRO 3 one for all */
    CKPT_VEC(struct ckpt_ds_moment) moment; /* tensors that seem to have the length of a group */
    CKPT_VEC(struct ckpt_ds_group_step) step;
    CKPT_VEC(uint64_t)
    padding; /* param_alignment_paddings of all groups in turn: n, then n numbers; empty: there are
                none */
    bool elastic; /* it has states in another form, that of elastic_checkpoint */
};

/* Read the file. states: read the moments too. */
int ckpt_ds_optim_read(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                       bool states, struct ckpt_ds_optim *ret, struct ckpt_err *err);
void ckpt_ds_optim_release(struct ckpt_ds_optim *o);

/* Data that is the same for all files of a tag. */
struct ckpt_ds_job {
    struct ckpt_dir *dir;
    const struct ckpt_ds_tag *tag;
    const struct ckpt_reader_options *opt;
    struct ckpt_catalog *cat;
};

/* A parameter of param_shapes. */
struct ckpt_ds_param {
    const char *name; /* name in the model file; NULL: another stage has the parameter
                         (layers.c) */
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK], numel;
    uint64_t group;
    uint64_t offset; /* first element in its group's buffer; stage 3: in each rank's buffer */
};

/* One rank's slices of frozen parameters (stage 3). */
struct ckpt_ds_fragment {
    const char *name;
    struct ckpt_torch_tensor at;
};

struct ckpt_ds_rank_model {
    struct ckpt_source *source;
    uint32_t index;
    bool has_steps;
    uint64_t steps;
    struct ckpt_arena names;
    CKPT_VEC(struct ckpt_ds_fragment) fragment;
};

struct ckpt_ds_zero {
    const struct ckpt_ds_job *job;
    uint64_t mp, world;
    bool zero3;
    bool moe; /* there are files of experts, whose groups of parameters are divided over fewer ranks
               */
    struct ckpt_torch_file model; /* of data-parallel rank 0 */
    struct ckpt_ds_unwrapped unwrapped;
    const struct ckpt_torch_file *shared_in; /* the file that lists tied parameters, which only the
                                             job's first rank does */
    char *model_name;
    uint32_t model_index; /* number of its source in the catalogue */
    CKPT_VEC(struct ckpt_ds_param) param;
    CKPT_VEC(size_t) group; /* first parameter of each group of param_shapes */
    struct ckpt_map by_name;
    CKPT_VEC(struct ckpt_ds_optim) optim;           /* by data-parallel rank; empty: not read */
    CKPT_VEC(struct ckpt_ds_rank_model) rank_model; /* stage 3, by data-parallel rank */
};

/* Open the model file of rank `mp` and read its list of parameters. */
int ckpt_ds_zero_open(const struct ckpt_ds_job *job, uint64_t mp, struct ckpt_ds_zero *z,
                      struct ckpt_err *err);
void ckpt_ds_zero_release(struct ckpt_ds_zero *z);

/* Read the optimizer files of all data-parallel ranks, and with stage 3 also their model files.
 * Check that none is missing and that all are of one save. MISSING: there are no such files. */
int ckpt_ds_zero_read_ranks(struct ckpt_ds_zero *z, struct ckpt_err *err);

/* Compute where each parameter begins, once the optimizer files are read. */
int ckpt_ds_zero_lay(struct ckpt_ds_zero *z, struct ckpt_err *err);

/* Make buffers of the masters (key NULL) or of a moment: with stages 1 and 2 one per group, with
 * stage 3 one per rank. If a rank's file lacks a group, its buffer ends there. ret has room for
 * ckpt_ds_zero_nbuffer zeroed buffers, which the caller releases; those of experts stay empty. */
size_t ckpt_ds_zero_nbuffer(const struct ckpt_ds_zero *z);
int ckpt_ds_zero_buffers(const struct ckpt_ds_zero *z, const char *key, struct ckpt_ds_buffer *ret,
                         struct ckpt_err *err);

/* Check that the masters have as many elements as the parameters. */
int ckpt_ds_zero_check(const struct ckpt_ds_zero *z, const struct ckpt_ds_buffer *masters,
                       struct ckpt_err *err);

/* Append a group's masters (key NULL) or a moment in the files of ranks first, first + stride, ...
 * to b (stages 1 and 2). It ends at a rank that has none. */
int ckpt_ds_zero_group_buffer(const struct ckpt_ds_zero *z, uint64_t group, const char *key,
                              uint64_t first, uint64_t stride, struct ckpt_ds_buffer *b,
                              struct ckpt_err *err);

/* Check that a group's buffer, which is divided over nrank ranks, is as long as its parameters. */
int ckpt_ds_zero_check_group(const struct ckpt_ds_zero *z, uint64_t group, uint64_t nrank,
                             const struct ckpt_ds_buffer *b, struct ckpt_err *err);

/* The offset of an expert's number in the name of one of its parameters; 0: not an expert's name.
 */
size_t ckpt_ds_expert_number(const char *name);

/* Is it an expert's parameter, of a checkpoint that has files of experts? */
bool ckpt_ds_zero_is_expert(const struct ckpt_ds_zero *z, const char *name);

/* Add a parameter's tensor, which is a part of such buffers, under a name. */
int ckpt_ds_zero_add(const struct ckpt_ds_zero *z, const struct ckpt_ds_buffer *buffers,
                     const struct ckpt_ds_param *param, const char *name, struct ckpt_ds_parts *out,
                     struct ckpt_err *err);

/* Has the tensor the parameter's shape? */
bool ckpt_ds_param_fits(const struct ckpt_ds_param *param, const struct ckpt_torch_tensor *s);

/* A degree of the job ("tp_degree"), as the model file has it; false: it does not say. */
bool ckpt_ds_zero_degree(const struct ckpt_ds_zero *z, const char *key, uint64_t *ret);

/* Find a parameter in param_shapes; NULL: it is not there. */
const struct ckpt_ds_param *ckpt_ds_zero_param(const struct ckpt_ds_zero *z, const char *name);
