/* SPDX-License-Identifier: Apache-2.0 */
/* Fetches bytes before they are read, along the files of a view whose bytes are far (in a bucket).
 * Only the view knows what comes next: neighbours in a file lie in different shards, and after a
 * file of weights comes the next one. Safe from many threads. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "tensor/read.h"
#include "view/view.h"

/* Makes the read-ahead of a view of this catalogue, laid out as this tree. The catalogue is
 * borrowed. *ret is NULL if none of its sources is far. */
int ckpt_ahead_new(const struct ckpt_catalog *cat, const struct ckpt_vtree *tree,
                   struct ckpt_ahead **ret, struct ckpt_err *err);
void ckpt_ahead_free(struct ckpt_ahead *a); /* NULL is allowed */

/* Notes that bytes [off, end) of the file are read now. If reads follow each other, this begins to
 * fetch what comes next. It never fails, and never waits: at worst nothing is fetched ahead. Does
 * nothing if rd->ahead is NULL. */
void ckpt_ahead_note(struct ckpt_reading *rd, const struct ckpt_vnode *file, uint64_t off,
                     uint64_t end);

/* Notes likewise that bytes [off, end) of a tensor, given by its number in the catalogue, are read
 * now. What comes next may be its neighbour in a file, or in the catalogue. */
void ckpt_ahead_note_tensor(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t tensor,
                            uint64_t off, uint64_t end);

/* Makes the first part of bytes [off, end) of the file that is slow to make (ckpt_tensor_prepare).
 */
enum ckpt_prepared ckpt_ahead_prepare(struct ckpt_reading *rd, const struct ckpt_vnode *file,
                                      uint64_t off, uint64_t end);

/* Begins to fetch the first files at once: all of them will be read, one after the other. */
void ckpt_ahead_all(struct ckpt_reading *rd, const struct ckpt_vtree *tree, size_t ntensor);
