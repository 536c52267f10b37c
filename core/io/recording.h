/* SPDX-License-Identifier: Apache-2.0 */
/* A recording of what directories and files answered while a checkpoint was opened, so that other
 * processes can open the same checkpoint without accessing its files: a table of questions and
 * answers.
 *
 * One process makes a recording, opens directories with it and opens the checkpoint. The encoded
 * recording is sent to other processes, which open the checkpoint in the same way: what is in the
 * recording is answered from it (it is replayed), everything else by the real files. After
 * ckpt_recording_end only real files are read. Counted; safe from many threads.
 *
 * A file that was opened by a replay is opened for real when bytes are read that the recording
 * lacks. It may be another one than was recorded: the same on storage that several machines share
 * (its size and times are equal), or a copy (the size is equal, and so are all bytes that the
 * recording has of it and, once per directory, the samples). From then on its directory gives it
 * the identity that it has in the recording, so that nobody else has to know. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "io/dir.h"

struct ckpt_recording;

/* No more bytes of files than this are recorded; other processes then read the real files. */
#define CKPT_RECORDING_MOST (UINT64_C(1) << 30)

/* ---- life ---- */

/* Begin a recording. `machine` identifies this machine. */
int ckpt_recording_new(uint64_t machine, uint64_t most_bytes, struct ckpt_recording **ret,
                       struct ckpt_err *err);
void ckpt_recording_unref(struct ckpt_recording *r); /* NULL is allowed */
CKPT_CLEANUP_BY(ckpt_recording_unref, struct ckpt_recording)
/* Bytes that are read from now on are samples: they are not replayed, but as soon as one file of
 * another process turns out to be a copy, that process compares them with its own. */
void ckpt_recording_sample(struct ckpt_recording *r);

/* Append the recording's bytes to out. Files that changed during the recording are left out. */
int ckpt_recording_encode(struct ckpt_recording *r, struct ckpt_str *out, struct ckpt_err *err);

/* Begin a replay of data[0..len), which is borrowed until ckpt_recording_end. FORMAT: the bytes are
 * no recording, or damaged. UNSUPPORTED: they are of another version. */
int ckpt_recording_decode(const void *data, size_t len, uint64_t machine,
                          struct ckpt_recording **ret, struct ckpt_err *err);

/* The checkpoint is open: free everything but the files' identities, and the hashes of the bytes
 * that were replayed. No other thread may be opening the checkpoint. */
void ckpt_recording_end(struct ckpt_recording *r);

/* A number that grows while a checkpoint is opened; 0 for NULL. */
uint64_t ckpt_recording_progress(const struct ckpt_recording *r);

/* Let the directory of ckpt_dir_open keep its answers in rec, or answer from it; to be called right
 * after ckpt_dir_open, and for several directories in the same order by all processes. NULL:
 * neither. Opening a file may then fail with CONFLICT (it is no copy of the recorded one), or STALE
 * (it was written after the recording). */
int ckpt_dir_use(struct ckpt_dir *dir, struct ckpt_recording *rec, struct ckpt_err *err);

/* ---- questions and answers ---- */

/* Does it keep answers, recall them, or (after the end) neither? */
enum ckpt_dir_memory ckpt_recording_memory(const struct ckpt_recording *r);

enum ckpt_question_kind {
    CKPT_ASK_LOOK,   /* struct ckpt_looked */
    CKPT_ASK_LIST,   /* what ckpt_listed_add made */
    CKPT_ASK_BYTES,  /* of a file, from `off` on: as many as the answer has, or fewer */
    CKPT_ASK_SAMPLE, /* the same, but not to be replayed */
};

/* About `path` below a directory with this number. Answers are sorted in this order. */
struct ckpt_question {
    uint32_t root;
    const char *path;
    enum ckpt_question_kind kind;
    uint64_t off; /* of bytes; else 0 */
};

struct ckpt_answer {
    struct ckpt_question to;
    size_t len;
    const unsigned char *data;                 /* after the end: NULL, but for looks */
    uint64_t sum;                              /* XXH3 of the data */
    _Atomic(const struct ckpt_file_id *) here; /* the file's identity in this process; or NULL */
};

/* The answer to a question; NULL: there is none, or this is not a replay. */
struct ckpt_answer *ckpt_recording_find(struct ckpt_recording *r, const struct ckpt_question *q);

/* The i-th answer; NULL: there are no more. */
struct ckpt_answer *ckpt_recording_at(struct ckpt_recording *r, size_t i);

/* The data of an answer to a look. */
struct ckpt_looked {
    uint64_t errnum; /* not 0: the entry could not be accessed; for ckpt_errno_is_answer */
    uint64_t kind;   /* enum ckpt_entry_kind */
    struct ckpt_file_id id;
    int64_t birth_ns;
    char tag[CKPT_TAG_MAX]; /* up to its NUL */
};

/* Get the answer to a look; false: it is malformed. */
bool ckpt_looked_get(const struct ckpt_answer *a, struct ckpt_looked *ret);
