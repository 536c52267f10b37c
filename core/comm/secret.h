/* SPDX-License-Identifier: Apache-2.0 */
/* The job's secret (CKPTFS_SECRET): in each handshake of TCP both sides prove that they know it, by
 * a keyed hash (BLAKE2b of libsodium). It decides who may connect. Over MPI, where the launcher
 * decides that, all ranks prove once that they have the same one. It does not protect what is sent
 * afterwards, which is neither encrypted nor authenticated. Without libsodium a secret is an error.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

enum { CKPT_PROOF_BYTES = 32, CKPT_NONCE_BYTES = 16 };

/* Is a secret set? UNSUPPORTED: this library cannot use it. USAGE: it is too short. */
int ckpt_secret_is_set(bool *ret, struct ckpt_err *err);

/* A proof of knowing the secret: a keyed hash of the purpose and of `said`, which are the bytes
 * that the two sides have exchanged. Zeros if no secret is set. */
void ckpt_secret_prove(const char *purpose, const void *said, size_t len,
                       unsigned char ret[CKPT_PROOF_BYTES]);

/* Compare two proofs in constant time. */
bool ckpt_secret_equal(const unsigned char a[CKPT_PROOF_BYTES],
                       const unsigned char b[CKPT_PROOF_BYTES]);
