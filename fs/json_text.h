/* SPDX-License-Identifier: Apache-2.0 */
/* Names of files in JSON, which may be any bytes. */
#ifndef CKPT_FS_JSON_TEXT_H
#define CKPT_FS_JSON_TEXT_H

#include <jansson.h>

/* A new string; bytes that are not UTF-8 are shown as errors show them. NULL: no memory. */
json_t *ckptfs_json_text(const char *bytes);

#endif
