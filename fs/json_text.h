/* SPDX-License-Identifier: Apache-2.0 */
/* Names of files in JSON, which may be any bytes. */
#ifndef CKPT_FS_JSON_TEXT_H
#define CKPT_FS_JSON_TEXT_H

#include <jansson.h>

/* A new string, as errors show it: bytes that are not UTF-8 are "\xNN". NULL: no memory. */
json_t *ckptfs_json_text(const char *bytes);

#endif
