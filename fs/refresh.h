/* SPDX-License-Identifier: Apache-2.0 */
/* The run behind a mount and a current list of its steps, kept by a thread that looks every second.
 *
 * Requests never wait for a scan: they take the last list. A run on a dead file server stops the
 * scans, nothing else. */
#ifndef CKPT_FS_REFRESH_H
#define CKPT_FS_REFRESH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <ckptfs/ckptfs.h>

#include "cmdline.h"
#include "log.h"
#include "nodes.h"
#include "sandbox.h"

/* The steps at one moment; immutable. */
struct ckptfs_steps {
    atomic_uint nref;
    bool folder;
    struct ckpt_step *step; /* oldest first */
    size_t n;
};

struct ckptfs_refresh {
    const struct ckptfs_config *config;
    const struct ckptfs_log *log;
    const struct ckptfs_sandbox *sandbox;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic(struct ckpt_run *) run; /* NULL only before the first step, with -o wait; set once */
    struct ckptfs_steps *now;       /* NULL while run is; under the lock */
    _Atomic uint64_t bytes;         /* size of the newest view that was opened, for statfs */
    bool failing;                   /* the last scan failed and was logged */
    uint64_t said[64];              /* errors of steps that were logged, hashed; under the lock */
    size_t nsaid;
    bool kicked, stop; /* under the lock */
    bool running;
    pthread_t thread;
};

/* Open config's run, its list of steps and, unless config says wait, a view of it (which proves
 * that it can be read). */
int ckptfs_refresh_open(struct ckptfs_refresh *r, const struct ckptfs_config *config,
                        const struct ckptfs_log *log, const struct ckptfs_sandbox *sandbox,
                        struct ckpt_err *err);

/* Begin and end looking. Not before a fork: threads do not survive it. */
int ckptfs_refresh_start(struct ckptfs_refresh *r, struct ckpt_err *err);
void ckptfs_refresh_kick(struct ckptfs_refresh *r); /* look now */
void ckptfs_refresh_stop(struct ckptfs_refresh *r);

/* After stop. */
void ckptfs_refresh_release(struct ckptfs_refresh *r);

/* The current list, to be given back; NULL if there is no run yet. */
struct ckptfs_steps *ckptfs_steps_hold(struct ckptfs_refresh *r);
void ckptfs_steps_release(struct ckptfs_steps *s);
void ckptfs_stepsp(struct ckptfs_steps **s);

/* A step by name, or the latest; NULL if there is none. Lives as long as s. */
const struct ckpt_step *ckptfs_steps_find(const struct ckptfs_steps *s, const char *name);
const struct ckpt_step *ckptfs_steps_latest(const struct ckptfs_steps *s);

/* The view of a step if it is open already, to be released; NULL if it would have to be opened.
 * Never waits for storage. */
struct ckpt_view *ckptfs_view_held(struct ckptfs_refresh *r, const char *step);

/* The view of a step (""; of a run that is one checkpoint), to be released. May take long the first
 * time. An error of a step is logged once. STALE: the step is gone, look its name up again. */
int ckptfs_view_of(struct ckptfs_refresh *r, const char *step, struct ckpt_view **ret,
                   struct ckpt_err *err);

/* The view that a node of a step, or below one, belongs to. Of an older generation it is gone:
 * STALE makes the kernel look the path up again. */
int ckptfs_view_of_node(struct ckptfs_refresh *r, const struct ckptfs_id *id,
                        struct ckpt_view **ret, struct ckpt_err *err);

#endif
