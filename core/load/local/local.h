/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the directory of a checkpoint of which each rank has some files: rounds, in which the ranks
 * learn of each other, compare what they see, merge their listings, and compare small files that
 * several have with different times. */
#pragma once

#include <stdint.h>

#include <ckptfs/load.h>

#include "io/dir.h"

struct ckpt_options;

/* COLLECTIVE. `path` may contain {rank} and {node}: numbers of this rank, and of its node.
 * *ret_path is this rank's path (malloc'ed). *ret_dir stays NULL if all ranks see the same files:
 * it is an ordinary run then. A rank may have no such directory; MISSING: none has. A failure
 * is the same on all ranks. */
int ckpt_local_open(struct ckpt_comm *comm, const char *path, const struct ckpt_options *opt,
                    uint32_t timeout_ms, char **ret_path, struct ckpt_dir **ret_dir,
                    struct ckpt_err *err);

/* Add to an error about a file that no rank has how many were asked (n of `what`: "ranks" or
 * "nodes"), and which rank of the training wrote the file, if its name tells. */
void ckpt_local_explain(uint32_t n, const char *what, struct ckpt_err *err);
