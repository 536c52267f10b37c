/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a mount, which every request handler receives. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <time.h>

#include "mount/admission.h"
#include "mount/config.h"
#include "mount/log.h"
#include "mount/nodes.h"
#include "mount/refresh.h"
#include "mount/sandbox.h"

/* The kernel, libfuse and the mount have negotiated these values. They are written before any
 * request except INIT is handled. */
struct ckptfs_negotiated {
    unsigned proto_major, proto_minor;
    unsigned max_read;      /* bytes per request */
    unsigned readahead_kib; /* the current read-ahead; 0: not known */
    char dev[32];           /* MAJ:MIN of the mount's backing device (bdi); "" if not known */
    bool readahead_refused; /* raising the read-ahead was not permitted */
    bool direct_mmap;       /* FUSE_CAP_DIRECT_IO_ALLOW_MMAP is in force */
};

/* Counters since the mount was made. */
struct ckptfs_counters {
    _Atomic uint64_t lookups, opens, reads, read_bytes, errors, open_files;
};

/* An open file or directory listing, and what it holds. If the mount is detached while it is in
 * use, the kernel never releases it; it is then freed at the end. Counted: by the kernel, and by
 * each read of the file, which may outlast the kernel's use of it (watchdog.h). */
struct ckptfs_handle {
    LIST_ENTRY(ckptfs_handle) link;
    atomic_uint refs;
    uint64_t ino; /* of a node that it holds; 0: none */
    struct ckpt_view *view;
    struct ckptfs_steps *steps;
    char *text;
};

struct ckptfs_handles {
    pthread_mutex_t lock; /* no other lock is taken while it is held */
    LIST_HEAD(, ckptfs_handle) all;
};

/* Size in bytes of the largest read request that we accept. */
enum { CKPTFS_MAX_READ = 1 << 20 };

struct ckptfs_buffer {
    struct ckptfs_buffer *next;
    void *mem; /* page-aligned, so that preads can land in it */
};

/* A pool of buffers for replies. The buffer that was returned last is handed out first, to
 * whichever worker asks, so that a sequential reader keeps one or two buffers in the processor's
 * cache instead of one per worker. The pool grows to the largest number of buffers in use at one
 * time; no buffer is freed before the end. Except for the lock, an all-zero struct is an empty
 * pool. */
struct ckptfs_buffers {
    pthread_mutex_t lock; /* no other lock is taken while it is held */
    struct ckptfs_buffer *free;
    bool constant; /* fill new buffers with one byte, for -o null */
};

struct ckptfs {
    const struct ckptfs_config *config;
    const struct ckptfs_log *log;
    struct ckptfs_sandbox sandbox;
    struct ckptfs_refresh refresh;
    struct ckptfs_nodes nodes;
    struct ckptfs_handles handles;
    struct ckptfs_negotiated negotiated;
    struct ckptfs_counters count;
    struct ckptfs_buffers buffers;
    struct ckptfs_admission admission;
    time_t started;
};

/* The handlers of the kernel's requests (ops.c). Each request is answered exactly once. The
 * session's userdata is a struct ckptfs. */
extern const struct fuse_lowlevel_ops ckptfs_ops;

/* Make the content of .ckptfs/stats.json, which is about the mount itself (control.c), and which
 * the caller frees. NULL: out of memory. */
char *ckptfs_stats_text(struct ckptfs *fs);
/* Make the content of .ckptfs/stats.prom in the same way: the same numbers in Prometheus' text
 * format. */
char *ckptfs_stats_prometheus(struct ckptfs *fs);

/* A mount from beginning to end (session.c): open the run, mount it, announce the mount through
 * `ready` (see ckptfs_daemon_fork; from then on, log goes to syslog), and serve requests until it
 * is unmounted or a signal ends it. The paths in config have been resolved. Returns 0 if the mount
 * was made and has ended cleanly. */
int ckptfs_session(struct ckptfs_config *config, struct ckptfs_log *log, int ready,
                   struct ckpt_err *err);
