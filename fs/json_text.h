/* SPDX-License-Identifier: Apache-2.0 */
/* File names, which may hold any bytes, as JSON strings. */
#ifndef CKPT_FS_JSON_TEXT_H
#define CKPT_FS_JSON_TEXT_H

#include <jansson.h>

/* Make a string in which bytes that are not UTF-8 are escaped as in error texts. NULL: out of
 * memory. */
json_t *ckptfs_json_text(const char *bytes);

#endif
