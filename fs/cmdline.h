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
    bool debug;      /* say what was negotiated, and libckptfs's remarks */
    bool wait;       /* mount also while there is no readable step */
    bool null_reads; /* answer reads with a constant buffer: the yardstick of the benchmarks */
    bool direct;     /* io=direct */
    bool allow_other;
    bool sandbox; /* confine the daemon (sandbox.h) */
    uid_t uid;
    gid_t gid;
    mode_t umask;
    unsigned threads;
    unsigned readahead_kib; /* 0: leave the kernel's */
    struct ckpt_options *opt;
    int lock; /* the mountpoint's descriptor, locked against other ckptfs until it is mounted; or -1
               */
    char *fuse_words; /* what goes to FUSE, as for its -o; or NULL */
};

void ckptfs_config_release(struct ckptfs_config *c);

/* Parse. Every failure is a USAGE error whose text names the word. Paths are left as they were
 * given, see ckptfs_paths_resolve. */
int ckptfs_cmdline_parse(int argc, char **argv, struct ckptfs_config *ret, struct ckpt_err *err);

extern const char ckptfs_usage[];

/* Split the next option off *list ("a,b=c\,d,..."), in place: its word, and its value (NULL: none)
 * with `\,` and `\\` made plain. False at the end. The tool's -o is the same. */
bool ckptfs_next_option(char **list, char **ret_word, char **ret_value);

#endif
