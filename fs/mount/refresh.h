/* SPDX-License-Identifier: Apache-2.0 */
/* The run behind a mount and a current list of its steps. A thread scans the run once a
 * second, or less often (ckptfs_scan_pause). Requests use the last list and never wait for a scan,
 * so a run on a dead file server stops only the scans. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "mount/config.h"
#include "mount/log.h"
#include "mount/nodes.h"
#include "mount/sandbox.h"
#include "mount/silence.h"

/* An immutable list of steps, with a reference count. */
struct ckptfs_steps {
    atomic_uint nref;
    bool folder;
    struct ckpt_step *step; /* oldest first */
    size_t n;
    struct ckpt_step_link *link;
    size_t nlink;
};

struct ckptfs_refresh {
    const struct ckptfs_config *config;
    const struct ckptfs_log *log;
    const struct ckptfs_sandbox *sandbox;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic(struct ckpt_run *)
        run;                  /* NULL until the first step appears (only with -o wait); set once */
    struct ckptfs_steps *now; /* NULL while run is; protected by the lock */
    _Atomic uint64_t bytes;   /* size of the newest view that was opened, for statfs */
    bool failing;             /* the last scan failed and was logged */
    uint64_t said[64];        /* hashes of errors that were logged; protected by the lock */
    size_t nsaid;
    struct ckptfs_silences silences; /* of steps that are opened, and of files */
    bool kicked, stop;               /* scan at once; end. Protected by the lock */
    pthread_t thread;
};

/* Open config's run and list its steps. Unless config says wait, also open a view, to prove that
 * the run can be read. */
int ckptfs_refresh_open(struct ckptfs_refresh *r, const struct ckptfs_config *config,
                        const struct ckptfs_log *log, const struct ckptfs_sandbox *sandbox,
                        struct ckpt_err *err);

/* Start and stop the scanning thread. Start it after any fork, because threads do not survive one.
 */
int ckptfs_refresh_start(struct ckptfs_refresh *r, struct ckpt_err *err);
void ckptfs_refresh_kick(struct ckptfs_refresh *r); /* scan at once */
void ckptfs_refresh_stop(struct ckptfs_refresh *r);

/* Free everything. Only after ckptfs_refresh_stop. */
void ckptfs_refresh_release(struct ckptfs_refresh *r);

/* Hold the current list; release it with ckptfs_steps_release. NULL if there is no run yet. */
struct ckptfs_steps *ckptfs_steps_hold(struct ckptfs_refresh *r);
void ckptfs_steps_release(struct ckptfs_steps *s);
CKPT_CLEANUP_BY(ckptfs_steps_release, struct ckptfs_steps)

/* Find a step by name (NULL: the latest); NULL if there is none. Valid as long as s. */
const struct ckpt_step *ckptfs_steps_find(const struct ckptfs_steps *s, const char *name);
const struct ckpt_step *ckptfs_steps_latest(const struct ckptfs_steps *s);

/* Find a link of the run to one of its steps; NULL if there is none. Valid as long as s. */
const struct ckpt_step_link *ckptfs_steps_link(const struct ckptfs_steps *s, const char *name);

/* Get the view of a step ("" for a run that is one checkpoint), which the caller releases. The
 * first call may take long. An error of a step is logged once. STALE: the step is gone, so its name
 * must be looked up again. */
int ckptfs_view_of(struct ckptfs_refresh *r, const char *step, struct ckpt_view **ret,
                   struct ckpt_err *err);

/* Get the view that a node belongs to. If the node's generation is older than the step's, the error
 * is STALE, after which the kernel looks the path up again. */
int ckptfs_view_of_node(struct ckptfs_refresh *r, const struct ckptfs_id *id,
                        struct ckpt_view **ret, struct ckpt_err *err);
