/* SPDX-License-Identifier: Apache-2.0 */
/* Keyed hashes of messages, by libsodium. */
#include "comm/tcp/seal.h"

#include <stdlib.h>
#include <string.h>

static const char *secret(void)
{
    const char *text = getenv("CKPTFS_SECRET");

    return text && *text ? text : NULL;
}

size_t ckpt_seal_len(const struct ckpt_seal *s) { return s->state ? CKPT_SEAL_BYTES : 0; }

#ifdef CKPT_HAVE_SODIUM

#include <sodium.h>

enum { LEAST_SECRET = 16 }; /* characters */

int ckpt_seal_wanted(bool *ret, struct ckpt_err *err)
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
void ckpt_seal_prove(const char *purpose, const void *said, size_t len,
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

bool ckpt_seal_equal(const void *a, const void *b, size_t len)
{
    return sodium_memcmp(a, b, len) == 0;
}

/* Begin a message, which is hashed with its number: messages cannot be left out or repeated. */
static void begin(struct ckpt_seal *s)
{
    (void)crypto_generichash_init(s->state, s->key, sizeof s->key, CKPT_SEAL_BYTES);
    (void)crypto_generichash_update(s->state, (const unsigned char *)&s->number, sizeof s->number);
    s->number++;
}

int ckpt_seal_init(struct ckpt_seal *s, const unsigned char key[CKPT_PROOF_BYTES],
                   struct ckpt_err *err)
{
    ckpt_seal_release(s);
    if (!secret())
        return 0;
    if (posix_memalign(&s->state, 64, crypto_generichash_statebytes()) != 0) {
        s->state = NULL;
        return ckpt_nomem(err);
    }
    memcpy(s->key, key, sizeof s->key);
    begin(s);
    return 0;
}

void ckpt_seal_add(struct ckpt_seal *s, const void *data, size_t len)
{
    if (s->state)
        (void)crypto_generichash_update(s->state, data, len);
}

void ckpt_seal_end(struct ckpt_seal *s, unsigned char ret[CKPT_SEAL_BYTES])
{
    if (!s->state)
        return;
    (void)crypto_generichash_final(s->state, ret, CKPT_SEAL_BYTES);
    begin(s);
}

#else

int ckpt_seal_wanted(bool *ret, struct ckpt_err *err)
{
    *ret = secret() != NULL;
    return *ret ? ckpt_fail(err, CKPT_UNSUPPORTED,
                            "CKPTFS_SECRET is set, but this library was built without libsodium")
                : 0;
}

void ckpt_seal_prove(const char *purpose, const void *said, size_t len,
                     unsigned char ret[CKPT_PROOF_BYTES])
{
    (void)purpose, (void)said, (void)len;
    memset(ret, 0, CKPT_PROOF_BYTES);
}

bool ckpt_seal_equal(const void *a, const void *b, size_t len) { return memcmp(a, b, len) == 0; }

int ckpt_seal_init(struct ckpt_seal *s, const unsigned char key[CKPT_PROOF_BYTES],
                   struct ckpt_err *err)
{
    (void)s, (void)key, (void)err;
    return 0;
}

void ckpt_seal_add(struct ckpt_seal *s, const void *data, size_t len)
{
    (void)s, (void)data, (void)len;
}

void ckpt_seal_end(struct ckpt_seal *s, unsigned char ret[CKPT_SEAL_BYTES]) { (void)s, (void)ret; }

#endif

void ckpt_seal_release(struct ckpt_seal *s)
{
    free(s->state);
    *s = (struct ckpt_seal){0};
}

bool ckpt_seal_check(struct ckpt_seal *s, const unsigned char seal[CKPT_SEAL_BYTES])
{
    unsigned char own[CKPT_SEAL_BYTES] = {0};

    if (!s->state)
        return true;
    ckpt_seal_end(s, own);
    return ckpt_seal_equal(own, seal, sizeof own);
}
