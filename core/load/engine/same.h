/* SPDX-License-Identifier: Apache-2.0 */
/* Checks that all ranks see the same checkpoint, and that it does not change: job.c compares hashes
 * of catalogues, agree.c samples of the bytes if some ranks see copies, open.c records such
 * samples, and pump.c checks at the end of a load that no file has changed. */
#pragma once

#include <stdint.h>

#include "base/err.h"

struct ckpt_catalog;
struct ckpt_load;
struct ckpt_view;

/* A hash of the catalogue: its tensors, where their bytes lie in which files, and the names
 * (without directories) and sizes of these files. Copies of a checkpoint have equal hashes. NOMEM.
 */
int ckpt_catalog_digest(const struct ckpt_catalog *cat, unsigned char ret[16],
                        struct ckpt_err *err);

/* A hash of the identities (size and times) of the files. Ranks with equal hashes see the very same
 * files; ranks with different ones see copies. */
uint64_t ckpt_catalog_files(const struct ckpt_catalog *cat);

/* Read the samples that ckpt_load_compare compares. Rank 0 does so while it records
 * (io/recording.h), so that ranks that replay the recording can tell a copy from another
 * checkpoint. Errors are ignored: the load reports them when it reads the same bytes. */
void ckpt_catalog_read_samples(const struct ckpt_catalog *cat);

/* COLLECTIVE. Compare samples of the tensors' bytes, for ranks that do not all see the very same
 * files. CONFLICT: a rank has other bytes than rank 0; the text names both. STALE: a rank's files
 * are no longer those that it opened, so the checkpoint was saved again meanwhile. TIMEOUT: the
 * samples took longer than read_timeout_ms. A sample that cannot be read is left out: the load
 * reports the error when it reads the same bytes. */
int ckpt_load_compare(struct ckpt_load *load, struct ckpt_err *err);

/* Check that the files from which this rank has read are still those that it opened. STALE: the
 * step was saved again during the load, so the ranks may have bytes of two saves. The option
 * allow_mixed permits that. */
int ckpt_load_files_unchanged(const struct ckpt_view *view, struct ckpt_err *err);
