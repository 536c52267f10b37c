/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake on a new TCP connection, by which two ranks authenticate each other. The dialling
 * rank sends a greeting, the accepting rank an answer, and the dialling rank a confirmation. Each
 * side contributes a random nonce, and proves that it knows the job's secret, if there is one
 * (secret.h).
 *
 * A handshake is a small state machine with a deadline. Nothing here blocks, so that many
 * handshakes go on side by side and an unauthenticated peer delays nobody. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "comm/secret.h"

enum {
    CKPT_GREETING = 0x74706b63, /* "ckpt" */
    CKPT_TCP_VERSION = 7,
};

/* The purpose of a connection. At the rendezvous, a rank tells rank 0 its address, and is told that
 * of its parent in the tree. */
enum ckpt_tcp_kind { CKPT_TCP_DATA, CKPT_TCP_CONTROL, CKPT_TCP_RENDEZVOUS, CKPT_TCP_SERVICE };

/* How each side introduces itself. */
struct ckpt_greeting {
    uint32_t magic, version;
    uint64_t token[2];   /* of the listener; only ranks of the job know it */
    uint32_t from, kind; /* the sender's rank; enum ckpt_tcp_kind */
    unsigned char nonce[CKPT_NONCE_BYTES];
    uint32_t secret; /* 1: the sender has a secret */
    uint32_t word;   /* of a greeting for a data connection: how often the transport was renewed; of
                      * an answer: a number for the dialling rank */
};

struct ckpt_handshake_answer {
    struct ckpt_greeting greeting;
    unsigned char proof[CKPT_PROOF_BYTES];
};

struct ckpt_handshake_confirmation {
    uint32_t word, unused;
    char address[CKPT_TCP_ADDRESS]; /* at the rendezvous: of the dialling rank */
    unsigned char proof[CKPT_PROOF_BYTES];
};

enum ckpt_handshake_stage {
    CKPT_HANDSHAKE_CONNECTING, /* dialling: the connection is being made */
    CKPT_HANDSHAKE_ANSWER,     /* dialling: the answer is awaited */
    CKPT_HANDSHAKE_GREETING,   /* accepting: the greeting is awaited */
    CKPT_HANDSHAKE_CONFIRM,    /* accepting: the confirmation is awaited */
};

struct ckpt_handshake {
    int fd;         /* -1: none */
    uint64_t until; /* the deadline (ckpt_now_ms) */
    enum ckpt_handshake_stage stage;
    uint32_t to; /* dialling: the rank that must answer */
    struct ckpt_greeting mine, its;
    bool refused;  /* dialling: the two sides do not have the same secret */
    bool answered; /* accepting: the other side was asked to prove who it is */
    size_t at;     /* bytes of `in` received so far; when it is done, `in` has the last message */
    union {
        struct ckpt_greeting greeting;
        struct ckpt_handshake_answer answer;
        struct ckpt_handshake_confirmation confirmation;
    } in;
};

/* Begin on a descriptor that is being connected, or that was accepted. The handshake adds the nonce
 * to a copy of *g. It owns the descriptor until it is done, and closes it if it fails. */
void ckpt_handshake_dial(struct ckpt_handshake *h, int fd, const struct ckpt_greeting *g,
                         uint32_t to, uint64_t until);
void ckpt_handshake_accept(struct ckpt_handshake *h, int fd, uint64_t until);

enum ckpt_handshake_result {
    CKPT_HANDSHAKE_FAILED = -1, /* the descriptor is closed */
    CKPT_HANDSHAKE_DONE,        /* the descriptor belongs to the caller */
    CKPT_HANDSHAKE_WAITING,
    CKPT_HANDSHAKE_ASKED, /* dialling: call ckpt_handshake_confirm; accepting: ..._answer */
};

/* Continue a handshake. *moved is set if something happened, else left alone. */
enum ckpt_handshake_result ckpt_handshake_step(struct ckpt_handshake *h, bool *moved);

/* Answer, as rank `own`, to a greeting (h->its) that the caller accepts. */
enum ckpt_handshake_result ckpt_handshake_answer(struct ckpt_handshake *h, uint32_t own,
                                                 uint32_t word);
/* Send the confirmation, which ends the handshake on the dialling side: DONE or FAILED. address: of
 * this rank's listener; or NULL. */
enum ckpt_handshake_result ckpt_handshake_confirm(struct ckpt_handshake *h, uint32_t word,
                                                  const char *address);

/* Is this the dialling side? */
static inline bool ckpt_handshake_dials(const struct ckpt_handshake *h)
{
    return h->stage == CKPT_HANDSHAKE_CONNECTING || h->stage == CKPT_HANDSHAKE_ANSWER;
}

/* The events that a handshake waits for, for poll(2). */
short ckpt_handshake_events(const struct ckpt_handshake *h);
