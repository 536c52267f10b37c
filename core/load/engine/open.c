/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt_load_open: rank 0 opens the checkpoint and records what it reads (io/recording.h); the other
 * ranks replay the recording, and open only the files from which they load. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ckd.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "comm/detached.h"
#include "comm/shm.h"
#include "io/recording.h"
#include "load/engine/same.h"
#include "load/local/local.h"
#include "load/local/planned.h"
#include "load/want/want.h"
#include "model/options.h"
#include "model/view.h"

enum {
    SLICE = 1 << 20, /* bytes of the recording that are broadcast at once */
    SEEN_MS =
        35 * 1000, /* NFS clients may show an old directory for 30 s, while they cache attributes */
    COPY_MS = 4 * 1000,      /* the same for a run at another path, which is on another storage */
    LOOK_MS = 200,           /* between two looks at a directory */
    TICK_MS = 20,            /* between two looks at the comm while a thread opens the checkpoint */
    DEFAULT_MS = 300 * 1000, /* for ranks to open, as ckpt_load_options.exchange_timeout_ms */
};

/* The thread that opens the checkpoint, and its result. */
struct opening {
    struct ckpt_detached task;
    char *path, *asked; /* asked: the step, or NULL for the latest */
    struct ckpt_options *opt;
    struct ckpt_dir *dir;       /* of the run, if it is open already; or NULL */
    struct ckpt_recording *rec; /* NULL: this is the only rank */
    bool records;               /* false: it replays */
    struct ckpt_str parcel;     /* what rank 0 sends: the names of run and step, the recording */
    size_t run_len, step_len;   /* lengths of the names in the parcel */
    /* the result */
    int rc;
    struct ckpt_err err;
    struct ckpt_run *run;
    struct ckpt_view *view;
    char *step;
};

static void opening_free(struct ckpt_detached *e)
{
    struct opening *o = (struct opening *)e;

    ckpt_view_release(o->view);
    ckpt_run_close(o->run);
    ckpt_recording_unref(o->rec);
    ckpt_dir_unref(o->dir);
    ckpt_str_release(&o->parcel);
    ckpt_options_free(o->opt);
    free(o->path);
    free(o->asked);
    free(o->step);
    free(o);
}

static int open_all(struct opening *o)
{
    if (ckpt_run_open(o->path, o->opt, &o->run, &o->err) < 0 ||
        ckpt_run_find_step(o->run, o->asked, &o->step, &o->err) < 0)
        return -1;
    return ckpt_run_view(o->run, o->step, &o->view, &o->err);
}

static void opening_run(struct ckpt_detached *e)
{
    struct opening *o = (struct opening *)e;

    o->rc = open_all(o);
    if (o->rc == 0 && o->records) {
        ckpt_recording_sample(o->rec);
        ckpt_catalog_read_samples(o->view->cat);
    }
}

static int opening_new(const char *path, const struct ckpt_options *opt, const char *asked,
                       struct opening **ret, struct ckpt_err *err)
{
    struct opening *o = calloc(1, sizeof *o);

    if (!o)
        return ckpt_nomem(err);
    ckpt_detached_init(&o->task, opening_run, opening_free);
    o->path = strdup(path);
    o->asked = asked ? strdup(asked) : NULL;
    if (!o->path || (asked && !o->asked))
        (void)ckpt_nomem(err);
    else if ((opt ? ckpt_options_copy(opt, &o->opt, err) : ckpt_options_new(&o->opt, err)) == 0) {
        *ret = o;
        return 0;
    }
    ckpt_detached_unref(&o->task);
    return -1;
}

/* Notice failed ranks and show that this rank is alive, during a long operation. */
static int tend(struct ckpt_comm *comm, uint32_t timeout_ms, struct ckpt_err *err)
{
    if (ckpt_comm_look(comm, err) < 0)
        return -1;
    ckpt_comm_heartbeat(comm, timeout_ms);
    return 0;
}

/* Run the thread, and tell the other ranks meanwhile that this rank is alive. TIMEOUT: the thread
 * has read nothing for timeout_ms; it may still be in a read. */
static int opening_wait(struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                        struct ckpt_err *err)
{
    uint64_t progress = 0, since = ckpt_now_ms();

    o->opt->dir = o->dir;
    o->opt->recording = o->rec;
    if (ckpt_detached_start(&o->task, err) < 0)
        return -1;
    while (!ckpt_detached_wait(&o->task, TICK_MS)) {
        const uint64_t now = ckpt_recording_progress(o->rec);
        if (tend(comm, timeout_ms, err) < 0)
            return -1;
        if (now != progress)
            since = ckpt_now_ms();
        progress = now;
        if (ckpt_now_ms() - since > timeout_ms)
            return ckpt_fail(err, CKPT_TIMEOUT, "opening '%s': nothing was read for %.1f s",
                             o->path, timeout_ms / 1000.0);
    }
    return o->rc < 0 ? ckpt_err_move(err, &o->err) : 0;
}

/* ---- the broadcast of rank 0's recording ---- */

/* The first message: the lengths of the names, and of the whole parcel. */
struct parcel_head {
    uint64_t run_len, step_len, len;
};

static int make_room(struct ckpt_str *parcel, const struct parcel_head *head, struct ckpt_err *err)
{
    if (head->len > SIZE_MAX / 2 || head->run_len > head->len ||
        head->step_len > head->len - head->run_len)
        return ckpt_fail(err, CKPT_FORMAT, "rank 0 sent a damaged message about the checkpoint");
    if (parcel->len == 0) {
        if (!(parcel->ptr = malloc((size_t)head->len + 1)))
            return ckpt_nomem(err);
        parcel->len = parcel->cap = (size_t)head->len;
    }
    return 0;
}

/* COLLECTIVE. Broadcast rank 0's parcel; rc is the result of what this rank did before. */
static int share_parcel(struct opening *o, struct ckpt_comm *comm, int rc, uint32_t timeout_ms,
                        struct ckpt_err *err)
{
    struct parcel_head head = {o->run_len, o->step_len, o->parcel.len};

    if (ckpt_comm_broadcast(comm, rc, &head, sizeof head, timeout_ms, err) < 0)
        return -1;
    rc = make_room(&o->parcel, &head, err);
    if (ckpt_comm_agree(comm, rc, timeout_ms, err) < 0)
        return -1;
    o->run_len = (size_t)head.run_len;
    o->step_len = (size_t)head.step_len;
    for (size_t at = 0; at < o->parcel.len; at += SLICE)
        if (ckpt_comm_broadcast(comm, 0, o->parcel.ptr + at,
                                (size_t)ckpt_min_u64(SLICE, o->parcel.len - at), timeout_ms,
                                err) < 0)
            return -1;
    return 0;
}

/* ---- rank 0 ---- */

static int record(struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                  struct ckpt_err *err)
{
    if (ckpt_recording_new(ckpt_node_digest(), CKPT_RECORDING_MOST, &o->rec, err) < 0)
        return -1;
    o->records = true;
    if (opening_wait(o, comm, timeout_ms, err) < 0)
        return -1;
    o->run_len = strlen(o->path);
    ckpt_str_puts(&o->parcel, o->path);
    o->step_len = strlen(o->step);
    ckpt_str_puts(&o->parcel, o->step);
    const int rc = ckpt_recording_encode(o->rec, &o->parcel, err);
    ckpt_recording_end(o->rec);
    return rc;
}

/* ---- the other ranks ---- */

/* CONFLICT unless this rank was asked for the step that rank 0 has opened, or for none. */
static int check_asked(const struct opening *o, const char *asked, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *own = NULL;
    struct ckpt_err why = {0};

    if (!asked)
        return 0;
    /* MISSING: rank 0 does not see the step, so it loads another one */
    if (ckpt_run_find_step(o->run, asked, &own, &why) < 0 && why.code != CKPT_MISSING)
        return ckpt_err_move(err, &why);
    return strcmp(own ? own : asked, o->step) == 0
               ? 0
               : ckpt_fail(err, CKPT_CONFLICT,
                           "step '%s' is asked for here, but rank 0 loads '%s': all ranks load the "
                           "same step",
                           own ? own : asked, o->step);
}

/* Wait until this machine sees the step, too: its cache of the run's directory may be old. */
static int await_step(const struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                      struct ckpt_err *err)
{
    const char *first = o->parcel.ptr;
    const bool same = strlen(o->path) == o->run_len && memcmp(o->path, first, o->run_len) == 0;
    const uint64_t until = ckpt_now_ms() + ckpt_min_u64(same ? SEEN_MS : COPY_MS, timeout_ms / 4);

    while (!ckpt_dir_has_dir(o->view->dir, ".")) {
        if (ckpt_now_ms() >= until)
            return ckpt_fail(err, CKPT_MISSING,
                             "the run '%s' has no step '%s' here, which rank 0 loads from '%.*s'",
                             o->path, o->step, (int)ckpt_min_u64(o->run_len, 400), first);
        if (tend(comm, timeout_ms, err) < 0)
            return -1;
        (void)usleep(LOOK_MS * 1000);
    }
    return 0;
}

static int replay(struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                  struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *asked = ckpt_steal(&o->asked);

    /* the name is empty if the path is a checkpoint, not a run with steps */
    const char *step = o->parcel.ptr + o->run_len, *recording = step + o->step_len;
    if (o->step_len && !(o->asked = strndup(step, o->step_len)))
        return ckpt_nomem(err);
    if (ckpt_recording_decode(recording, o->parcel.len - o->run_len - o->step_len,
                              ckpt_node_digest(), &o->rec, err) < 0)
        return -1;
    if (opening_wait(o, comm, timeout_ms, err) < 0) {
        if (err->code == CKPT_MISSING || err->code == CKPT_IO)
            (void)ckpt_err_in(err, "rank 0 loads '%.*s', but here",
                              (int)ckpt_min_u64(o->run_len, 400), o->parcel.ptr);
        return -1;
    }
    const int rc = check_asked(o, asked, err);
    ckpt_recording_end(o->rec);
    return rc < 0 ? -1 : await_step(o, comm, timeout_ms, err);
}

/* ---- all ranks ---- */

static int open_together(struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                         struct ckpt_err *err)
{
    const bool first = comm->x->rank == 0;
    int rc = first ? record(o, comm, timeout_ms, err) : 0;

    if (rc < 0)
        (void)ckpt_err_in(err, "rank 0");
    if (share_parcel(o, comm, rc, timeout_ms, err) < 0)
        return -1;
    rc = first ? 0 : replay(o, comm, timeout_ms, err);
    ckpt_str_release(&o->parcel);
    return ckpt_comm_agree(comm, rc, timeout_ms, err);
}

/* Find out what each rank has of the run: o->dir is then the directory of all ranks' files, unless
 * all see the same ones. */
static int gather(struct opening *o, struct ckpt_comm *comm, uint32_t timeout_ms,
                  struct ckpt_err *err)
{
    char *path = NULL;

    if (ckpt_local_open(comm, o->path, o->opt, timeout_ms, &path, &o->dir, err) < 0)
        return -1;
    free(o->path);
    o->path = path;
    return 0;
}

/* COLLECTIVE, with more than one rank. rc is the result of opening_new. */
static int open_on_all(struct opening *o, struct ckpt_comm *comm, int rc, bool local,
                       uint32_t timeout_ms, struct ckpt_err *err)
{
    if (ckpt_comm_agree(comm, rc, timeout_ms, err) < 0)
        return -1;
    if (local && gather(o, comm, timeout_ms, err) < 0)
        return -1;
    rc = open_together(o, comm, timeout_ms, err);
    if (rc < 0 && o->dir)
        ckpt_local_explain(comm->x->size, "ranks", err);
    return rc;
}

static int load_open(struct ckpt_comm *comm, const char *path, bool local,
                     const struct ckpt_options *opt, const char *step, uint32_t timeout_ms,
                     struct ckpt_run **ret_run, char **ret_step, struct ckpt_view **ret_view,
                     struct ckpt_err *err)
{
    const uint32_t ms = timeout_ms ? timeout_ms : DEFAULT_MS;
    struct opening *o = NULL;
    struct ckpt_err own = {0};
    int rc = opening_new(path, opt, step, &o, &own);

    ckpt_comm_set_doing(comm, "open", path);
    if (comm->x->size > 1) {
        rc = open_on_all(o, comm, rc, local, ms, &own);
    } else if (rc == 0) {
        if (local)
            rc = gather(o, comm, ms, &own);
        if (rc == 0) {
            opening_run(&o->task);
            rc = o->rc;
            own = o->err;
        }
    }
    ckpt_comm_set_doing(comm, NULL, NULL);
    if (rc == 0) {
        *ret_view = ckpt_steal(&o->view);
        if (ret_run)
            *ret_run = ckpt_steal(&o->run);
        if (ret_step)
            *ret_step = ckpt_steal(&o->step);
    }
    if (o)
        ckpt_detached_unref(&o->task);
    return rc < 0 ? ckpt_err_move(err, &own) : 0;
}

int ckpt_load_open(struct ckpt_comm *comm, const char *path, const struct ckpt_options *opt,
                   const char *step, uint32_t timeout_ms, struct ckpt_run **ret_run,
                   char **ret_step, struct ckpt_view **ret_view, struct ckpt_err *err)
{
    return load_open(comm, path, false, opt, step, timeout_ms, ret_run, ret_step, ret_view, err);
}

int ckpt_load_open_local(struct ckpt_comm *comm, const char *path, const struct ckpt_options *opt,
                         const char *step, uint32_t timeout_ms, struct ckpt_run **ret_run,
                         char **ret_step, struct ckpt_view **ret_view, struct ckpt_err *err)
{
    return load_open(comm, path, true, opt, step, timeout_ms, ret_run, ret_step, ret_view, err);
}

/* Open the view of a step of the run with this directory, which is borrowed. */
static int open_planned(const char *path, struct ckpt_dir *dir, const struct ckpt_options *opt,
                        const char *step, struct ckpt_view **ret_view, struct ckpt_err *err)
{
    struct opening *o = NULL;
    int rc = opening_new(path, opt, step, &o, err);

    if (rc < 0)
        return -1;
    o->dir = ckpt_dir_ref(dir);
    o->opt->dir = dir;
    opening_run(&o->task);
    if (o->rc < 0)
        rc = ckpt_err_move(err, &o->err);
    else
        *ret_view = ckpt_steal(&o->view);
    ckpt_detached_unref(&o->task);
    return rc;
}

int ckpt_load_open_nodes(const char *path, const char *list, const char *layout, uint32_t ranks,
                         uint32_t ranks_per_node, const struct ckpt_options *opt, const char *step,
                         struct ckpt_view **ret_view, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *defaults = NULL;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;

    if (ranks_per_node == 0)
        return ckpt_fail(err, CKPT_USAGE, "a job needs at least one rank per node");
    if (ranks == 0 && ckpt_layout_ranks(layout, &ranks, err) < 0)
        return -1;
    if (!opt && ckpt_options_new(&defaults, err) < 0)
        return -1;
    const struct ckpt_planned_parts parts = {path, list, (ranks - 1) / ranks_per_node + 1,
                                             ranks_per_node};
    if (ckpt_planned_open(&parts, opt ? opt : defaults, &dir, err) < 0)
        return -1;
    const int rc = open_planned(path, dir, opt, step, ret_view, err);
    if (rc < 0)
        ckpt_local_explain(parts.nnode, "nodes", err);
    return rc;
}
