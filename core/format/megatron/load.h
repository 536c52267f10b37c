/* SPDX-License-Identifier: Apache-2.0 */
/* Loading the tensors of a Megatron checkpoint: one function for each container. */
#pragma once

#include "format/megatron/state.h"
#include "format/reader.h"

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

/* Add the values besides tensors in the directory of the weights, and in those of verl's other
 * parts, as ckpt_reader.objects does. */
int ckpt_megatron_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                          struct ckpt_err *err);

/* Possible names of a rank's file in its folder mp_rank_*, NULL-terminated. */
extern const char *const ckpt_megatron_rank_files[];
