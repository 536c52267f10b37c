/* SPDX-License-Identifier: Apache-2.0 */
/* One save of a step: the marker that ended it and the identities of its shards, as they were when
 * a view was opened. Trainers save a step again in its old place, by new files or by writing over
 * the old ones, and nothing in the directory records that half of the shards belong to another save
 * than the rest. There are two kinds of evidence: the times of the files, and changes since they
 * were last seen.
 *
 * Identities are taken when a view is opened, and compared when the step is opened again, when its
 * marker changes, and when a command has read everything; the scan that runs every second never
 * compares them. Immutable; counted, since a view and its run share one. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "format/reader.h"
#include "io/dir.h"
#include "io/source.h"
#include "tensor/catalog.h"

/* The file that a save writes after its shards, which marks it as finished. */
struct ckpt_save_marker {
    const char *name; /* from the reader (static); NULL: there is none */
    int64_t mtime_ns;
    uint64_t hash; /* a hash of the file's identity */
};

/* The marker of the save in a directory, as it is now. */
struct ckpt_save_marker ckpt_save_marker_of(const struct ckpt_reader *reader,
                                            const struct ckpt_dir *dir);

struct ckpt_save_file {
    struct ckpt_dir *dir; /* referenced */
    const char *name;     /* dir's */
    struct ckpt_file_id id;
    uint64_t sample; /* a hash of the header and of samples from the whole file */
    bool sampled;
};

struct ckpt_save {
    atomic_uint refs;
    struct ckpt_dir *step;
    const struct ckpt_reader *reader;
    struct ckpt_save_marker marker;
    CKPT_VEC(struct ckpt_save_file) files; /* by path */
    bool late;  /* some shards are newer than the marker, or there is no marker: this may be a copy,
                   or a save in progress */
    bool ended; /* there is a marker, and no shard before it is newer: a single one counts, too */
    uint64_t seen_ms; /* when the identities were taken, by ckpt_now_ms */
};

/* Record the save that cat was read from, by `reader`, in the directory `step`. `sample`: also hash
 * samples of the contents, if that is cheap, so that a file whose times alone have changed can be
 * told from one that was written again. */
int ckpt_save_new(const struct ckpt_catalog *cat, struct ckpt_dir *step,
                  const struct ckpt_reader *reader, const struct ckpt_save_marker *marker,
                  bool sample, struct ckpt_save **ret, struct ckpt_err *err);
struct ckpt_save *ckpt_save_ref(struct ckpt_save *s);
void ckpt_save_unref(struct ckpt_save *s);

/* Checks that the files of a save without a marker were all as recorded at one moment, which is
 * after the last of them was opened; a marker is looked at before and after that. STALE: some have
 * changed meanwhile, or are gone, so that those opened first may be of another save than the rest.
 */
int ckpt_save_check_moment(const struct ckpt_save *s, struct ckpt_fdpool *pool,
                           struct ckpt_err *err);

/* May a view be made of this save? CONFLICT (the text says what to do): it has shards of two saves,
 * or is in progress. `before` is the save that was found the last time; NULL: there was none.
 * Evidence that is too weak for an error becomes a warning of cat. *ret_written: some files are
 * those of `before` with other times, and no new marker says that whoever changed them has
 * finished. */
int ckpt_save_accept(const struct ckpt_save *now, const struct ckpt_save *before,
                     struct ckpt_catalog *cat, bool *ret_written, struct ckpt_err *err);

/* A write changes a file's times when it begins, and its bytes only after that: what is read right
 * after such a change may be of before the write or after it, and the times do not tell. If the
 * status of some files changed less than two seconds ago, wait for two seconds and sample these
 * again. STALE: one is being written. */
int ckpt_save_settle(const struct ckpt_save *s, struct ckpt_fdpool *pool, struct ckpt_err *err);

/* Where nothing marks the end of a save: is it at rest? *ret: it has `ended`, or its files, which
 * have the identities of then, have not changed for quiet_ms, by their times or since they were
 * seen. STALE: a file has changed since. */
int ckpt_save_at_rest(const struct ckpt_save *s, uint32_t quiet_ms, bool *ret,
                      struct ckpt_err *err);

/* ---- afterwards: what became of the files that a view was opened on ---- */

struct ckpt_save_counts {
    size_t equal; /* shards that are unchanged, or changed only in their times */
    size_t other; /* shards that were replaced or have other contents */
    size_t gone;  /* shards that were deleted, which proves nothing */
    bool late;    /* as in struct ckpt_save */
};

enum ckpt_save_state {
    CKPT_SAVE_SAME,  /* nothing has changed */
    CKPT_SAVE_OLD,   /* the whole step was saved again: open descriptors still read the old save */
    CKPT_SAVE_MIXED, /* the view may have been opened during a save: its bytes may be of two saves
                      */
};

/* Find out what the numbers of its shards say about a save. */
enum ckpt_save_state ckpt_save_state_of(const struct ckpt_save_counts *c);

/* Compare all files with their recorded identities. For CKPT_SAVE_MIXED, *err says which ones have
 * changed, although 0 is returned. */
int ckpt_save_compare(const struct ckpt_save *s, struct ckpt_fdpool *pool,
                      enum ckpt_save_state *ret, struct ckpt_err *err);
