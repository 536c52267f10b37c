/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzz targets share: taking an input apart, and reading back every byte that was
 * accepted. */
#ifndef CKPT_TESTS_FUZZ_FUZZ_H
#define CKPT_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "tensor/read.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A target may have a mutator of its own (mutate.h). */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);

/* A property that must hold for every input. */
#define MUST(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond))                                                                               \
            abort();                                                                               \
    } while (0)

/* The rest of the input; taking more than there is gives zeros. */
struct input {
    const uint8_t *at;
    size_t left;
};

static inline uint8_t input_u8(struct input *in)
{
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->at++;
}

static inline uint16_t input_u16(struct input *in)
{
    uint16_t lo = input_u8(in);
    return (uint16_t)(lo | input_u8(in) << 8);
}

/* At most len bytes. */
static inline const uint8_t *input_take(struct input *in, size_t len, size_t *ret_len)
{
    const uint8_t *p = in->at;
    *ret_len = len < in->left ? len : in->left;
    in->at += *ret_len;
    in->left -= *ret_len;
    return p;
}

/* A NUL-terminated copy of the input up to the next `end`, which is passed over. */
static inline char *input_text(struct input *in, char end)
{
    const uint8_t *stop = in->left ? memchr(in->at, end, in->left) : NULL;
    size_t len = stop ? (size_t)(stop - in->at) : in->left;
    char *text = malloc(len + 1);

    MUST(text);
    if (len)
        memcpy(text, in->at, len);
    text[len] = '\0';
    in->at += len + (stop != NULL);
    in->left -= len + (stop != NULL);
    return text;
}

enum { READ_MOST = 1 << 20 };

/* Read all of a tensor (the beginning, if it is large), whole and in odd chunks; both must say the
 * same. */
/* An error has a code, and a text that is one printable line. */
static inline void check_err(const struct ckpt_err *err)
{
    MUST(err->code != CKPT_OK && err->text[0] && memchr(err->text, 0, sizeof err->text));
    for (const char *s = err->text; *s; s++)
        MUST((unsigned char)*s >= 0x20);
}

static bool reads_may_fail; /* what is read is checked only then */

static inline void read_back(const struct ckpt_tensor *t)
{
    size_t len = (size_t)ckpt_min_u64(ckpt_tensor_nbytes(t), READ_MOST);
    unsigned char *whole = malloc(len + 1), *part = malloc(len + 1);
    struct ckpt_err err = {0};

    MUST(whole && part);
    if (ckpt_tensor_pread(t, NULL, whole, len, 0, &err) < 0) {
        MUST(reads_may_fail);
        check_err(&err);
        len = 0;
    }
    size_t step = len / 7 + 1;
    for (size_t off = 0; off < len; off += step) {
        size_t n = len - off < step ? len - off : step;
        MUST(ckpt_tensor_pread(t, NULL, part + off, n, off, &err) == 0);
    }
    MUST(memcmp(whole, part, len) == 0);
    free(whole);
    free(part);
}

static inline void read_back_all(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++)
        read_back(&cat->tensors.ptr[i]);
}

#endif
