/* SPDX-License-Identifier: Apache-2.0 */
/* The directory of a checkpoint of which each rank has some files: it has those of all ranks. What
 * this rank has is read here, and what it has not is asked of a rank that has it. */
#pragma once

#include <stdint.h>

#include <ckptfs/load.h>

#include "base/err.h"
#include "comm/tcp/service.h"
#include "io/dir.h"
#include "load/local/roster.h"

/* The ranks know this of each other. */
struct ckpt_local_rank {
    uint64_t node;                  /* ckpt_node_digest */
    uint32_t listing;               /* the first rank that has sent the same listing */
    char host[64];                  /* the machine's name */
    char who[96];                   /* "rank 2 on HOST" */
    char address[CKPT_TCP_ADDRESS]; /* of its service */
};

struct ckpt_local_ranks {
    uint32_t self, n;
    struct ckpt_local_rank *rank; /* n of them */
};

/* Make the directory. On success it owns the roster, the ranks and the service, which it takes out
 * of *roster, *ranks and *service. own: this rank's directory, referenced; NULL: there is none.
 * path is shown to people; `real` is the canonical path, equal on all ranks. timeout_ms: for
 * answers of other ranks. */
int ckpt_dir_open_local(const char *path, const char *real, struct ckpt_dir *own,
                        struct ckpt_roster *roster, struct ckpt_local_ranks *ranks,
                        struct ckpt_service **service, uint32_t timeout_ms, struct ckpt_dir **ret,
                        struct ckpt_err *err);
