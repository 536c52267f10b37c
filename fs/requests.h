/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of the kernel that may wait for storage: kept in lanes until they are answered. */
#ifndef CKPT_FS_REQUESTS_H
#define CKPT_FS_REQUESTS_H

#include <stddef.h>

#include <fuse_lowlevel.h>

#include "dispatch.h"
#include "nodes.h"
#include "tree.h"

/* What a request asks for, kept until it is answered. */
struct ckptfs_request {
    struct ckptfs_job job; /* first: the dispatcher's functions cast */
    void (*answer)(const struct ckptfs_request *r);
    fuse_req_t req;
    const struct ckptfs_node *node; /* the kernel holds it until the answer */
    struct fuse_file_info fi;
    size_t size;
    off_t off;
    const char *name; /* a request that is kept owns it */
};

/* Answer the request in this lane, with a copy of what it asks for. If there is no memory for that,
 * the answer is ENOMEM. */
void ckptfs_request_dispatch(const struct ckptfs_request *what, const struct ckptfs_lanes *lanes);

/* Answer now what needs no storage, since the view that it needs is open; the rest in its lane. */
void ckptfs_request_answer(const struct ckptfs_request *r);

#endif
