/* SPDX-License-Identifier: Apache-2.0 */
/* The entries of __metadata__ that safetensors files of a model directory have, which a view of the
 * directory shows again.
 *
 * They are kept as JSON: {file: {key: value}}. A file comes from a stranger, so no more is kept
 * than CKPT_ST_MAX_KEPT bytes for all files together, as the bytes will be written in a header. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "container/safetensors.h"

/* This keeps the entries of one file in *files, which is made if it is NULL. *size is what has been
 * kept; 0 before the first file. *ret_kept is false, and the file has no entries in *files, if they
 * are too large. DCP_SHARDING_INFO and DCP_VERSION are not kept: they tell torch which parts of its
 * tensors a file had when a rank wrote it, and torch takes a file without them for whole. */
int ckpt_st_metadata_keep(json_t **files, size_t *size, const char *file, const struct ckpt_st *st,
                          bool *ret_kept, struct ckpt_err *err);

/* Joins the entries of all files, for a file that holds tensors of any of them: an entry stays if
 * the files that have it agree. *ret is a new object, or NULL if there are no files; *ret_differ is
 * a new list of the keys on which files disagree. */
int ckpt_st_metadata_join(const json_t *files, json_t **ret, json_t **ret_differ,
                          struct ckpt_err *err);
