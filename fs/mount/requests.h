/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that may wait for storage: copied, and kept in their lanes (dispatch.h) until they are
 * answered. */
#ifndef CKPT_FS_MOUNT_REQUESTS_H
#define CKPT_FS_MOUNT_REQUESTS_H

#include <stddef.h>

#include <fuse_lowlevel.h>

#include "mount/dispatch.h"
#include "mount/nodes.h"
#include "mount/tree.h"

/* A request and its arguments. */
struct ckptfs_request {
    struct ckptfs_job
        job; /* must be the first member, because the dispatcher's functions cast to it */
    void (*answer)(const struct ckptfs_request *r);
    fuse_req_t req;
    const struct ckptfs_node *node; /* the kernel holds the node until the answer */
    struct fuse_file_info fi;
    size_t size;
    off_t off;
    const char *name; /* owned by the request once it is in a lane, else borrowed */
};

/* Answer the request in these lanes, with a copy of its arguments. If there is no memory for the
 * copy, the answer is ENOMEM. */
void ckptfs_request_dispatch(const struct ckptfs_request *what, const struct ckptfs_lanes *lanes);

/* Answer the request now if its view is open, since that needs no storage; otherwise in its lane.
 */
void ckptfs_request_answer(const struct ckptfs_request *r);

#endif
