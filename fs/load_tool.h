/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt-load: `ckpt load` and `ckpt plan`. */
#ifndef CKPT_FS_LOAD_TOOL_H
#define CKPT_FS_LOAD_TOOL_H

#include <ckptfs/load.h>

#include "tool.h"

struct ckpt_load_tool {
    struct ckpt_tool tool;
    const char *layout;
    struct ckpt_load_options opt;
    uint32_t ranks, ranks_per_node; /* of plan; 0: not said */
    bool verify;                    /* the bytes, against the view */
};

/* -1 with *err filled. */
int ckpt_load_run(const struct ckpt_load_tool *t, struct ckpt_comm *comm, struct ckpt_err *err);
int ckpt_load_print_plan(const struct ckpt_load_tool *t, struct ckpt_err *err);

#endif
