/* SPDX-License-Identifier: Apache-2.0 */
/* Names of files in JSON, which may be any bytes. */
#ifndef CKPT_FS_JSON_TEXT_H
#define CKPT_FS_JSON_TEXT_H

#include <jansson.h>

/* A new string, as errors show it: bytes that are not UTF-8 are "\xNN". NULL: no memory. */
json_t *ckptfs_json_text(const char *bytes);

/* Append a value, which is taken, to a list that is being made. If there is no memory (also: value
 * is NULL), *list becomes NULL and stays so: whoever makes it checks once, at the end. */
void ckptfs_json_append(json_t **list, json_t *value);

#endif
