/* SPDX-License-Identifier: Apache-2.0 */
/* Folders on storage at a distance: each is listed once, and whether there is an entry is then
 * known without a request. Who looks for many names that are not there, as all readers of formats
 * do, waits for one list. */
#pragma once

#include "base/err.h"
#include "io/dir.h"

/* Let a directory that nobody else uses yet keep lists, until ckpt_dir_refresh. */
int ckpt_dir_keep_lists(struct ckpt_dir *dir, struct ckpt_err *err);
