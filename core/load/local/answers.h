/* SPDX-License-Identifier: Apache-2.0 */
/* Answers other ranks' requests for bytes of this rank's files (comm/tcp/service.h). */
#pragma once

#include <limits.h>
#include <stdint.h>

#include "base/err.h"
#include "comm/tcp/service.h"
#include "io/dir.h"

/* A request begins with this. Then follow nrun runs, of CKPT_SERVICE_REPLY bytes together at most,
 * and the path below the run's directory, without a NUL. The reply is the bytes of the runs, one
 * after the other, of the file that has this size and these times. */
struct ckpt_local_request {
    uint64_t size;
    int64_t mtime_ns, ctime_ns;
    uint32_t nrun, unused;
};

struct ckpt_local_run {
    uint64_t off, len;
};

/* A request has room for so many runs, beside the longest path. */
enum {
    CKPT_LOCAL_RUNS = (CKPT_SERVICE_REQUEST - PATH_MAX - sizeof(struct ckpt_local_request)) /
                      sizeof(struct ckpt_local_run)
};

/* Begin to answer for a directory (referenced), as this rank of the comm; errors say `who` has
 * them. dir NULL: this rank has no files, and asks only. */
int ckpt_answers_open(const struct ckpt_comm *comm, struct ckpt_dir *dir, const char *who,
                      struct ckpt_service **ret, struct ckpt_err *err);
