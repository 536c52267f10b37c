/* SPDX-License-Identifier: Apache-2.0 */
/* Folders whose storage may hang: each question about them is given up after a time. */
#pragma once

#include "base/err.h"
#include "io/dir.h"

/* Open what is at `path`, a folder as ckpt_dir_open does; by a call, which is given up by these
 * options, unless nothing is far by their rule. *ret_is_file: it is a file; then *ret is NULL. */
int ckpt_dir_open_bounded(const char *path, enum ckpt_links links,
                          const struct ckpt_far_options *far, bool *ret_is_file,
                          struct ckpt_dir **ret, struct ckpt_err *err);

/* Open a directory as ckpt_dir_open_passage does, by such a call. */
int ckpt_dir_open_passage_bounded(const char *path, const struct ckpt_far_options *far,
                                  struct ckpt_dir **ret, struct ckpt_err *err);

/* Is there a file at `path`? By such a call; false, too, if there is no answer. */
bool ckpt_path_is_file_bounded(const char *path, const struct ckpt_far_options *far);

/* Bound the questions about a directory, and below it, by its options (ckpt_dir_set_far), if its
 * storage may hang (ckpt_dir_may_hang). It is a folder of a filesystem that nobody else uses yet.
 */
int ckpt_dir_bound(struct ckpt_dir *dir, struct ckpt_err *err);
