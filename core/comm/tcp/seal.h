/* SPDX-License-Identifier: Apache-2.0 */
/* Message authentication between ranks that know the same secret (CKPTFS_SECRET): each handshake
 * proves to both sides that the other one knows it, and every later message carries a seal, which
 * is a keyed hash (BLAKE2b of libsodium). Nothing is encrypted. Without libsodium a secret is an
 * error. */
#ifndef CKPT_COMM_TCP_SEAL_H
#define CKPT_COMM_TCP_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { CKPT_SEAL_BYTES = 16, CKPT_PROOF_BYTES = 32, CKPT_NONCE_BYTES = 16 };

/* Is a secret set? UNSUPPORTED: this library cannot use it. USAGE: it is too short. */
int ckpt_seal_wanted(bool *ret, struct ckpt_err *err);

/* A proof of knowing the secret: a keyed hash of the purpose and of `said`, which are the bytes
 * that the two sides have exchanged. Zeros if no secret is set. */
void ckpt_seal_prove(const char *purpose, const void *said, size_t len,
                     unsigned char ret[CKPT_PROOF_BYTES]);

/* Compare len bytes in constant time. */
bool ckpt_seal_equal(const void *a, const void *b, size_t len);

/* The seals of one direction of a connection. Zero-initialised it is off: nothing is hashed. */
struct ckpt_seal {
    void *state; /* NULL: off */
    unsigned char key[CKPT_PROOF_BYTES];
    uint64_t number; /* of the next message */
};

/* Turn it on, with a key from ckpt_seal_prove. If no secret is set, it stays off. */
int ckpt_seal_init(struct ckpt_seal *s, const unsigned char key[CKPT_PROOF_BYTES],
                   struct ckpt_err *err);
void ckpt_seal_release(struct ckpt_seal *s);

/* The bytes of a seal: CKPT_SEAL_BYTES, or 0 if it is off. */
size_t ckpt_seal_len(const struct ckpt_seal *s);

/* Add bytes to the current message. */
void ckpt_seal_add(struct ckpt_seal *s, const void *data, size_t len);

/* End the current message and begin the next one. end: ret gets the seal. check: is `seal` the
 * right one? (Always true if it is off.) The seal covers the number of the message, so that
 * messages can't be left out, repeated or reordered. */
void ckpt_seal_end(struct ckpt_seal *s, unsigned char ret[CKPT_SEAL_BYTES]);
bool ckpt_seal_check(struct ckpt_seal *s, const unsigned char seal[CKPT_SEAL_BYTES]);

#endif
