/* SPDX-License-Identifier: Apache-2.0 */
/* Reading ahead along the files of a view, where their bytes are far (in a bucket): what a file has
 * next lies in other shards than what it had last, so that nobody else could know. After a file of
 * weights comes the next one. Safe from many threads. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "tensor/read.h"
#include "view/view.h"

/* Make *ret for a view over these sources, NULL if none of them is far. */
int ckpt_ahead_new(const struct ckpt_catalog *cat, struct ckpt_ahead **ret, struct ckpt_err *err);
void ckpt_ahead_free(struct ckpt_ahead *a); /* NULL is allowed */

/* Bytes [off, end) of the file are read now: if reads of it follow each other, begin to fetch what
 * comes next. Never fails: then nothing is read ahead, as without rd->ahead. */
void ckpt_ahead_note(struct ckpt_reading *rd, const struct ckpt_vnode *file, uint64_t off,
                     uint64_t end);

/* The same for bytes of a tensor, by its number in the catalogue, where it lies in a file. */
void ckpt_ahead_note_tensor(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t tensor,
                            uint64_t off, uint64_t end);

/* All files will be read, one after the other: begin at once. */
void ckpt_ahead_all(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t ntensor);
