/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of ckptfs: ckptfs RUN MOUNTPOINT [-f] [-d] [-o word[=value],...].
 *
 * A word of -o belongs to exactly one of three: the mount (the members below), the library
 * (ckpt_options_set), FUSE. */
#ifndef CKPT_FS_CMDLINE_H
#define CKPT_FS_CMDLINE_H

#include <stdbool.h>
#include <sys/types.h>

#include <ckptfs/ckptfs.h>

struct ckptfs_config {
    char *run;        /* absolute, without symlinks */
    char *mountpoint; /* likewise */
    bool help, version;
    bool foreground;
    bool debug;      /* log the negotiated options and the library's messages */
    bool wait;       /* mount also while there is no readable step */
    bool null_reads; /* answer reads with a constant buffer, as a baseline for benchmarks */
    bool direct;     /* io=direct */
    bool allow_other;
    bool sandbox; /* confine the daemon (sandbox.h) */
    uid_t uid;
    gid_t gid;
    mode_t umask;
    unsigned threads;
    unsigned readahead_kib; /* 0: keep the kernel's default */
    struct ckpt_options *opt;
    int lock; /* the mountpoint's descriptor, locked against other ckptfs until it is mounted; or -1
               */
    char *fuse_words; /* the part of -o that is passed to FUSE, or NULL */
};

/* Free the configuration, and unlock the mountpoint. */
void ckptfs_config_release(struct ckptfs_config *c);

/* Parse the command line. Every failure is a USAGE error whose text names the word. Paths are
 * stored as given; ckptfs_paths_resolve makes them absolute. */
int ckptfs_cmdline_parse(int argc, char **argv, struct ckptfs_config *ret, struct ckpt_err *err);

/* The text of --help. */
extern const char ckptfs_usage[];

/* An option of -o that was written as a long one, at argv[optind - 1], which getopt_long does not
 * know: "--base=X", "--base X", "--allow-partial" (optind goes past a value that it takes). `set`
 * sets a word; value is NULL for a bare one. Fails as it does; USAGE for what `set` does not know
 * either. */
int ckptfs_long_option(int argc, char **argv,
                       int (*set)(void *ctx, const char *word, const char *value,
                                  struct ckpt_err *err),
                       void *ctx, struct ckpt_err *err);

/* Take the next option off *list ("a,b=c\,d,..."), in place: *ret_word is its word, and *ret_value
 * its value (NULL: none) in which `\,` and `\\` are unescaped. False at the end of the list. The -o
 * option of ckpt(1) has the same syntax. */
bool ckptfs_next_option(char **list, char **ret_word, char **ret_value);

#endif
