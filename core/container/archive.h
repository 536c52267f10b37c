/* SPDX-License-Identifier: Apache-2.0 */
/* Archives that are opened like directories: tar (NeMo's .nemo files) and zip, not compressed. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "io/bucket/dir_bucket.h"
#include "io/dir_archive.h"
#include "io/recording.h"

/* How directories are opened. */
struct ckpt_access {
    enum ckpt_links links; /* of folders: links in an archive never lead out of it */
    struct ckpt_bucket_settings bucket;
    struct ckpt_recording *recording; /* ckpt_dir_use; or NULL */
    struct ckpt_far_options far;      /* of folders, and of archives that are files */
    bool is_around; /* nobody has named it: a bucket's folder is not listed before something is
                       looked for there, and is empty if it can't be */
};

/* Open a directory, an archive as if it were one, or s3://BUCKET/PREFIX. A file of torch.save, or
 * of safetensors, is opened as if it lay alone in a folder. UNSUPPORTED: the archive is compressed
 * (the text says how to unpack it). USAGE: it is another file. */
int ckpt_archive_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                      struct ckpt_err *err);

/* Is the directory one file alone that is no archive? */
bool ckpt_archive_is_itself(const struct ckpt_dir *dir);

/* Read the index of an archive (ckpt_archive_reader). */
ckpt_archive_reader ckpt_archive_read_index;
