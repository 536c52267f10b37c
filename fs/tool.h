/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of ckpt: each is one function in cmd_<name>.c and one line in the table of ckpt.c.
 */
#ifndef CKPT_FS_TOOL_H
#define CKPT_FS_TOOL_H

#include <stdbool.h>

#include <ckptfs/ckptfs.h>

/* The parsed command line. Strings point into argv. */
struct ckpt_tool {
    const char *run;
    char **operand; /* operands after RUN */
    int noperand;
    const char *step; /* NULL: the latest */
    struct ckpt_options *opt;
    unsigned jobs; /* number of threads; 0: chosen by the command */
    bool json, files, tensors, quiet, verbose;
    bool weights_only, no_weights; /* of export */
};

/* A command returns -1 with *err filled, or one of these. */
enum { CKPT_TOOL_GOOD = 0, CKPT_TOOL_DIFFERENT = 1 };

/* The commands; ckpt(1) describes them. */
int ckpt_cmd_info(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_ls(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_explain(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_export(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_verify(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_digest(const struct ckpt_tool *t, struct ckpt_err *err);

/* Set options from a list such as "dtype=float16,base=/models/x", the argument of -o. */
int ckpt_tool_set_options(struct ckpt_options *opt, const char *list, struct ckpt_err *err);

/* One of them; opt is a struct ckpt_options. USAGE for a word that the library does not know. */
int ckpt_tool_set_option(void *opt, const char *word, const char *value, struct ckpt_err *err);

/* Raise the limit of open files as far as the system permits, and make a file that may not grow any
 * more (ulimit -f) an error (EFBIG), as a full disk is, not the end of the process. */
void ckpt_tool_limits(void);

/* Open the run, and the view that --step selects: a step's full name, or the number at its end. */
int ckpt_tool_open(const struct ckpt_tool *t, struct ckpt_run **ret_run,
                   struct ckpt_view **ret_view, struct ckpt_err *err);

/* Open the view of a step by its name; NULL: the latest. If the latest cannot be opened, the error
 * says so. */
int ckpt_tool_open_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret_view,
                        struct ckpt_err *err);
void ckpt_runp(struct ckpt_run **run);

#endif
