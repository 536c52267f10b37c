/* SPDX-License-Identifier: Apache-2.0 */
/* Authentication of what ranks send each other over TCP: all ranks know the same secret
 * (CKPTFS_SECRET). Each handshake proves that to both sides, and every later message carries a
 * keyed hash. Nothing is encrypted. The functions are libsodium's (BLAKE2b with a key); without
 * libsodium a secret is an error. */
#ifndef CKPT_LOAD_SEAL_H
#define CKPT_LOAD_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { CKPT_SEAL_BYTES = 16, CKPT_PROOF_BYTES = 32, CKPT_NONCE_BYTES = 16 };

/* Is a secret set? UNSUPPORTED: this library cannot use it. USAGE: it is too short. */
int ckpt_seal_wanted(bool *ret, struct ckpt_err *err);

/* The proof that we know the secret: a hash of what was said so far, for this purpose. Zeros if no
 * secret is set. */
void ckpt_seal_prove(const char *purpose, const void *said, size_t len,
                     unsigned char ret[CKPT_PROOF_BYTES]);
/* Are they equal? Takes the same time whatever they are. */
bool ckpt_seal_equal(const void *a, const void *b, size_t len);

/* One direction of a connection. Zero-initialised it is off: nothing is hashed. */
struct ckpt_seal {
    void *state; /* NULL: off */
    unsigned char key[CKPT_PROOF_BYTES];
    uint64_t number; /* of the next message */
};

/* Turn it on, with a key from ckpt_seal_prove, if a secret is set. */
int ckpt_seal_init(struct ckpt_seal *s, const unsigned char key[CKPT_PROOF_BYTES],
                   struct ckpt_err *err);
void ckpt_seal_release(struct ckpt_seal *s);

/* The bytes of a seal: CKPT_SEAL_BYTES, or 0 if it is off. */
size_t ckpt_seal_len(const struct ckpt_seal *s);

/* Add bytes to the message; then end it: ret gets its seal, or `seal` is compared with it. The next
 * message begins. */
void ckpt_seal_add(struct ckpt_seal *s, const void *data, size_t len);
void ckpt_seal_end(struct ckpt_seal *s, unsigned char ret[CKPT_SEAL_BYTES]);
bool ckpt_seal_check(struct ckpt_seal *s, const unsigned char seal[CKPT_SEAL_BYTES]);

#endif
