/* SPDX-License-Identifier: Apache-2.0 */
/* An archive as a directory: its files are ranges of bytes of the archive, and are read in place.
 * If the archive changes, its index is read again. */
#pragma once

#include "base/err.h"
#include "io/archive_index.h"
#include "io/dir.h"

struct ckpt_recording;

/* Read the index of the archive `name` in folder, and the identity that the archive has.
 * *ret_index is sealed; the caller frees it. */
typedef int ckpt_archive_reader(struct ckpt_dir *folder, const char *name,
                                struct ckpt_archive_index **ret_index, struct ckpt_file_id *ret_id,
                                struct ckpt_err *err);

/* Open the archive at `path`. rec may be NULL; it is used as by ckpt_dir_use, the index included: a
 * recording has the archive as one file, in the folder that it lies in. */
int ckpt_dir_open_archive(const char *path, ckpt_archive_reader *reader, struct ckpt_recording *rec,
                          struct ckpt_dir **ret, struct ckpt_err *err);
