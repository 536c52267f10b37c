/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration of a mount, which the command line gives. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/ckptfs.h>

struct ckptfs_config {
    char **argv;      /* of the program */
    char *run;        /* absolute, without symlinks */
    char *mountpoint; /* likewise */
    bool foreground;
    bool debug;      /* log the negotiated options and the library's messages */
    bool wait;       /* mount also while there is no readable step */
    bool null_reads; /* answer reads with a constant buffer, as a baseline for benchmarks */
    bool allow_other;
    bool sandbox;    /* confine the daemon (sandbox.h) */
    uint32_t direct; /* io=direct */
    uint32_t log_json;
    uint32_t uid, gid;
    uint32_t file_mode, dir_mode, umask; /* the modes that are shown, and bits removed from them */
    uint32_t threads;
    uint32_t readahead_kib; /* 0: keep the kernel's default */
    struct ckpt_options *opt;
    int lock; /* the mountpoint's descriptor, locked against other ckptfs until it is mounted; or -1
               */
    char *fuse_words; /* the part of -o that is passed to FUSE, or NULL */
};

/* Free the configuration, and unlock the mountpoint. */
void ckptfs_config_release(struct ckptfs_config *c);

/* A value as FUSE takes it in a list of options, which it splits at commas, removing backslashes.
 * The caller frees it; NULL: no memory. */
char *ckptfs_fuse_escape(const char *value);

/* Parse the command line. Every failure is a USAGE error whose text names the word. Paths are
 * stored as given; ckptfs_paths_resolve makes them absolute. If only help or the version was asked
 * for, it is printed and `run` is NULL. */
int ckptfs_config_parse(char **argv, struct ckptfs_config *ret, struct ckpt_err *err);

/* ---- the paths (mounts.c) ---- */

struct ckptfs_log;
/* Make c's paths absolute, and detach a dead ckptfs mount (one whose daemon is gone) from the
 * mountpoint. It is an error if the mountpoint is not a directory, if a live ckptfs is mounted
 * there, or if the mountpoint and the run contain each other, since the daemon would then wait for
 * itself. c->lock is a lock that keeps other ckptfs processes from mounting there until
 * ckptfs_mountpoint_unlock; -1 if the filesystem has no locks. */
int ckptfs_paths_resolve(struct ckptfs_config *c, const struct ckptfs_log *log,
                         struct ckpt_err *err);

/* Release the lock, after the mount was made or has failed. */
void ckptfs_mountpoint_unlock(struct ckptfs_config *c);
