/* SPDX-License-Identifier: Apache-2.0 */
/* Items whose headers are read with their data.
 *
 * .metadata says where an item lies in its file, but not where the data lie in the item: that is
 * what its header says. At a distance reading the headers of many small items means reading the
 * whole checkpoint, only to open it. torch.save writes tensors alike that differ in their numbers
 * only, so headers of some items say where the data of the others are. Before the first bytes of
 * such an item are handed out, its header is read and checked: it must say the same, or reading
 * fails. */
#pragma once

#include "base/err.h"
#include "format/dcp/metadata.h"
#include "io/source.h"

/* The items of one file, by their places in it. */
struct ckpt_dcp_unread;

/* An empty list. */
int ckpt_dcp_unread_new(struct ckpt_dcp_unread **ret, struct ckpt_err *err);
void ckpt_dcp_unread_free(struct ckpt_dcp_unread *u);
CKPT_CLEANUP_BY(ckpt_dcp_unread_free, struct ckpt_dcp_unread)

/* Add the item of a chunk of m, behind those that were added, that must be a contiguous tensor
 * whose data begin at chunk->data. What is needed of m is copied. */
int ckpt_dcp_unread_add(struct ckpt_dcp_unread *u, const struct ckpt_dcp_metadata *m,
                        const struct ckpt_dcp_chunk *chunk, struct ckpt_err *err);

/* Let the file's source check each of the items before its bytes are read for the first time. The
 * source owns the list from now on. */
void ckpt_dcp_unread_guard(struct ckpt_dcp_unread *u, struct ckpt_source *file);
