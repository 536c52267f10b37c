/* SPDX-License-Identifier: Apache-2.0 */
/* Greeting, answer and confirmation. */
#include "comm/tcp/handshake.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/mem.h"
#include "comm/tcp/socket.h"

/* ---- proofs ---- */

/* Prove to know the secret: the proof depends on both greetings, and on the confirmation c, except
 * its proof; c is NULL in the answer. */
static void prove(const struct ckpt_handshake *h, const struct ckpt_handshake_confirmation *c,
                  unsigned char ret[CKPT_PROOF_BYTES])
{
    const bool dials = ckpt_handshake_dials(h);
    struct {
        struct ckpt_greeting greeting, answer;
        struct ckpt_handshake_confirmation confirmation;
    } said = {.greeting = dials ? h->mine : h->its, .answer = dials ? h->its : h->mine};

    if (c)
        said.confirmation = *c;
    memset(said.confirmation.proof, 0, sizeof said.confirmation.proof);
    ckpt_secret_prove(c ? "confirmation" : "answer", &said, sizeof said, ret);
}

static bool proves(const struct ckpt_handshake *h, const struct ckpt_handshake_confirmation *c,
                   const unsigned char *proof)
{
    unsigned char own[CKPT_PROOF_BYTES];

    prove(h, c, own);
    return ckpt_secret_equal(own, proof);
}

/* ---- steps ---- */

/* The part of a greeting that every handshake makes anew. */
static void fill_greeting(struct ckpt_greeting *g)
{
    bool secret = false;

    (void)ckpt_secret_is_set(&secret, NULL);
    g->secret = secret;
    if (getrandom(g->nonce, sizeof g->nonce, 0) != sizeof g->nonce)
        memset(g->nonce, 0, sizeof g->nonce); /* no replay if the other side's is random */
}

void ckpt_handshake_dial(struct ckpt_handshake *h, int fd, const struct ckpt_greeting *g,
                         uint32_t to, uint64_t until)
{
    *h = (struct ckpt_handshake){
        .fd = fd, .until = until, .stage = CKPT_HANDSHAKE_CONNECTING, .to = to, .mine = *g};
    fill_greeting(&h->mine);
}

void ckpt_handshake_accept(struct ckpt_handshake *h, int fd, uint64_t until)
{
    *h = (struct ckpt_handshake){.fd = fd, .until = until, .stage = CKPT_HANDSHAKE_GREETING};
}

static enum ckpt_handshake_result fail(struct ckpt_handshake *h)
{
    ckpt_closep(&h->fd);
    return CKPT_HANDSHAKE_FAILED;
}

/* The buffer of a new connection is empty, and takes a small message at once. */
static bool send_now(const struct ckpt_handshake *h, const void *data, size_t len)
{
    return send(h->fd, data, len, MSG_NOSIGNAL) == (ssize_t)len;
}

static enum ckpt_handshake_result connecting(struct ckpt_handshake *h, bool *moved)
{
    const int state = ckpt_socket_connected(h->fd);

    if (state == 0)
        return CKPT_HANDSHAKE_WAITING;
    if (state < 0 || !send_now(h, &h->mine, sizeof h->mine))
        return fail(h);
    *moved = true;
    h->stage = CKPT_HANDSHAKE_ANSWER;
    return CKPT_HANDSHAKE_WAITING;
}

static enum ckpt_handshake_result take_answer(struct ckpt_handshake *h)
{
    struct ckpt_greeting expected = h->mine;

    h->its = h->in.answer.greeting;
    expected.from = h->to;
    expected.secret = h->its.secret;
    expected.word = h->its.word;
    memcpy(expected.nonce, h->its.nonce, sizeof expected.nonce);
    if (memcmp(&h->its, &expected, sizeof expected) != 0)
        return fail(h);
    h->refused = h->its.secret != h->mine.secret || !proves(h, NULL, h->in.answer.proof);
    return h->refused ? fail(h) : CKPT_HANDSHAKE_ASKED;
}

enum ckpt_handshake_result ckpt_handshake_confirm(struct ckpt_handshake *h, uint32_t word,
                                                  const char *address)
{
    struct ckpt_handshake_confirmation c = {.word = word};

    if (address)
        (void)snprintf(c.address, sizeof c.address, "%s", address);
    prove(h, &c, c.proof);
    return send_now(h, &c, sizeof c) ? CKPT_HANDSHAKE_DONE : fail(h);
}

enum ckpt_handshake_result ckpt_handshake_answer(struct ckpt_handshake *h, uint32_t own,
                                                 uint32_t word)
{
    struct ckpt_handshake_answer a = {.greeting = h->its};

    a.greeting.from = own;
    a.greeting.word = word;
    fill_greeting(&a.greeting);
    h->mine = a.greeting;
    h->answered = true;
    prove(h, NULL, a.proof);
    /* a peer with another secret is answered, too, so that it can report that */
    if (!send_now(h, &a, sizeof a) || h->its.secret != h->mine.secret)
        return fail(h);
    h->stage = CKPT_HANDSHAKE_CONFIRM;
    h->at = 0;
    return CKPT_HANDSHAKE_WAITING;
}

static enum ckpt_handshake_result take_confirmation(struct ckpt_handshake *h)
{
    struct ckpt_handshake_confirmation *c = &h->in.confirmation;

    if (!proves(h, c, c->proof))
        return fail(h);
    c->address[sizeof c->address - 1] = '\0';
    return CKPT_HANDSHAKE_DONE;
}

static size_t length_of(enum ckpt_handshake_stage stage)
{
    return stage == CKPT_HANDSHAKE_ANSWER     ? sizeof(struct ckpt_handshake_answer)
           : stage == CKPT_HANDSHAKE_GREETING ? sizeof(struct ckpt_greeting)
                                              : sizeof(struct ckpt_handshake_confirmation);
}

static enum ckpt_handshake_result take_message(struct ckpt_handshake *h)
{
    if (h->stage == CKPT_HANDSHAKE_ANSWER)
        return take_answer(h);
    if (h->stage == CKPT_HANDSHAKE_CONFIRM)
        return take_confirmation(h);
    h->its = h->in.greeting;
    return h->its.magic == CKPT_GREETING && h->its.version == CKPT_TCP_VERSION
               ? CKPT_HANDSHAKE_ASKED
               : fail(h);
}

enum ckpt_handshake_result ckpt_handshake_step(struct ckpt_handshake *h, bool *moved)
{
    const size_t len = length_of(h->stage);

    if (ckpt_now_ms() > h->until)
        return fail(h);
    if (h->stage == CKPT_HANDSHAKE_CONNECTING)
        return connecting(h, moved);
    const ssize_t n = recv(h->fd, (unsigned char *)&h->in + h->at, len - h->at, 0);
    if (n < 0 && ckpt_socket_would_block())
        return CKPT_HANDSHAKE_WAITING;
    if (n <= 0)
        return fail(h);
    *moved = true;
    h->at += (size_t)n;
    return h->at < len ? CKPT_HANDSHAKE_WAITING : take_message(h);
}

short ckpt_handshake_events(const struct ckpt_handshake *h)
{
    return h->stage == CKPT_HANDSHAKE_CONNECTING ? POLLOUT : POLLIN;
}
