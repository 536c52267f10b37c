/* SPDX-License-Identifier: Apache-2.0 */
/* Loading one directory of PyTorch Distributed Checkpoint (DCP), for the readers of all formats
 * that are based on it. */
#pragma once

#include <stdint.h>

#include "format/reader.h"

/* A format's rules for the names in a DCP. Members may be NULL; their ctx is the member ctx. */
struct ckpt_dcp_format {
    const char *name; /* about.format */

    /* The name of tensor `name` in the catalogue: itself, or a string that lives as long as ctx.
     * NULL: the tensor does not belong to the model, and none of it is read. */
    const char *(*tensor)(void *ctx, const char *name);

    /* May the tensor be left out, with a warning, if it cannot be read? */
    bool (*optional)(void *ctx, const char *name);

    bool replicas;     /* equal boxes of a tensor are copies and not a conflict */
    bool may_be_empty; /* a DCP without any tensor is no error */

    /* Should the pickled object `name` be passed to `object`, as the archive s? */
    bool (*wants)(void *ctx, const char *name);
    int (*object)(void *ctx, const char *name, struct ckpt_source *s, struct ckpt_err *err);
    void *ctx;
};

/* Is this a directory of DCP? By magic: .metadata (or the ranks' metadata) exists. By names: there
 * are data files only, so the save is not finished. */
enum ckpt_evidence ckpt_dcp_evidence(struct ckpt_dir *dir);

/* As ckpt_reader.load, with the format's rules; format NULL: a plain DCP. */
int ckpt_dcp_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                  const struct ckpt_dcp_format *format, struct ckpt_catalog *cat,
                  struct ckpt_err *err);

/* Add the pickled objects of a DCP to `out`, as ckpt_reader.objects does. In place of the one that
 * is named `spread` (NULL: none) there are the members of its dict. */
int ckpt_dcp_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                     const char *spread, json_t *out, struct ckpt_err *err);
