/* SPDX-License-Identifier: Apache-2.0 */
/* A YAML document as JSON values, by libyaml. */
#pragma once

#include <stddef.h>

#include "base/err.h"
#include "base/json.h"

/* Parse one document of text[0..len). Plain scalars become null, booleans, integers and floats as
 * PyYAML reads them (YAML 1.1, without its sexagesimal, octal and yes/no forms, which PyYAML does
 * not write), everything else a string; tags are ignored. Aliases are copied. Duplicate keys, depth
 * > 64 and more than 10^6 nodes are refused. `what` names the text in errors. *ret is new. */
int ckpt_yaml_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err);
