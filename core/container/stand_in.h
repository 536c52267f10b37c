/* SPDX-License-Identifier: Apache-2.0 */
/* Files that have a checkpoint's name and hold something else, which people meet when a download
 * went wrong: the pointer of git-lfs (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md), a
 * page of a web server, a store's answer in XML. */
#pragma once

#include <stddef.h>

#include "base/err.h"

/* FORMAT, with what the file is and what to do, if its first n bytes (64 are enough) are those of
 * such a file; else 0. */
int ckpt_refuse_stand_in(const void *bytes, size_t n, struct ckpt_err *err);
