/* SPDX-License-Identifier: Apache-2.0 */
/* Proofs of knowing the secret, by libsodium. */
#include "comm/secret.h"

#include <stdlib.h>
#include <string.h>

static const char *secret(void)
{
    const char *text = getenv("CKPTFS_SECRET");

    return text && *text ? text : NULL;
}

#ifdef CKPT_HAVE_SODIUM

#include <sodium.h>

enum { LEAST_SECRET = 16 }; /* characters */

int ckpt_secret_is_set(bool *ret, struct ckpt_err *err)
{
    *ret = secret() != NULL;
    if (*ret && strlen(secret()) < LEAST_SECRET)
        return ckpt_fail(err, CKPT_USAGE,
                         "CKPTFS_SECRET has %zu characters, at least %d random ones are expected",
                         strlen(secret()), LEAST_SECRET);
    if (*ret && sodium_init() < 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "libsodium could not be initialised");
    return 0;
}

/* The key is a hash of the secret, which may have any length. */
void ckpt_secret_prove(const char *purpose, const void *said, size_t len,
                       unsigned char ret[CKPT_PROOF_BYTES])
{
    unsigned char key[crypto_generichash_KEYBYTES];
    crypto_generichash_state h;
    const char *text = secret();

    memset(ret, 0, CKPT_PROOF_BYTES);
    if (!text)
        return;
    (void)crypto_generichash(key, sizeof key, (const unsigned char *)text, strlen(text), NULL, 0);
    (void)crypto_generichash_init(&h, key, sizeof key, CKPT_PROOF_BYTES);
    (void)crypto_generichash_update(&h, (const unsigned char *)purpose, strlen(purpose) + 1);
    (void)crypto_generichash_update(&h, said, len);
    (void)crypto_generichash_final(&h, ret, CKPT_PROOF_BYTES);
    sodium_memzero(key, sizeof key);
}

bool ckpt_secret_equal(const unsigned char a[CKPT_PROOF_BYTES],
                       const unsigned char b[CKPT_PROOF_BYTES])
{
    return sodium_memcmp(a, b, CKPT_PROOF_BYTES) == 0;
}

#else

int ckpt_secret_is_set(bool *ret, struct ckpt_err *err)
{
    *ret = secret() != NULL;
    return *ret ? ckpt_fail(err, CKPT_UNSUPPORTED,
                            "CKPTFS_SECRET is set, but this library was built without libsodium")
                : 0;
}

void ckpt_secret_prove(const char *purpose, const void *said, size_t len,
                       unsigned char ret[CKPT_PROOF_BYTES])
{
    (void)purpose, (void)said, (void)len;
    memset(ret, 0, CKPT_PROOF_BYTES);
}

bool ckpt_secret_equal(const unsigned char a[CKPT_PROOF_BYTES],
                       const unsigned char b[CKPT_PROOF_BYTES])
{
    return memcmp(a, b, CKPT_PROOF_BYTES) == 0;
}

#endif
