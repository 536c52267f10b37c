/* SPDX-License-Identifier: Apache-2.0 */
/* Recordings of an opened checkpoint: whatever is accepted can be used for a replay.
 *
 * Input: a recording after its hash (io/recording.c). */
#include "fuzz.h"

#include <xxhash.h>

#include "io/recording.h"

enum { HEAD = 24 };

/* Find each answer, and use it as the directory of a replay does. */
static void ask_all(struct ckpt_recording *rec)
{
    struct ckpt_answer *a;

    for (size_t i = 0; (a = ckpt_recording_at(rec, i)); i++) {
        const char *at = (const char *)a->data, *end = at + a->len;
        struct ckpt_looked look;
        struct ckpt_entry e;
        MUST(ckpt_recording_find(rec, &a->to) == a);
        MUST(XXH3_64bits(a->data, a->len) == a->sum);
        MUST(a->to.kind != CKPT_ASK_LOOK || ckpt_looked_get(a, &look));
        while (a->to.kind == CKPT_ASK_LIST && at < end)
            MUST(ckpt_listed_next(&at, end, &e) && *e.name && !strchr(e.name, '/'));
    }
}

/* What files were is still known; the bytes are not. */
static void check_ended(struct ckpt_recording *rec)
{
    struct ckpt_answer *a;
    struct ckpt_looked look;

    for (size_t i = 0; (a = ckpt_recording_at(rec, i)); i++) {
        MUST(ckpt_recording_find(rec, &a->to) == a);
        MUST(a->to.kind == CKPT_ASK_LOOK ? ckpt_looked_get(a, &look) : !a->data);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char *whole = malloc(HEAD + size);
    struct ckpt_recording *rec = NULL;
    struct ckpt_err err = {0};
    const uint64_t sum = XXH3_64bits(data, size);

    MUST(whole);
    memcpy(whole, "ckptfsRC\3\0\0\0\0\0\0\0", 16);
    memcpy(whole + 16, &sum, sizeof sum);
    if (size)
        memcpy(whole + HEAD, data, size);
    if (ckpt_recording_decode(whole, HEAD + size, 0, &rec, &err) < 0) {
        check_err(&err);
    } else {
        ask_all(rec);
        ckpt_recording_end(rec);
        check_ended(rec);
    }
    ckpt_recording_unref(rec);
    free(whole);
    return 0;
}
