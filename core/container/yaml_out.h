/* SPDX-License-Identifier: Apache-2.0 */
/* JSON values as a YAML document, as PyYAML's safe_dump writes it: block style, keys sorted. */
#pragma once

#include "base/json.h"
#include "base/str.h"

/* Append an object; other values can only be its members. Strings that are not plain words are
 * quoted as in JSON. */
void ckpt_yaml_out(const json_t *j, struct ckpt_str *out);
