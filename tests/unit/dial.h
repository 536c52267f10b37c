/* SPDX-License-Identifier: Apache-2.0 */
/* Dialling as a stranger does: at once, and waiting for it. */
#ifndef CKPT_TEST_DIAL_H
#define CKPT_TEST_DIAL_H

#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/tcp/socket.h"

/* A connected descriptor; -1: no address of the host has a listener at this port. */
static inline int dial_now(const char *host, unsigned port)
{
    const uint64_t until = ckpt_now_ms() + 20000;
    uint32_t attempt = 0;

    do {
        int fd = ckpt_socket_begin(host, port, 1, &attempt), state = fd < 0 ? -1 : 0;
        while (state == 0 && ckpt_now_ms() < until && (state = ckpt_socket_connected(fd)) == 0)
            (void)usleep(1000);
        if (state > 0)
            return fd;
        ckpt_closep(&fd);
    } while (attempt > 0);
    return -1;
}

#endif
