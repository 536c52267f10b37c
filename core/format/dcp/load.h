/* SPDX-License-Identifier: Apache-2.0 */
/* Loading one directory of PyTorch Distributed Checkpoint (DCP), for the readers of all formats
 * that are based on it. */
#pragma once

#include <stdint.h>

#include "format/dcp/metadata.h"
#include "format/reader.h"

/* Is this a directory of DCP? By magic: .metadata (or the ranks' metadata) exists. By names: there
 * are data files only, so the save is not finished. */
enum ckpt_evidence ckpt_dcp_evidence(struct ckpt_dir *dir);

/* Load the directory as ckpt_reader.load does, by the format's rules; format NULL: a plain DCP. */
int ckpt_dcp_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                  const struct ckpt_dcp_format *format, struct ckpt_catalog *cat,
                  struct ckpt_err *err);

/* If opt asks for states: add the optimizer's tensors, which trainers put in a DCP of its own
 * beside the model's (accelerate's optimizer_0, NeMo Automodel's optim), and state whose all such
 * tensors of cat are. `dir` has both folders. An optimizer that cannot be read is left out, with a
 * warning.
 */
int ckpt_dcp_add_states(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                        struct ckpt_catalog *cat, struct ckpt_err *err);

/* Folders of an optimizer's DCP beside the model's, a list that ends with NULL. */
extern const char *const ckpt_dcp_optimizers[];

/* Add the groups of the optimizer, as ckpt_reader.groups does: those among the objects of the
 * model's DCP, or else those of an optimizer's own beside it. */
int ckpt_dcp_groups(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                    const json_t *objects, json_t *out, struct ckpt_err *err);

/* Add the pickled objects of a DCP to `out`, as ckpt_reader.objects does. In place of the one that
 * is named `spread` (NULL: none) there are the members of its dict. */
int ckpt_dcp_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                     const char *spread, json_t *out, struct ckpt_err *err);
