/* SPDX-License-Identifier: Apache-2.0 */
/* Recordings of an opened checkpoint: whatever is accepted can be replayed, to the last byte.
 *
 * Input: a recording after its hash (io/recording_blob.c). */
#include "fuzz.h"

#include <xxhash.h>

#include "io/recording.h"

enum { HEAD = 20 };

/* Read each range of each file, and a byte more, which is not in the recording. */
static void replay_all(struct ckpt_recording *rec)
{
    struct ckpt_replayed f;

    for (size_t i = 0; ckpt_replayed_at(rec, i, &f); i++) {
        const struct ckpt_place at = {rec, f.root, f.path};
        const struct ckpt_listed *list;
        struct ckpt_look look;
        size_t n;
        for (size_t k = 0; k < f.n; k++) {
            unsigned char *buf = malloc(f.chunk[k].len + 1);
            const struct iovec all = {buf, f.chunk[k].len}, more = {buf, f.chunk[k].len + 1};
            MUST(buf && ckpt_replay_look(&at, &look) && look.kind == CKPT_ENTRY_FILE);
            MUST(f.chunk[k].off + f.chunk[k].len <= look.id.size);
            MUST(ckpt_replay_read(&at, &all, 1, f.chunk[k].off));
            MUST(memcmp(buf, f.chunk[k].data, f.chunk[k].len) == 0);
            MUST(!ckpt_replay_read(&at, &more, 1, f.chunk[k].off));
            free(buf);
        }
        if (ckpt_replay_list(&at, &list, &n))
            for (size_t k = 0; k < n; k++)
                MUST(*list[k].name && !strchr(list[k].name, '/'));
    }
}

static void check_ended(const struct ckpt_recording *rec)
{
    struct ckpt_replayed f, found;

    for (size_t i = 0; ckpt_replayed_at(rec, i, &f); i++) {
        const struct ckpt_place at = {(struct ckpt_recording *)rec, f.root, f.path};
        MUST(f.n > 0 && ckpt_replayed_find(&at, &found) && found.chunk == f.chunk);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char *whole = malloc(HEAD + size);
    struct ckpt_recording *rec = NULL;
    struct ckpt_err err = {0};
    const uint64_t sum = XXH3_64bits(data, size);

    MUST(whole);
    memcpy(whole, "ckptfsRC\1\0\0\0", 12);
    for (int i = 0; i < 8; i++)
        whole[12 + i] = (unsigned char)(sum >> 8 * i);
    if (size)
        memcpy(whole + HEAD, data, size);
    if (ckpt_recording_decode(whole, HEAD + size, 0, &rec, &err) < 0) {
        check_err(&err);
    } else {
        replay_all(rec);
        ckpt_recording_end(rec);
        check_ended(rec);
    }
    ckpt_recording_unref(rec);
    free(whole);
    return 0;
}
