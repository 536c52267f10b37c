/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files: a JSON or YAML (by suffix) object in a file of a directory. */
#ifndef CKPT_CONTAINER_CONFIG_H
#define CKPT_CONTAINER_CONFIG_H

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "io/dir.h"

/* Larger ones hold no configuration. */
enum { CKPT_CONFIG_MAX_BYTES = 16 * 1024 * 1024 };

/* Read and parse `name` below dir, of at most max_len bytes. Errors name the file; what is no
 * object is FORMAT, a file that is not there MISSING. *ret is new. */
int ckpt_config_read(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                     struct ckpt_err *err);

/* The same, but a file that is not there is no error: *ret stays as it is. */
int ckpt_config_read_if(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                        struct ckpt_err *err);

#endif
