/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt_load_reload: runs a load again, from the same view or another one of the same tensors. */
#include <string.h>

#include "base/err.h"
#include "base/mem.h"
#include "comm/comm.h"
#include "load/engine/agree.h"

static int same_tensor(const struct ckpt_tensor *old, const struct ckpt_tensor *new,
                       struct ckpt_err *err)
{
    char was[CKPT_SHAPE_TEXT], is[CKPT_SHAPE_TEXT];

    if (old->dtype == new->dtype &&
        old->rank == new->rank &&memcmp(old->dim, new->dim, old->rank * sizeof *old->dim) == 0)
        return 0;
    return ckpt_fail(
        err, CKPT_CONFLICT,
        "tensor '%s' is %s %s in the new view, but %s %s in the one that the load was "
        "planned for: make a new load",
        new->name, ckpt_dtype_name(new->dtype), ckpt_shape_text(new->dim, new->rank, is, sizeof is),
        ckpt_dtype_name(old->dtype), ckpt_shape_text(old->dim, old->rank, was, sizeof was));
}

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
        if (same_tensor(a, b, err) < 0)
            return -1;
    }
    return 0;
}

static void swap_view(struct ckpt_load *load, struct ckpt_view *view)
{
    load->view = view;
    if (load->parts.job_wants)
        load->parts.job_wants->cat = view->cat;
}

/* Take the plan and all ranks' wants back from the engine, if no worker uses them any more. */
static int take_back(struct ckpt_load *load, struct ckpt_err *err)
{
    ckpt_engine_take_back(ckpt_steal(&load->engine), &load->parts);
    load->ready = false;
    return load->parts.job_wants ? 0
                                 : ckpt_fail(err, CKPT_USAGE,
                                             "the last run of this load failed to start, or a read "
                                             "of it has not returned: make a new load");
}

int ckpt_load_reload(struct ckpt_load *load, struct ckpt_view *view, struct ckpt_err *err)
{
    struct ckpt_view *old = load->view, *new = NULL;
    struct ckpt_err own = {0};

    if (!load->planned || (load->engine && ckpt_engine_wait(load->engine, 0, NULL) == 1))
        return ckpt_fail(err, CKPT_USAGE,
                         load->planned ? "the load runs: wait for its end before it is reloaded"
                                       : "a load must be planned before it is reloaded");
    if (load->comm->busy)
        return ckpt_fail(err, CKPT_USAGE, "another load of this comm runs");
    int rc = take_back(load, &own);
    if (rc == 0 && view)
        rc = same_tensors(old->cat, view->cat, &own);
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
    return 0;
}
