/* SPDX-License-Identifier: Apache-2.0 */
/* The work folder of an unfinished export, in which all processes that write it meet; there is no
 * server, and no lock that NFS or Lustre lack. It holds
 *
 *     job          a JSON object: what is exported, which the first process writes
 *     files/       the files; becomes DEST when all are whole
 *     processes/   a journal of each process, to which nobody else writes
 *     claims/      who does what alone
 *
 * A journal consists of lines of JSON. The first one is of process.h, then there are those of
 * done.h; {"end": BOOL} is the last one of a process that was not killed: did it do what it had to?
 * Its time of modification is the process's heartbeat.
 *
 * A claim ID.0 is made with O_EXCL by the process that does ID alone, and names that process. If it
 * is dead, another makes ID.1, and so on: the last one counts, and none is deleted.
 *
 * A job without files/ has become DEST, and its folder is about to be deleted. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include <jansson.h>

#include <ckptfs/err.h>

#include "base/vec.h"
#include "tool/export/process.h"

/* How long what takes. Tests have shorter times, and smaller units (CKPTFS_EXPORT_TEST). */
struct ckpt_job_limits {
    uint64_t cut;      /* bytes of a unit (spans.h) */
    uint64_t beat_ms;  /* between two heartbeats */
    uint64_t stale_ms; /* a process of another host is dead without a heartbeat for so long */
    uint64_t
        launch_ms; /* a launcher's other parts must have begun when one has waited for so long */
};

struct ckpt_job {
    struct ckpt_job_limits limits;
    char *path;            /* of the folder, for messages */
    const char *name;      /* of the folder in `above`; the end of path */
    int above, dir, files; /* descriptors: the folder above, which is borrowed; the work folder;
                              files/, or -1: it has become DEST */
    int processes, claims;
    bool is_new; /* this process wrote `job` */
    /* of a process that takes part: */
    char *self; /* the name of its journal; NULL: it takes no part */
    int journal;
    CKPT_VEC(struct ckpt_process) all; /* the processes that have been seen, this one too */
    pthread_t heart;
    pthread_mutex_t lock;
    pthread_cond_t stop;
    bool beats, stopped;
};

/* A file's time of modification as its journal has it. */
static inline int64_t ckpt_job_mtime_ns(const struct stat *st)
{
    return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

/* The name of files/ in the folder. */
extern const char ckpt_job_files[];

/* A function that is given a line of a journal. */
typedef int ckpt_job_line(void *ctx, const json_t *line, struct ckpt_err *err);

/* The usual limits, or a test's. */
struct ckpt_job_limits ckpt_job_usual_limits(void);

/* Make the work folder `name` in `above`, or join the job whose folder is there. `what` is the job:
 * its member "export" says of what, "command" who began it, and all others must be equal. `shown`
 * is DEST's path, for messages. CONFLICT: the folder is of another job. Release also after a
 * failure. */
int ckpt_job_open(struct ckpt_job *ret, int above, const char *name, const char *shown,
                  const json_t *what, struct ckpt_err *err);

/* Open files/ again, in whose place another folder has been put. */
int ckpt_job_reopen_files(struct ckpt_job *job, struct ckpt_err *err);

/* Open the folder of some job, to look at it. *ret_what is new. MISSING: there is none. */
int ckpt_job_look(struct ckpt_job *ret, int above, const char *name, const char *shown,
                  json_t **ret_what, struct ckpt_err *err);

/* Take part: begin a journal, and let the heart beat. */
int ckpt_job_begin(struct ckpt_job *job, uint32_t part, uint32_t parts, struct ckpt_err *err);

/* Append a line, which is taken, to this process's journal, and sync it. NULL: there was no memory
 * for it. Safe from many threads. */
int ckpt_job_add(struct ckpt_job *job, json_t *line, struct ckpt_err *err);

/* Append a list of lines, which is taken, likewise; the journal is synced once. */
int ckpt_job_add_all(struct ckpt_job *job, json_t *lines, struct ckpt_err *err);

/* Look for processes, read what all journals have more than when they were read before, and find
 * out who lives. */
int ckpt_job_refresh(struct ckpt_job *job, ckpt_job_line *take, void *ctx, struct ckpt_err *err);

/* Do as a part of a job: 1: `id` is this process's; 0: another one has it that lives, *ret_holder
 * (of job->all); -1: failed. `patient`: wait until it is certain whether a holder on another host
 * lives; otherwise one that may live does. */
int ckpt_job_claim(struct ckpt_job *job, const char *id, bool patient, size_t *ret_holder,
                   struct ckpt_err *err);

/* Another process that lived at the last ckpt_job_refresh, or NULL. */
const struct ckpt_process *ckpt_job_other(const struct ckpt_job *job);

/* Has files/ become DEST? */
bool ckpt_job_is_named(const struct ckpt_job *job);

/* Say in the journal that this process has ended, and how, and stop its heart. */
void ckpt_job_end(struct ckpt_job *job, bool good);

/* Delete the folder, but for what is in files/. Other processes may do so at the same time. */
void ckpt_job_remove(struct ckpt_job *job);

/* Close all. It ends, too. */
void ckpt_job_release(struct ckpt_job *job);
