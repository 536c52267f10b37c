/* SPDX-License-Identifier: Apache-2.0 */
/* A recording of what directories and files answered while a checkpoint was opened, so that other
 * processes can open the same checkpoint without accessing its files.
 *
 * One process makes a recording, opens directories with it (ckpt_dir_use) and opens the checkpoint:
 * identities of entries, listings, and all bytes that were read are kept. The encoded recording is
 * sent to other processes, which open the checkpoint in the same way: what is in the recording is
 * answered from it (it is replayed), everything else by the real files. After ckpt_recording_end
 * only real files are read. A file that was opened by a replay is opened for real when it is read
 * for the first time, and compared with the recording then (io/copy.h). Counted; safe from many
 * threads. */
#ifndef CKPT_IO_RECORDING_H
#define CKPT_IO_RECORDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/str.h"
#include "io/file_id.h"

struct ckpt_recording;

/* No more bytes of files than this are recorded; other processes then read the real files. */
#define CKPT_RECORDING_MOST (UINT64_C(1) << 30)

/* Begin a recording. `machine` identifies this machine. */
int ckpt_recording_new(uint64_t machine, uint64_t most_bytes, struct ckpt_recording **ret,
                       struct ckpt_err *err);
struct ckpt_recording *ckpt_recording_ref(struct ckpt_recording *r); /* NULL is allowed */
void ckpt_recording_unref(struct ckpt_recording *r);
void ckpt_recording_unrefp(struct ckpt_recording **r);

/* Files that are read from now on are witnesses: as soon as one file of another process turns out
 * to be a copy, that process compares the witnesses, too. */
void ckpt_recording_witness(struct ckpt_recording *r);

/* Append the recording's bytes to out. Files that changed during the recording are left out. */
int ckpt_recording_encode(struct ckpt_recording *r, struct ckpt_str *out, struct ckpt_err *err);

/* Begin a replay of data[0..len), which is borrowed until ckpt_recording_end. FORMAT: the bytes are
 * no recording, or damaged. UNSUPPORTED: they are of another version. */
int ckpt_recording_decode(const void *data, size_t len, uint64_t machine,
                          struct ckpt_recording **ret, struct ckpt_err *err);

/* A number that grows while a checkpoint is opened; 0 for NULL. */
uint64_t ckpt_recording_progress(const struct ckpt_recording *r);

/* The checkpoint is open: of what was replayed only digests are kept. No other thread may be
 * opening the checkpoint. */
void ckpt_recording_end(struct ckpt_recording *r);

/* ---- for io/dir.c and io/source_file.c ---- */

/* An entry of a directory as the system described it. */
struct ckpt_look {
    int errnum; /* not 0: it could not be accessed, and kind and id are undefined */
    enum ckpt_entry_kind kind;
    struct ckpt_file_id id;
};

/* One name of a listing. */
struct ckpt_listed {
    char *name;
    enum ckpt_entry_kind kind; /* of the link's target, if it is a link that may be followed */
    bool is_link;
};

/* A place that a recording may know: the number of a directory of ckpt_dir_use, and the path below
 * it. */
struct ckpt_place {
    struct ckpt_recording *rec; /* NULL: nothing is recorded or replayed */
    uint32_t root;
    const char *path;
};

/* Is this error a normal answer about a name that leads nowhere? Other errors are trouble, and are
 * not recorded. */
bool ckpt_errno_is_answer(int errnum);

/* Add a directory with this identity; its number. */
uint32_t ckpt_recording_add_root(struct ckpt_recording *r, const struct ckpt_file_id *id);

/* Do a recording, or a replay, run? False for NULL. */
bool ckpt_recording_records(const struct ckpt_recording *r);
bool ckpt_recording_replays(const struct ckpt_recording *r);

/* Record an answer, if a recording runs. A failure to do so is not reported: other processes will
 * access the real file. birth_ns is the time of creation, 0 if it is not known. */
void ckpt_record_look(const struct ckpt_place *at, const struct ckpt_look *look);
void ckpt_record_birth(const struct ckpt_place *at, int64_t birth_ns);
void ckpt_record_list(const struct ckpt_place *at, const struct ckpt_listed *list, size_t n);
void ckpt_record_read(const struct ckpt_place *at, const struct iovec *iov, int n, uint64_t off);

/* Answer from the replay, if one runs; false: it is not in the recording. The listing is borrowed.
 */
bool ckpt_replay_look(const struct ckpt_place *at, struct ckpt_look *ret);
bool ckpt_replay_birth(const struct ckpt_place *at, int64_t *ret);
bool ckpt_replay_list(const struct ckpt_place *at, const struct ckpt_listed **ret, size_t *ret_n);
bool ckpt_replay_read(const struct ckpt_place *at, const struct iovec *iov, int n, uint64_t off);

/* ---- for io/copy.c, after ckpt_recording_end ---- */

/* Bytes of a file that were replayed: the ranges, and a digest of them all. */
struct ckpt_replayed {
    uint32_t root;
    const char *path;
    bool witness;
    size_t n;
    const struct ckpt_chunk *chunk;
    unsigned char digest[16];
};

struct ckpt_chunk {
    uint64_t off;
    size_t len;
    const unsigned char *data; /* NULL after ckpt_recording_end */
};

/* The replayed file of a place; false: none of its bytes were replayed. */
bool ckpt_replayed_find(const struct ckpt_place *at, struct ckpt_replayed *ret);
/* The i-th of the replayed files; false: there are no more. */
bool ckpt_replayed_at(const struct ckpt_recording *r, size_t i, struct ckpt_replayed *ret);

/* Remember that the file which is here with this identity has the bytes of the replayed one; and
 * ask for that: an archive is compared once, and not for each of its files. */
void ckpt_replayed_set_copy(const struct ckpt_place *at, const struct ckpt_file_id *id);
bool ckpt_replayed_is_copy(const struct ckpt_place *at, const struct ckpt_file_id *id);

/* Is the directory the very same as in the recording, on the same machine? */
bool ckpt_replayed_same_root(const struct ckpt_recording *r, uint32_t root);
/* When the recording began, by the recording process's clock. */
int64_t ckpt_replayed_begin_ns(const struct ckpt_recording *r);
/* Must the witnesses be compared? True for one caller, which compares them and, if they are of
 * another checkpoint, says so: the others then fail, too. */
bool ckpt_replayed_take_witnesses(struct ckpt_recording *r);
void ckpt_replayed_refuse(struct ckpt_recording *r);
bool ckpt_replayed_refused(const struct ckpt_recording *r);

/* The digest of n ranges' bytes, of which read() fetches one after the other into buf. */
int ckpt_chunks_digest(const struct ckpt_chunk *chunk, size_t n,
                       int (*read)(void *ctx, void *buf, size_t len, uint64_t off,
                                   struct ckpt_err *err),
                       void *ctx, unsigned char ret[16], struct ckpt_err *err);

#endif
