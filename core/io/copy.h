/* SPDX-License-Identifier: Apache-2.0 */
/* Is a file on this machine the one that was recorded on another, or a copy of it? */
#ifndef CKPT_IO_COPY_H
#define CKPT_IO_COPY_H

#include "base/err.h"
#include "io/dir.h"

/* May the file `name` of dir, which is open as fd and has the identity `now`, serve as the file
 * that was recorded as `then`? It may if size and times are equal, or if it is a copy: the size is
 * equal, and so are all bytes that the recording has of it and of the witnesses. CONFLICT: it is
 * another file. STALE: it was written after the recording. */
int ckpt_copy_accept(struct ckpt_dir *dir, const char *name, int fd, const struct ckpt_file_id *now,
                     const struct ckpt_file_id *then, struct ckpt_err *err);

#endif
