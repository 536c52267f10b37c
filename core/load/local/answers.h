/* SPDX-License-Identifier: Apache-2.0 */
/* Answers other ranks' requests for bytes of this rank's files (comm/tcp/service.h). */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "comm/tcp/service.h"
#include "io/dir.h"

/* A request; the path below the run's directory follows, without a NUL. The reply is the bytes from
 * `off` on of the file that has this size and these times. */
struct ckpt_local_request {
    uint64_t off, size;
    int64_t mtime_ns, ctime_ns;
};

/* Begin to answer for a directory (referenced), as this rank of the comm; errors say `who` has
 * them. dir NULL: this rank has no files, and asks only. */
int ckpt_answers_open(const struct ckpt_comm *comm, struct ckpt_dir *dir, const char *who,
                      struct ckpt_service **ret, struct ckpt_err *err);
