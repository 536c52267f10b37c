/* SPDX-License-Identifier: Apache-2.0 */
/* A communicator of the double: two sockets to every other rank, one for data, one for what ranks
 * agree about; or a room in memory (room.c), if all ranks are threads of this process. */
#ifndef CKPT_GPU_DOUBLE_COMM_H
#define CKPT_GPU_DOUBLE_COMM_H

#include <pthread.h>

#include "double.h"

#pragma GCC visibility push(default)
#include <nccl.h>
ncclResult_t ncclGroupStart(void); /* prototypes that the header lacks */
ncclResult_t ncclGroupEnd(void);
#pragma GCC visibility pop

/* What travels between two ranks: "I am ready for this", "I have this for you" (of collectives; to
 * see what does not match), and the data. */
enum wire_type { WIRE_READY = 1, WIRE_OFFER, WIRE_DATA };
enum wire_kind { WIRE_PAIR = 1, WIRE_COLLECTIVE };
enum wire_call { CALL_SEND_RECV = 1, CALL_BROADCAST, CALL_ALLGATHER };

/* How far a rank was with its other communicators on that device when it launched a collective:
 * all ranks launch in one order, or they may wait for each other in a circle. */
enum { WIRE_OTHERS = 6 };
struct wire_other {
    uint64_t comm; /* a hash of its name; 0: none */
    uint64_t launched;
};

struct wire {
    uint32_t magic;
    uint16_t type, kind;
    uint32_t call, root;
    uint64_t seq, group; /* of the pair's transfers or the comm's collectives; of the latter only */
    uint64_t len;
    double at; /* simulated time at which the sender of this message could begin */
    struct wire_other other[WIRE_OTHERS]; /* of collectives */
};

/* To be sent to a peer. */
struct frame {
    struct frame *next;
    struct wire head;
    const unsigned char *data;
    struct transfer *of; /* that is done with it; NULL: none */
};

/* One direction of data between this rank and another, within a group. */
struct transfer {
    int peer;
    bool send, done, stuck, announced;
    struct wire is; /* but for type */
    unsigned char *real;
};

struct link {
    int data, agree; /* sockets; -1: this rank itself, or a peer that is gone */
    struct wire in;
    size_t in_len;             /* of the head, then of the data too */
    struct transfer *incoming; /* after the head */
    struct frame *out, **out_tail;
    size_t out_len;     /* of out: sent */
    struct wire *ready; /* and offers, for what is not launched here yet */
    size_t nready;
};

/* How many transfers between this rank and another were asked for. */
struct pair {
    uint64_t nsent, nreceived;
};

enum { COMM_MAGIC = 0xc033, COMM_NAME = 64 };

/* Communicators that share what they have: one flag aborts them all, and leaves them fit for
 * nothing but an abort. */
struct comm_family {
    atomic_int refs;
    atomic_bool aborted; /* and `wake` is readable */
    int wake;
    atomic_bool aborting; /* a thread is in ncclCommAbort */
};

struct ncclComm {
    struct ncclComm *next; /* of all of this process */
    struct comm_family *family;
    atomic_uint nsplit; /* how often it was split */
    unsigned magic;
    atomic_int refs;
    int rank, size, device, identity;
    int nodes;            /* that its ranks are on */
    char name[COMM_NAME]; /* of its sockets */
    bool blocking, finalized, multi;
    ncclConfig_t config;
    atomic_int state;  /* ncclResult_t */
    struct link *link; /* of each rank; NULL: they meet in `room` */
    struct room *room; /* NULL: not yet */
    struct pair *pair; /* of each rank */
    uint64_t nexchange;
    uint64_t ncollective;
    atomic_ullong ngroup;
    uint64_t running_collective; /* the first of a later group than the one that runs */
    cudaStream_t stream;         /* that it was used with */
    bool closed;                 /* it, until the caller has seen that its launch is over */
    atomic_int queued;           /* groups that have not ended */
    pthread_t job;
    bool has_job;
};

/* ---- mesh.c ---- */

/* Meet all ranks. False: aborted, or *ret says what is wrong. */
bool comm_meet(struct ncclComm *c, ncclResult_t *ret);
void comm_part(struct ncclComm *c);

/* Everybody's three numbers, [size][3], agreed upon among all. False: aborted. */
bool comm_exchange(struct ncclComm *c, const int64_t own[3], int64_t (*ret)[3]);

bool comm_aborted(const struct ncclComm *c);

/* Wait until the socket is ready for `events`, or the comm is aborted: false. */
bool comm_poll(struct ncclComm *c, int fd, short events);

/* ---- room.c ---- */

/* The same, of ranks that are threads of this process. */
bool room_meet(struct ncclComm *c, ncclResult_t *ret);
void room_part(struct ncclComm *c);
bool room_exchange(struct ncclComm *c, const int64_t own[3], int64_t (*ret)[3]);

/* It was aborted. */
void room_wake(struct ncclComm *c);

/* ---- links.c ---- */

/* How many nodes so many ranks fill; which node a rank of all is on. */
int links_nodes(int ranks);
int links_node(int rank);

/* Simulated seconds of a collective to which each rank (or the root) gives `len` bytes; and of a
 * group of sends and receives. */
double links_collective(const struct ncclComm *c, enum wire_call call, uint64_t len);
double links_pairs(const struct ncclComm *c, uint64_t sent, uint64_t received);

/* ---- comm.c ---- */

struct ncclComm *comm_live(ncclComm_t comm, const char *call); /* dies if it is no comm */

/* 0 if it may be used for something new, else the error. Dies if something is in progress. */
ncclResult_t comm_usable(ncclComm_t comm, const char *call);

/* The launch is over, and its caller knows. */
void comm_open_stream(struct ncclComm *c);
struct ncclComm *comm_ref(struct ncclComm *c);
void comm_unref(struct ncclComm *c);

/* Do it now, or, if the comm does not block, in a thread of its own: ncclInProgress. */
ncclResult_t comm_do(struct ncclComm *c, ncclResult_t (*fn)(struct ncclComm *c, void *arg),
                     void *arg);

/* What it and the process's other communicators have launched, for a wire. */
void comm_others(const struct ncclComm *c, struct wire_other ret[WIRE_OTHERS]);

/* ---- group.c ---- */

bool comm_in_group(void);

#endif
