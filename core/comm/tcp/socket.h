/* SPDX-License-Identifier: Apache-2.0 */
/* TCP sockets. All descriptors are in non-blocking mode. A rank listens on one address, not on all
 * of the machine. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* Does errno say that the call would have blocked, or was interrupted? */
bool ckpt_socket_would_block(void);

/* Make a descriptor non-blocking, and let it send small messages at once (TCP_NODELAY). */
void ckpt_socket_tune(int fd);

/* Make sure that the process can open n more descriptors: raise the soft limit if necessary. LIMIT:
 * the hard limit is too low. */
int ckpt_socket_reserve(uint64_t n, struct ckpt_err *err);

/* Begin to connect to a listener, which has one of the host's addresses and one of nport ports from
 * `port` on. Each call tries another of them; *attempt is 0 at first, and again when all were
 * tried. A descriptor, or -1. ckpt_socket_connected returns 1 when it is connected, 0 before, and
 * -1 if that failed. */
int ckpt_socket_begin(const char *host, uint32_t port, uint32_t nport, uint32_t *attempt);
int ckpt_socket_connected(int fd);

/* ---- listening ---- */

enum { CKPT_HOST_BYTES = 200 };

/* The range of ports that may be used, ends included; {0, 0}: any port. */
struct ckpt_ports {
    uint16_t lo, hi;
};

/* The range in the environment variable CKPTFS_PORT_RANGE ("20000-20099"). USAGE: it has another
 * form. */
int ckpt_listen_ports(struct ckpt_ports *ret, struct ckpt_err *err);

/* Listen on the first address of `host` that belongs to this machine, on a free port of the range.
 * Returns a descriptor or -1; ret_host gets the address as text, *ret_port the port.
 *
 * Some hosts have no address to listen on: a name that is the loopback interface on this machine
 * but not on others (Debian's 127.0.1.1), or the address of a service in front of the machine. Then
 * the socket listens on all addresses, and ret_host is `host`. */
int ckpt_listen(const char *host, struct ckpt_ports ports, char ret_host[CKPT_HOST_BYTES],
                uint16_t *ret_port, struct ckpt_err *err);

/* The address of the interface that the environment variable CKPTFS_INTERFACE gives, by name or by
 * one of its addresses; "" if the variable is not set. MISSING: there is no such interface. */
int ckpt_listen_interface(char ret[CKPT_HOST_BYTES], struct ckpt_err *err);
