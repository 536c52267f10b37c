/* SPDX-License-Identifier: Apache-2.0 */
/* Where a rank listens: on the addresses of one host or interface, not on all of the machine's. */
#ifndef CKPT_LOAD_LISTEN_H
#define CKPT_LOAD_LISTEN_H

#include <stdint.h>

#include "base/err.h"

enum { CKPT_HOST_BYTES = 200 };

/* Ports that may be used; {0, 0}: any. */
struct ckpt_ports {
    uint16_t lo, hi;
};

/* The ports of CKPTFS_PORT_RANGE ("20000-20099"); USAGE: it is not of that form. */
int ckpt_listen_ports(struct ckpt_ports *ret, struct ckpt_err *err);

/* Listen on the first address of `host` that is this machine's, at a port of the range that is
 * free. ret_host gets the address, as text, and *ret_port the port. A name that means the loopback
 * interface to this machine alone (as Debian's 127.0.1.1), or an address that is not this machine's
 * (of a service in front of it), cannot be listened on: then it is all addresses, and ret_host is
 * `host`. Returns a descriptor or -1. */
int ckpt_listen(const char *host, struct ckpt_ports ports, char ret_host[CKPT_HOST_BYTES],
                uint16_t *ret_port, struct ckpt_err *err);

/* The address of the interface that CKPTFS_INTERFACE names, by its name or an address of it. 0:
 * *ret is empty if the variable is not set. MISSING: there is no such interface. */
int ckpt_listen_interface(char ret[CKPT_HOST_BYTES], struct ckpt_err *err);

#endif
