/* SPDX-License-Identifier: Apache-2.0 */
/* Everything that a mount consists of: what every request handler is given. */
#ifndef CKPT_FS_MOUNT_H
#define CKPT_FS_MOUNT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "buffers.h"
#include "cmdline.h"
#include "digests.h"
#include "dispatch.h"
#include "log.h"
#include "nodes.h"
#include "refresh.h"
#include "sandbox.h"

/* What kernel, library and mount agreed on. Written before the first request but INIT. */
struct ckptfs_negotiated {
    unsigned proto_major, proto_minor;
    unsigned max_read;      /* bytes per request */
    unsigned readahead_kib; /* as the kernel says now; 0: not known */
    char dev[32];           /* MAJ:MIN of the mount's bdi; "" if not known */
    bool readahead_refused; /* we were not permitted to raise it */
    bool direct_mmap;       /* FUSE_CAP_DIRECT_IO_ALLOW_MMAP is in force */
};

/* Since the mount. */
struct ckptfs_counters {
    _Atomic uint64_t lookups, opens, reads, read_bytes, errors, open_files;
};

/* Open files and listings, so that those which the kernel never releases (it is unmounted under
 * their users) are freed at the end. */
struct ckptfs_handle {
    struct ckptfs_handle *prev, *next;
    bool is_listing;
};

struct ckptfs_handles {
    pthread_mutex_t lock; /* innermost, as the nodes' */
    struct ckptfs_handle *first;
};

struct ckptfs {
    const struct ckptfs_config *config;
    const struct ckptfs_log *log;
    struct ckptfs_sandbox sandbox;
    struct ckptfs_refresh refresh;
    struct ckptfs_nodes nodes;
    struct ckptfs_handles handles;
    struct ckptfs_digests digests;
    struct ckptfs_negotiated negotiated;
    struct ckptfs_counters count;
    struct ckptfs_buffers buffers;
    struct ckptfs_dispatch dispatch;
    time_t started;
};

#endif
