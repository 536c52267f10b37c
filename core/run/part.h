/* SPDX-License-Identifier: Apache-2.0 */
/* A user may name the folder that has a checkpoint's weights alone; its config and tokenizer are in
 * the folder above. */
#pragma once

#include "base/err.h"
#include "container/archive.h"
#include "io/dir.h"

struct ckpt_recording;

/* The folder above the directory, as a new string, if the directory has the name of a folder of
 * weights in some format; NULL: it does not have such a name, or there is no memory. Nothing is
 * read. */
char *ckpt_part_above(const struct ckpt_dir *dir);

/* As ckpt_archive_open. If the path is the folder of weights in a checkpoint, that checkpoint is
 * opened. */
int ckpt_part_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                   struct ckpt_err *err);
