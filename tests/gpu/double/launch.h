/* SPDX-License-Identifier: Apache-2.0 */
/* A launch of the double's NCCL: all calls of a group on one communicator, as transfers between
 * this rank and others. group.c builds launches and moves the data over sockets, room.c in memory.
 */
#ifndef CKPT_GPU_DOUBLE_LAUNCH_H
#define CKPT_GPU_DOUBLE_LAUNCH_H

#include "comm.h"

struct local {
    unsigned char *dst;
    const unsigned char *src;
    size_t len;
};

struct launch {
    struct gpu_work work;
    struct ncclComm *comm;
    cudaStream_t stream;
    struct transfer *transfer;
    size_t ntransfer, left;
    struct local *local;
    size_t nlocal;
    struct gpu_memory **use;
    size_t nuse;
    uint64_t collectives; /* of the communicator, this group's included */
    uint64_t group;
    bool collective;
    struct wire_other other[WIRE_OTHERS];
    double at, latest;       /* simulated: when this rank could begin, and all that are concerned */
    double seconds;          /* that the collectives take, */
    uint64_t sent, received; /* and bytes of the pairs */
    unsigned readers;        /* in memory: ranks that copy out of this launch's buffers now */
};

/* The transfer that moves data to (`send`) or from the peer, for a message of the peer's; NULL:
 * there is none. */
struct transfer *launch_find(const struct launch *l, int peer, bool send, const struct wire *w);

/* The end of the program, if the peer means another call than this transfer's. */
void launch_match(const struct launch *l, const struct transfer *t, const struct wire *w);

/* The end of the program: a peer takes part in a collective (`waits`: as a receiver) in which this
 * rank does something else. */
_Noreturn void launch_differs(const struct launch *l, int peer, const struct wire *w, bool waits);

/* ---- room.c ---- */

/* Move the data of a launch, with ranks of this process. */
void room_execute(struct launch *l);

#endif
