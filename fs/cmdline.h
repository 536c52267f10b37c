/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of the programs, and its help. Both are made from one table of options
 * (options.c), in which each row says which commands take the option. An option is written
 * --word=value, --word value, or, as mount(8) has it, -o word=value; '-' and '_' are the same in a
 * word. The words of the library (ckpt_options_word) belong to every command, and the help of a
 * command lists those that change what it does. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

#include "base/option.h"

/* The commands, as bits. */
enum {
    CKPTFS_MOUNT = 1 << 0, /* the program ckptfs */
    CKPTFS_INFO = 1 << 1,
    CKPTFS_LS = 1 << 2,
    CKPTFS_EXPLAIN = 1 << 3,
    CKPTFS_EXPORT = 1 << 4,
    CKPTFS_VERIFY = 1 << 5,
    CKPTFS_DIGEST = 1 << 6,
    CKPTFS_LOAD = 1 << 7,
    CKPTFS_PLAN = 1 << 8,
    CKPTFS_DELTA = 1 << 9,
    CKPTFS_TOOL = (1 << 10) - 2, /* all commands of ckpt */
    /* those that show files, which may be a training framework's */
    CKPTFS_FILES = CKPTFS_MOUNT | CKPTFS_LS | CKPTFS_EXPORT | CKPTFS_VERIFY | CKPTFS_DIGEST,
};

struct ckptfs_command {
    uint32_t bit;
    const char *name;     /* with the program: "ckpt info" */
    const char *operands; /* separated by spaces; all of them are needed */
    const char *help;     /* a line */
    const char *more;     /* lines at the end of the command's help, or NULL */
    const char *also;     /* what other programs call the command, separated by spaces; or NULL */
};

/* A hint tells a user who writes another program's option, which is no option here, what to do. */
struct ckptfs_hint {
    uint32_t of;       /* the commands for which it is true */
    const char *words; /* other programs' options, separated by spaces */
    const char *text;  /* a clause that says what to do */
};

extern const struct ckptfs_command ckptfs_commands[]; /* ends with bit 0 */
extern const struct ckpt_option ckptfs_options[];
extern const size_t ckptfs_noptions;
extern const struct ckptfs_hint ckptfs_hints[]; /* ends with of 0 */

/* A command line: the first members say what to do, the others are the result. All zero at first.
 */
struct ckptfs_cmdline {
    void *into;               /* the struct in which the members of the table lie */
    struct ckpt_options *opt; /* for the words of the library */
    uint32_t of;              /* the program's commands */
    /* Take a word that is neither in the table nor the library's. 0: it is not known, 1: it is
     * taken. NULL: there are no such words. */
    int (*other)(void *into, const char *word, const char *value, struct ckpt_err *err);

    const struct ckptfs_command *command; /* NULL: only help or the version was asked for */
    bool help, version;
    char **rest;    /* the arguments of the option that takes the rest of the line; or NULL */
    char **operand; /* with the command's name, if the program has several; ends with NULL */
    size_t noperand;
};

/* Free what the parser has allocated; not what `into` and `opt` point to. */
void ckptfs_cmdline_release(struct ckptfs_cmdline *c);

/* Parse; options may stand before, between and after the operands. Prints the help if that was
 * asked for. USAGE: an option or command is not known, does not go with the command, or has a wrong
 * value; operands are missing, or are too many. */
int ckptfs_cmdline_parse(struct ckptfs_cmdline *c, char **argv, struct ckpt_err *err);

/* Take the next option off *list ("a,b=c\,d,..."), in place: *ret_word is its word, and *ret_value
 * its value (NULL: none) in which `\,` and `\\` are unescaped. False at the end of the list. */
bool ckptfs_next_option(char **list, char **ret_word, char **ret_value);
