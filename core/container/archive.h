/* SPDX-License-Identifier: Apache-2.0 */
/* Archives that are opened like directories: tar (NeMo's .nemo files) and zip, not compressed. */
#ifndef CKPT_CONTAINER_ARCHIVE_H
#define CKPT_CONTAINER_ARCHIVE_H

#include <stdbool.h>

#include "base/err.h"
#include "io/dir_archive.h"

struct ckpt_recording;

/* Open a directory, or an archive as if it were one, with a recording (ckpt_dir_use) or without
 * (NULL). UNSUPPORTED: the archive is compressed (the text says how to unpack it). USAGE: it is a
 * file that is no archive. `links` is for directories: links in an archive never lead out of it. */
int ckpt_archive_open(const char *path, enum ckpt_links links, struct ckpt_recording *rec,
                      struct ckpt_dir **ret, struct ckpt_err *err);

/* Is this path opened as an archive? */
bool ckpt_archive_is_file(const char *path);

/* Read the index of an archive (ckpt_archive_reader). */
ckpt_archive_reader ckpt_archive_read_index;

#endif
