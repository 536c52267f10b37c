/* SPDX-License-Identifier: Apache-2.0 */
/* TCP sockets that do not block, and calls on them that do until a moment (ckpt_now_ms). */
#ifndef CKPT_LOAD_SOCKET_H
#define CKPT_LOAD_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* Was it just not the moment (errno)? */
bool ckpt_socket_would_block(void);

/* *fd becomes -1; it may be that already. */
void ckpt_socket_close(int *fd);

/* All of it; -1: the other side is gone, or the time over. */
int ckpt_socket_send_all(int fd, const void *data, size_t len, uint64_t until);
int ckpt_socket_recv_all(int fd, void *data, size_t len, uint64_t until);

/* Small messages at once; does not block. */
void ckpt_socket_tune(int fd);

/* Room for n descriptors more: the process's soft limit is raised as far as that asks for. LIMIT if
 * the hard one forbids it. */
int ckpt_socket_reserve(uint64_t n, struct ckpt_err *err);

/* One try; -1 if nobody listens there. */
int ckpt_socket_dial(const char *host, const char *port, uint64_t until);

/* The same without waiting; ckpt_socket_connected then says 1: it is, 0: not yet, -1: it failed. */
int ckpt_socket_begin(const char *host, const char *port);
int ckpt_socket_connected(int fd);

#endif
