/* SPDX-License-Identifier: Apache-2.0 */
/* A run that lies in several directories, as where every node of a cluster has its own ranks'
 * shards on its disk: the union of the directories is one, and no reader knows of it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "io/dir.h"

/* Open the union of n directories, of which it takes over one reference each, on failure too. An
 * entry that several have is that of the first. Of a file that is opened, all copies must be the
 * same: of equal size and, up to 1 MiB, equal; of larger ones the first, the last and 16 blocks
 * between them are compared, or with `whole` all. CONFLICT names both otherwise. UNSUPPORTED: some
 * are buckets and some are not. */
int ckpt_dir_open_union(struct ckpt_dir **member, size_t n, bool whole, struct ckpt_dir **ret,
                        struct ckpt_err *err);
