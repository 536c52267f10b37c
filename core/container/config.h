/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files: a JSON or YAML (by suffix) object in a file of a directory. */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include "io/dir.h"

/* A larger file is not a configuration. */
enum { CKPT_CONFIG_MAX_BYTES = 16 * 1024 * 1024 };

/* Read and parse `name` below dir, of at most max_len bytes. Errors name the file: FORMAT if it is
 * not a JSON object, MISSING if there is no such file. *ret is new. */
int ckpt_config_read(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                     struct ckpt_err *err);

/* Reads as ckpt_config_read does, but if the file does not exist, *ret is left unchanged and the
 * result is 0. */
int ckpt_config_read_if(const struct ckpt_dir *dir, const char *name, size_t max_len, json_t **ret,
                        struct ckpt_err *err);

/* ---- YAML ---- */

/* Parse one document of text[0..len). Plain scalars become null, booleans, integers and floats as
 * PyYAML reads them (YAML 1.1, without its sexagesimal, octal and yes/no forms, which PyYAML does
 * not write), everything else a string; tags are ignored. Aliases are copied. Duplicate keys, depth
 * > 64 and more than 10^6 nodes are refused. `what` names the text in errors. *ret is new. */
int ckpt_yaml_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err);

/* Append a JSON object as a YAML document, as PyYAML's safe_dump writes it (block style, keys
 * sorted); other values can only be its members. Strings that are not plain words are quoted as in
 * JSON. */
void ckpt_yaml_out(const json_t *j, struct ckpt_str *out);
