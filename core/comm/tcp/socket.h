/* SPDX-License-Identifier: Apache-2.0 */
/* TCP sockets. All descriptors are in non-blocking mode; functions with a deadline `until`
 * (ckpt_now_ms) wait. */
#ifndef CKPT_COMM_TCP_SOCKET_H
#define CKPT_COMM_TCP_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* Does errno say that the call would have blocked, or was interrupted? */
bool ckpt_socket_would_block(void);

/* Close *fd, unless it is -1, and set it to -1. */
void ckpt_socket_close(int *fd);

/* Send or receive exactly len bytes. -1: the connection is closed, or the deadline is over. */
int ckpt_socket_send_all(int fd, const void *data, size_t len, uint64_t until);
int ckpt_socket_recv_all(int fd, void *data, size_t len, uint64_t until);

/* Make a descriptor non-blocking, and let it send small messages at once (TCP_NODELAY). */
void ckpt_socket_tune(int fd);

/* Make sure that the process can open n more descriptors: raise the soft limit if necessary. LIMIT:
 * the hard limit is too low. */
int ckpt_socket_reserve(uint64_t n, struct ckpt_err *err);

/* Connect to a listener; a descriptor, or -1. Tries once. */
int ckpt_socket_dial(const char *host, const char *port, uint64_t until);

/* The same without waiting; a descriptor, or -1. ckpt_socket_connected returns 1 when it is
 * connected, 0 before, and -1 if it failed. */
int ckpt_socket_begin(const char *host, const char *port);
int ckpt_socket_connected(int fd);

#endif
