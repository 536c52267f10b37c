/* SPDX-License-Identifier: Apache-2.0 */
/* How two ranks make sure of each other on a new TCP connection. The dialling rank sends a
 * greeting, the other one an answer, and the first one a confirmation. Each side gives a number
 * that nobody can foresee, and proves that it knows the job's secret, if there is one (seal.h).
 *
 * Nothing here blocks: a handshake is a small state machine with a deadline, so that many go on
 * side by side and a stranger delays nobody. */
#ifndef CKPT_LOAD_HANDSHAKE_H
#define CKPT_LOAD_HANDSHAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "load/seal.h"

enum {
    CKPT_GREETING = 0x74706b63, /* "ckpt" */
    CKPT_TCP_VERSION = 5,
};

/* What the connection is for. */
enum ckpt_tcp_kind { CKPT_TCP_DATA, CKPT_TCP_CONTROL, CKPT_TCP_RENDEZVOUS };

/* What each side says of itself. */
struct ckpt_greeting {
    uint32_t magic, version;
    uint64_t token[2]; /* of the listener: strangers do not know it */
    uint32_t from, kind;
    unsigned char nonce[CKPT_NONCE_BYTES];
    uint32_t sealed; /* there is a secret */
    uint32_t word;   /* of a greeting for data: how often the transport was renewed; of the answer:
                        a fact for the dialling rank */
};

struct ckpt_handshake_answer {
    struct ckpt_greeting greeting;
    unsigned char proof[CKPT_PROOF_BYTES];
};

struct ckpt_handshake_confirmation {
    uint32_t word, unused;
    unsigned char proof[CKPT_PROOF_BYTES];
};

enum ckpt_handshake_stage {
    CKPT_HANDSHAKE_CONNECTING, /* dialling: the connection is being made */
    CKPT_HANDSHAKE_ANSWER,     /* dialling: the answer is awaited */
    CKPT_HANDSHAKE_GREETING,   /* accepting: the greeting is awaited */
    CKPT_HANDSHAKE_CONFIRM,    /* accepting: the confirmation is awaited */
};

struct ckpt_handshake {
    int fd; /* -1: none */
    uint64_t until;
    enum ckpt_handshake_stage stage;
    uint32_t to; /* dialling: the rank that must answer */
    struct ckpt_greeting mine, its;
    uint32_t word; /* accepting: of the confirmation */
    bool refused;  /* dialling: the other side knows another secret, or none, or we do */
    size_t at;     /* bytes of `in` that have come */
    union {
        struct ckpt_greeting greeting;
        struct ckpt_handshake_answer answer;
        struct ckpt_handshake_confirmation confirmation;
    } in;
};

/* Begin on a descriptor that is being connected (g: without nonce), or was accepted. The descriptor
 * belongs to the handshake until it is done. */
void ckpt_handshake_dial(struct ckpt_handshake *h, int fd, const struct ckpt_greeting *g,
                         uint32_t to, uint64_t until);
void ckpt_handshake_accept(struct ckpt_handshake *h, int fd, uint64_t until);

/* Go on. *moved is set if something happened. */
enum ckpt_handshake_result {
    CKPT_HANDSHAKE_FAILED = -1, /* the descriptor is closed */
    CKPT_HANDSHAKE_DONE,        /* accepting: take the descriptor */
    CKPT_HANDSHAKE_WAITING,
    CKPT_HANDSHAKE_ASKED, /* dialling: call ckpt_handshake_confirm; accepting: ..._answer */
};
enum ckpt_handshake_result ckpt_handshake_step(struct ckpt_handshake *h, bool *moved);

/* Answer as rank `own` to the greeting, which the caller has judged. */
enum ckpt_handshake_result ckpt_handshake_answer(struct ckpt_handshake *h, uint32_t own,
                                                 uint32_t word);
/* End it on the dialling side: DONE or FAILED. */
enum ckpt_handshake_result ckpt_handshake_confirm(struct ckpt_handshake *h, uint32_t word);

/* All of it on the dialling side, with a confirmation of 0: waits until the deadline. True: *ret_fd
 * is connected. */
bool ckpt_handshake_run(struct ckpt_handshake *h, int *ret_fd);

/* After DONE: the seals of the connection's two directions. */
int ckpt_handshake_seals(const struct ckpt_handshake *h, bool dialled, struct ckpt_seal *out,
                         struct ckpt_seal *in, struct ckpt_err *err);

/* The events that a handshake waits for, as poll(2) has them. */
short ckpt_handshake_events(const struct ckpt_handshake *h);

#endif
