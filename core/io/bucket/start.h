/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and starting the helper program. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"
#include "io/bucket/wire.h"

struct ckpt_helper {
    int socket;
    pid_t pid; /* 0: none */
};

#define CKPT_HELPER_NONE ((struct ckpt_helper){-1, 0})

/* Start it, with `memory` bytes that both have mapped: *ret_map. It ends when the socket is closed.
 * UNSUPPORTED: there is no such program. */
int ckpt_helper_start(struct ckpt_helper *h, uint64_t memory, const struct ckpt_wire_setup *setup,
                      char **ret_map, struct ckpt_err *err);
/* Close the socket, and wait for the end if it is a child of this process. */
void ckpt_helper_release(struct ckpt_helper *h, bool is_child);
