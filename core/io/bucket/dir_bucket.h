/* SPDX-License-Identifier: Apache-2.0 */
/* A prefix of a bucket as a directory (io/dir.h): objects whose keys begin with it are its files.
 * It is listed once, and again after ckpt_dir_refresh. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "io/bucket/client.h"
#include "io/dir.h"
#include "io/recording.h"

/* Is it s3://..., not a path of this machine? */
bool ckpt_is_bucket(const char *path);

/* Open s3://BUCKET/PREFIX, and list it unless a recording that is replayed (or NULL) answers for
 * it. MISSING: no key begins with it. is_around: nobody has named it, so it is listed when
 * something is looked for there; if it can't be, as a key may be valid for some prefixes only, it
 * is empty. */
int ckpt_dir_open_bucket(const char *url, bool is_around, const struct ckpt_bucket_settings *s,
                         const struct ckpt_recording *rec, struct ckpt_dir **ret,
                         struct ckpt_err *err);
