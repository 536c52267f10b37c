/* SPDX-License-Identifier: Apache-2.0 */
/* Do all ranks see the same checkpoint? */
#ifndef CKPT_LOAD_SAME_H
#define CKPT_LOAD_SAME_H

#include <stdint.h>

#include "base/err.h"

struct ckpt_catalog;
struct ckpt_load;
struct ckpt_view;

/* A hash of all that a catalogue says, with its files' names and sizes, but not where they lie;
 * equal for copies. */
void ckpt_catalog_digest(const struct ckpt_catalog *cat, unsigned char ret[16]);

/* A hash over which files these are; ranks that get the same see the very same files. */
uint64_t ckpt_catalog_files(const struct ckpt_catalog *cat);

/* Read a few bytes of some of its tensors, for a recording that has to tell copies from other
 * checkpoints. Bytes that cannot be read are left to the load to complain about. */
void ckpt_catalog_read_samples(const struct ckpt_catalog *cat);

/* COLLECTIVE. Where not all ranks have the very same files. If a rank's files are no longer those
 * that it opened, they were saved anew while the ranks opened them: STALE. Else they are copies:
 * some of their bytes are compared, and CONFLICT names the rank. A read that fails is left to the
 * load; one that takes longer than read_timeout_ms is TIMEOUT. */
int ckpt_load_compare(struct ckpt_load *load, struct ckpt_err *err);

/* At the end of a load: are the files that this rank has read still those that it opened? STALE:
 * the step was saved again meanwhile, and what the ranks have may be of two saves. */
int ckpt_load_files_unchanged(const struct ckpt_view *view, struct ckpt_err *err);

#endif
