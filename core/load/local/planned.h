/* SPDX-License-Identifier: Apache-2.0 */
/* The directory of a run of which nodes have parts, on a machine that is none of them, for
 * `ckpt plan --local`: who has what is looked up or told, and headers are read here. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "io/dir.h"

struct ckpt_options;

/* Where the parts are. */
struct ckpt_planned_parts {
    const char *path; /* with {node}: a directory for each node, of which some may not exist */
    const char *list; /* NULL, or a file of lines NODE PATTERN: the path has all files then, and
                         nodes those below it that match; "*" is every node */
    uint32_t nnode;
    uint32_t per_node; /* ranks of the job on each node */
};

/* Open it. MISSING: no node has a directory. USAGE: the path has no {node} and there is no list, or
 * both; a line of the list is none, or no line names a file. */
int ckpt_planned_open(const struct ckpt_planned_parts *parts, const struct ckpt_options *opt,
                      struct ckpt_dir **ret, struct ckpt_err *err);
