/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files: a JSON or YAML (by suffix) object in a file of a directory. */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"

/* A larger file is not a configuration. */
enum { CKPT_CONFIG_MAX_BYTES = 16 * 1024 * 1024 };

/* Read and parse `name` below dir, of at most max_len bytes. Errors name the file: FORMAT if it is
 * not a JSON object, MISSING if there is no such file. *ret is new. */
int ckpt_config_read(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                     struct ckpt_err *err);

/* As ckpt_config_read, but if the file does not exist, *ret is left unchanged and the result is 0.
 */
int ckpt_config_read_if(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                        struct ckpt_err *err);
