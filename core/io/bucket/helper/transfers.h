/* SPDX-License-Identifier: Apache-2.0 */
/* libcurl's transfers, which are served socket by socket. curl_multi_perform would do with less,
 * but comes back only after it has read all that there is: on a fast link, what has come whole
 * waits until others of the many transfers have, and the link is idle until new ones are begun. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <poll.h>

#include "base/vec.h"

struct ckpt_transfers {
    void *multi;                        /* CURLM */
    CKPT_VEC(struct pollfd) fds, ready; /* fds: the caller's own one first */
    size_t nown;
    bool failed;
};

/* Begin, with at most so many connections that are kept. A message at one of the caller's own
 * descriptors ends a wait. -1: no memory. */
int ckpt_transfers_init(struct ckpt_transfers *t, unsigned connections, const int *own,
                        size_t nown);

/* Wait, at most so many milliseconds, and go on with transfers. After each that went on, `next` is
 * called, which may take those that have ended (curl_multi_info_read) and add new ones. False:
 * libcurl fails, or there is no memory. */
bool ckpt_transfers_serve(struct ckpt_transfers *t, int wait_ms, void (*next)(void *ctx),
                          void *ctx);
