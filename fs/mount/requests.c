/* SPDX-License-Identifier: Apache-2.0 */
/* Copying a request, and answering it when its lane has room. */
#include "mount/requests.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "mount/mount.h"

static void request_free(struct ckptfs_request *r)
{
    free((char *)r->name);
    free(r);
}

static void run_request(struct ckptfs_job *job)
{
    struct ckptfs_request *r = (struct ckptfs_request *)job;

    r->answer(r);
    request_free(r);
}

static void refuse_request(struct ckptfs_job *job, int error)
{
    struct ckptfs_request *r = (struct ckptfs_request *)job;

    (void)fuse_reply_err(r->req, error);
    request_free(r);
}

static void interrupted(fuse_req_t req, void *data)
{
    (void)req;
    ckptfs_dispatch_interrupt(data);
}

static void watch_request(struct ckptfs_job *job, bool on)
{
    fuse_req_interrupt_func(((struct ckptfs_request *)job)->req, on ? interrupted : NULL, job);
}

void ckptfs_request_dispatch(const struct ckptfs_request *what, const struct ckptfs_lanes *lanes)
{
    struct ckptfs_request *r = malloc(sizeof *r);

    if (r) {
        *r = *what;
        r->name = what->name ? strdup(what->name) : NULL;
    }
    if (!r || (what->name && !r->name)) {
        free(r);
        (void)fuse_reply_err(what->req, ENOMEM);
        return;
    }
    r->job = (struct ckptfs_job){.run = run_request,
                                 .refuse = refuse_request,
                                 .watch = watch_request,
                                 .step = lanes->step,
                                 .file = lanes->file,
                                 .file_jobs = lanes->file_jobs};
    ckptfs_dispatch(&((struct ckptfs *)fuse_req_userdata(r->req))->dispatch, &r->job);
}

void ckptfs_request_answer(const struct ckptfs_request *r)
{
    struct ckpt_view *view;
    struct ckptfs_lanes lanes;

    if (ckptfs_tree_waits(((struct ckptfs *)fuse_req_userdata(r->req)), r->node, &view, &lanes)) {
        ckptfs_request_dispatch(r, &lanes);
        return;
    }
    r->answer(r);
    ckpt_view_release(view);
}
