/* SPDX-License-Identifier: Apache-2.0 */
/* TCP sockets. All descriptors are in non-blocking mode. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* Does errno say that the call would have blocked, or was interrupted? */
bool ckpt_socket_would_block(void);

/* Close *fd, unless it is -1, and set it to -1. */
void ckpt_socket_close(int *fd);

/* Make a descriptor non-blocking, and let it send small messages at once (TCP_NODELAY). */
void ckpt_socket_tune(int fd);

/* Make sure that the process can open n more descriptors: raise the soft limit if necessary. LIMIT:
 * the hard limit is too low. */
int ckpt_socket_reserve(uint64_t n, struct ckpt_err *err);

struct sockaddr;
/* Set the port of an address of either version of IP. */
void ckpt_socket_set_port(struct sockaddr *a, uint16_t port);

/* Begin to connect to a listener, which has one of the host's addresses and one of nport ports from
 * `port` on. Each call tries another of them; *attempt is 0 at first, and again when all were
 * tried. A descriptor, or -1. ckpt_socket_connected returns 1 when it is connected, 0 before, and
 * -1 if that failed. */
int ckpt_socket_begin(const char *host, uint32_t port, uint32_t nport, uint32_t *attempt);
int ckpt_socket_connected(int fd);
