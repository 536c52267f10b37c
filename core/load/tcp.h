/* SPDX-License-Identifier: Apache-2.0 */
/* How ranks find each other over TCP: tcp_meet.c (from a launcher's environment), xport_tcp.c (from
 * all addresses). */
#ifndef CKPT_LOAD_TCP_H
#define CKPT_LOAD_TCP_H

#include <stdint.h>

#include <ckptfs/load.h>

#include "load/socket.h"

struct ckpt_tcp {
    int fd;
    char address[CKPT_TCP_ADDRESS];
    uint64_t token; /* in the address: strangers don't know it */
};

/* What the connecting side says first. The other answers with its own rank in it: what just repeats
 * the bytes is no rank of ours. */
enum {
    CKPT_GREETING = 0x74706b63, /* "ckpt" */
    CKPT_TCP_VERSION = 3,
};
struct ckpt_greeting {
    uint32_t magic, version;
    uint64_t token;
    uint32_t from, kind; /* rank; 0 data, 1 control, 2 meeting */
};

/* Say it to who was called; true: rank `to` answered. */
bool ckpt_tcp_greet(int fd, const struct ckpt_greeting *g, uint32_t to, uint64_t until);
/* Answer as rank `own`. */
bool ckpt_tcp_answer(int fd, struct ckpt_greeting g, uint32_t own, uint64_t until);

/* What `size` ranks that meet, and then connect each to each, have open at a time, at most: two a
 * pair, and some more that come and go. */
static inline uint64_t ckpt_tcp_files(uint32_t size) { return 2 * (uint64_t)size + 16; }

/* As ckpt_tcp_listen, at a port; 0: any. */
int ckpt_tcp_listen_at(const char *host, uint16_t port, struct ckpt_tcp **ret,
                       struct ckpt_err *err);

#endif
