/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of ckpt, of which load and plan are in a program of their own, ckpt-load. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>

#include <jansson.h>

#include <ckptfs/load.h>

#include "cmdline.h"

/* The parsed command line. */
struct ckpt_tool {
    struct ckptfs_cmdline line;
    const char *run;
    char **operand; /* operands after RUN */
    char *step;     /* NULL: the latest */
    char *steps;    /* of export: several; NULL: one */
    char *svg;      /* a file for explain's drawing, or NULL */
    struct ckpt_options *opt;
    uint32_t jobs;       /* number of threads; 0: chosen by the command */
    uint32_t log_json;   /* messages are lines of JSON */
    const char *program; /* the name that stands before messages */
    bool json, files, tensors, quiet, verbose;
    bool weights_only, no_weights, watch; /* of export */
    char *part;                           /* of export: "I/N"; NULL: what the launcher says */
    bool alone;                           /* of export: whatever the launcher says */
    /* of verify and delta: */
    struct ckpt_options *other; /* of B; NULL: the defaults */
    char *other_step;           /* as `step` */
    double tolerance;
    /* of delta, which has the two before, too: */
    char *delta_format;              /* NULL: the first that the library knows */
    uint32_t encoding;               /* 0: xor; 1: overwrite */
    char *base_version, *delta_from; /* of export: a step */
    /* of load and plan: */
    char *layout, *transport;
    struct ckpt_load_options load;
    uint32_t ranks, ranks_per_node; /* of plan; 0: not given */
    uint32_t share_ranks;           /* --share; 0: not given */
    bool verify;                    /* compare the loaded bytes with the view */
    bool local;                     /* each node has only some of the files */
    char *node_files;               /* of plan: a list of which node has what; NULL: not given */
};

/* A command returns -1 with *err filled, or one of these. */
enum { CKPT_TOOL_GOOD = 0, CKPT_TOOL_DIFFERENT = 1 };

/* The commands; ckpt(1) and ckpt-load(1) describe them. */
int ckpt_cmd_info(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_ls(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_explain(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_export(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_verify(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_delta(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_digest(const struct ckpt_tool *t, struct ckpt_err *err);
int ckpt_cmd_load(const struct ckpt_tool *t, struct ckpt_comm *comm, struct ckpt_err *err);
int ckpt_cmd_plan(const struct ckpt_tool *t, struct ckpt_err *err);

/* Parse the command line of ckpt or ckpt-load, whose name is borrowed. *ret_command is a bit of
 * cmdline.h; 0: help or the version was asked for, and is printed. */
int ckpt_tool_init(struct ckpt_tool *t, const char *program, char **argv, uint32_t *ret_command,
                   struct ckpt_err *err);
void ckpt_tool_release(struct ckpt_tool *t);

/* Print what a command could not print, or why it failed, after the program's name. Returns the
 * exit status; rc is what the command has returned. */
int ckpt_tool_finish(const struct ckpt_tool *t, int rc, struct ckpt_err *err);

/* Print a message on standard error, after the program's name. `tool` is a struct ckpt_tool. */
void ckpt_tool_print(void *tool, enum ckpt_log_severity severity, const char *text);

/* Print the library's errors, warnings and notes on standard error, after the program's name. */
void ckpt_tool_log(struct ckpt_tool *t);

/* Raise the limit of open files as far as the system permits, and make a file that may not grow any
 * more (ulimit -f) an error (EFBIG), as a full disk is, not the end of the process. */
void ckpt_tool_limits(void);

/* Open the run at `path`, and the view of a step: its full name, or the number at its end; NULL:
 * the latest. If the latest cannot be opened, the error suggests another. ret_run NULL: only the
 * view is needed. */
int ckpt_tool_open_run(const char *path, const struct ckpt_options *opt, const char *step,
                       struct ckpt_run **ret_run, struct ckpt_view **ret_view,
                       struct ckpt_err *err);

/* Open what the command line says. */
int ckpt_tool_open(const struct ckpt_tool *t, struct ckpt_view **ret_view, struct ckpt_err *err);

/* One export: the files of a view in a directory, written, resumed or compared. */
struct ckpt_export {
    const struct ckpt_tool *tool; /* its options */
    const char *step;             /* of several, which the report then names; or NULL */
    bool only_new;       /* leave a directory that has all files as it is, and do not compare */
    atomic_bool writing; /* DEST is unfinished now */
    /* results: */
    bool wrote;    /* something was written, and DEST is finished */
    bool compared; /* DEST was finished, and every byte of it is the view's */
    bool other;    /* the export failed: DEST holds other files, and no unfinished export */
};

/* Export the view into dest, and print a report. A failure leaves what the same call can resume, or
 * nothing. */
int ckpt_export(struct ckpt_export *e, struct ckpt_view *view, const char *dest,
                struct ckpt_err *err);

/* If `dest` is not there, or is empty, and an unfinished export into it is: *ret, which is new,
 * says how far that is; else NULL. Nothing is changed. */
int ckpt_export_state(const char *dest, json_t **ret, struct ckpt_err *err);

/* Print that for people. */
void ckpt_export_print_state(const json_t *state);
