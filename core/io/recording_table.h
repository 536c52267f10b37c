/* SPDX-License-Identifier: Apache-2.0 */
/* What a recording consists of, for the two files that implement it. */
#ifndef CKPT_IO_RECORDING_TABLE_H
#define CKPT_IO_RECORDING_TABLE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/recording.h"

enum { CKPT_RECORDING_ROOTS = 8 }; /* directories; what is in further ones is not recorded */

/* All answers about one place. */
struct ckpt_recorded {
    const char *key; /* the number of the root as one byte, and the path, NUL-terminated */
    bool has_look, has_birth, has_list;
    bool changed; /* it was seen with two identities */
    bool witness;
    struct ckpt_look look;
    int64_t birth_ns;
    struct ckpt_listed *list;
    size_t nlist;
    CKPT_VEC(struct ckpt_chunk) chunk;
    unsigned char digest[16];
    /* replay: the copy that has been compared with it; the recording's lock protects this */
    bool has_copy;
    struct ckpt_file_id copy;
};

enum ckpt_recording_state { CKPT_RECORDING, CKPT_REPLAYING, CKPT_REPLAYED };

struct ckpt_recording {
    atomic_uint refs;
    atomic_int state;
    uint64_t machine, most_bytes;
    int64_t begin_ns;
    uint32_t nroot;
    bool same_machine;
    uint64_t root_inode[CKPT_RECORDING_ROOTS]; /* of the recording process */
    bool same_root[CKPT_RECORDING_ROOTS];      /* replay: this process has the very same */
    atomic_bool witnesses_taken, refused;
    atomic_ullong progress;
    /* While recording, the lock protects everything below; a replay changes nothing. */
    pthread_mutex_t lock;
    bool witness;
    uint64_t nbyte; /* of contents */
    struct ckpt_arena arena;
    struct ckpt_map by_key;
    CKPT_VEC(struct ckpt_recorded) file;
};

/* An empty recording in this state. */
int ckpt_recording_alloc(enum ckpt_recording_state state, struct ckpt_recording **ret,
                         struct ckpt_err *err);

/* Find the answers about a key of len bytes, or add an empty one whose key is borrowed. NULL: no
 * memory. */
struct ckpt_recorded *ckpt_recording_put(struct ckpt_recording *r, const char *key, size_t len,
                                         bool *ret_new);

/* Sort the chunks, and join those that touch: each byte once. */
int ckpt_recorded_join(struct ckpt_recording *r, struct ckpt_recorded *f);

/* Compute the digest of joined chunks. */
int ckpt_recorded_digest(struct ckpt_recorded *f, struct ckpt_err *err);

#endif
