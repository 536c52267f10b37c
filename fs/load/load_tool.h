/* SPDX-License-Identifier: Apache-2.0 */
/* The program ckpt-load, which is `ckpt load` and `ckpt plan`. */
#ifndef CKPT_FS_LOAD_LOAD_TOOL_H
#define CKPT_FS_LOAD_LOAD_TOOL_H

#include <ckptfs/load.h>

#include "tool.h"

struct ckpt_load_tool {
    struct ckpt_tool tool;
    const char *layout;
    struct ckpt_load_options opt;
    uint32_t ranks, ranks_per_node; /* for `ckpt plan`; 0: not given */
    bool verify;                    /* compare the loaded bytes with the view */
    uint32_t given;                 /* a bit for each option that was given (load_main.c) */
};

/* Run `ckpt load` on this rank. Returns 0, or -1 with *err filled. */
int ckpt_load_run(const struct ckpt_load_tool *t, struct ckpt_comm *comm, struct ckpt_err *err);
int ckpt_load_print_plan(const struct ckpt_load_tool *t, struct ckpt_err *err);

#endif
