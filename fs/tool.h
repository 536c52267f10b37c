/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt's commands: one function each, in cmd_<name>.c, and one line in ckpt.c's table. */
#ifndef CKPT_FS_TOOL_H
#define CKPT_FS_TOOL_H

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

/* The command line, parsed. Texts are argv's. */
struct ckpt_tool {
    const char *run;
    char **operand; /* after RUN */
    int noperand;
    const char *step; /* NULL: latest */
    struct ckpt_options *opt;
    unsigned jobs; /* 0: as many as suit */
    bool json, files, tensors, quiet;
};

/* What a command returns: -1 with *err filled, or one of these. */
enum { CKPT_TOOL_GOOD = 0, CKPT_TOOL_DIFFERENT = 1 };

int ckpt_cmd_info(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_ls(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_explain(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_export(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_verify(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_digest(const struct ckpt_tool *t, struct ckpt_err *err);

/* "dtype=float16,base=/models/x", as -o has it. */
int ckpt_tool_set_options(struct ckpt_options *opt, const char *list, struct ckpt_err *err);

/* As many open files as the system allows. */
void ckpt_tool_many_files(void);

/* Open the run and the view that --step names. A step is named by its directory, or by the number
 * that its name ends in. */
int ckpt_tool_open(const struct ckpt_tool *t, struct ckpt_run **ret_run,
                   struct ckpt_view **ret_view, struct ckpt_err *err);

/* The view of a step, by its name; NULL: the latest, whose error says so. */
int ckpt_tool_open_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret_view,
                        struct ckpt_err *err);
void ckpt_runp(struct ckpt_run **run);

#endif
