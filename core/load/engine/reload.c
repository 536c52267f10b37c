/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt_load_reload: runs a load again, from the same view or another one of the same tensors. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "load/engine/engine.h"
#include "load/load_inner.h"
#include "tensor/read.h"

/* Tables of wants refer to tensors by number, so both views must have the same tensors in the same
 * order. */
static int same_tensors(const struct ckpt_catalog *old, const struct ckpt_catalog *new,
                        struct ckpt_err *err)
{
    for (size_t i = 0; i < old->tensors.len || i < new->tensors.len; i++) {
        const struct ckpt_tensor *a = i < old->tensors.len ? &old->tensors.ptr[i] : NULL;
        const struct ckpt_tensor *b = i < new->tensors.len ? &new->tensors.ptr[i] : NULL;
        const int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name);
        if (order != 0)
            return ckpt_fail(err, CKPT_CONFLICT,
                             order < 0 ? "the new view has no tensor '%s': make a new load"
                                       : "tensor '%s' is not in the view that the load was planned "
                                         "for: make a new load",
                             order < 0 ? a->name : b->name);
        if (ckpt_tensor_same_kind(a, "the view that the load was planned for", b, "the new view",
                                  err) < 0)
            return ckpt_err_in(err, "a new load is needed");
    }
    return 0;
}

static void swap_view(struct ckpt_load *load, struct ckpt_view *view)
{
    load->view = view;
    if (load->inputs.job_wants)
        load->inputs.job_wants->cat = view->cat;
}

/* Take the plan and all ranks' wants back from the engine, if no worker uses them any more. */
static int take_back(struct ckpt_load *load, struct ckpt_err *err)
{
    ckpt_engine_take_back(ckpt_steal(&load->engine), &load->inputs);
    if (load->inputs.job_wants)
        ckpt_job_wants_skip_none(load->inputs.job_wants);
    load->ready = false;
    return load->inputs.job_wants
               ? 0
               : ckpt_fail(err, CKPT_USAGE,
                           "the last run of this load failed to start, or a read "
                           "of it has not returned: make a new load");
}

/* Note the tensors that need not be sent: if the last run went well, its view's bytes are in the
 * destinations. */
static int find_unchanged(struct ckpt_job_wants *r, const struct ckpt_catalog *old,
                          const struct ckpt_catalog *new, struct ckpt_err *err)
{
    if (!(r->skip = calloc(new->tensors.len + 1, sizeof *r->skip)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < new->tensors.len; i++)
        r->nskip += r->skip[i] = ckpt_tensor_unchanged(&old->tensors.ptr[i], &new->tensors.ptr[i]);
    return 0;
}

int ckpt_load_reload(struct ckpt_load *load, struct ckpt_view *view, bool changed_only,
                     struct ckpt_err *err)
{
    struct ckpt_view *old = load->view, *new = NULL;
    struct ckpt_err own = {0};
    const int ended = load->engine ? ckpt_engine_wait(load->engine, 0, NULL) : -1;
    const bool good = ended == 0;

    if (!load->planned || ended == 1)
        return ckpt_fail(err, CKPT_USAGE,
                         load->planned ? "the load runs: wait for its end before it is reloaded"
                                       : "a load must be planned before it is reloaded");
    if (load->comm->busy)
        return ckpt_fail(err, CKPT_USAGE, "another load of this comm runs");
    int rc = take_back(load, &own);
    if (rc == 0 && view)
        rc = same_tensors(old->cat, view->cat, &own);
    if (rc == 0 && changed_only && good)
        rc = find_unchanged(load->inputs.job_wants, old->cat, view ? view->cat : old->cat, &own);
    if (rc == 0 && view)
        swap_view(load, new = ckpt_view_hold(view));
    rc = ckpt_load_agree(load, rc, &own);
    if (new) /* which may be the old one */
        ckpt_view_release(rc == 0 ? old : new);
    if (rc < 0) {
        swap_view(load, old);
        return ckpt_err_move(err, &own);
    }
    load->started = false;
    if (changed_only && !load->inputs.job_wants->nskip && load->comm->x->rank == 0)
        ckpt_logf(&load->view->shared->opt->log, CKPT_LOG_WARNING, "'%s' is loaded as a whole: %s",
                  ckpt_view_source(load->view),
                  good ? "nothing of it is known to be as in the step before"
                       : "the last load has not succeeded");
    return 0;
}
