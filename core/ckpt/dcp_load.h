/* SPDX-License-Identifier: Apache-2.0 */
/* Loading one directory of PyTorch Distributed Checkpoint, for the readers of formats that are made
 * of it. */
#ifndef CKPT_CKPT_DCP_LOAD_H
#define CKPT_CKPT_DCP_LOAD_H

#include <stdint.h>

#include "ckpt/reader.h"

/* What a format knows of the names in a DCP. Members may be NULL; ctx is theirs. */
struct ckpt_dcp_format {
    const char *name; /* about.format */

    /* The name that tensor `name` has in the catalogue: itself, or one that lives as long as ctx.
     * NULL: the tensor is none of the model's; nothing of it is read. */
    const char *(*tensor)(void *ctx, const char *name);

    /* Is it one that may be left out, with a warning, if it can't be read? */
    bool (*optional)(void *ctx, const char *name);

    bool replicas; /* equal boxes of a tensor are copies, not a conflict */

    /* Is pickled object `name` wanted? Then `object` gets it: bytes [off, off+len) of s. */
    bool (*wants)(void *ctx, const char *name);
    int (*object)(void *ctx, const char *name, struct ckpt_source *s, uint64_t off, uint64_t len,
                  struct ckpt_err *err);
    void *ctx;
};

/* Is this a directory of DCP? By magic: .metadata (or the ranks' own) is there. By names: data
 * files only, the save is not finished. */
enum ckpt_evidence ckpt_dcp_evidence(const struct ckpt_dir *dir);

/* As ckpt_reader.load; format NULL: a plain DCP. */
int ckpt_dcp_load(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                  const struct ckpt_dcp_format *format, struct ckpt_catalog *cat,
                  struct ckpt_err *err);

/* Add the pickled objects of a DCP to `out`, as ckpt_reader.objects. */
int ckpt_dcp_objects(struct ckpt_dir *dir, const struct ckpt_reader_options *opt, json_t *out,
                     struct ckpt_err *err);

#endif
