/* SPDX-License-Identifier: Apache-2.0 */
/* Listening sockets: a rank listens on one address, not on all of the machine. */
#pragma once

#include <stdint.h>

#include "base/err.h"

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
