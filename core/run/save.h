/* SPDX-License-Identifier: Apache-2.0 */
/* One save of a step: the marker that ended it and the identities of its shards, as they were when
 * a view was opened. Trainers save a step again in its old place, by new files or by writing over
 * the old ones, and nothing in a directory says that half of its shards are of another save than
 * the rest. Two things tell: the times of what lies there, and what changed since we looked.
 *
 * Identities are taken when a view is opened, and compared when the step is opened again, when its
 * marker changes, and when a command has read all; never by the scan that looks every second.
 * Immutable; counted, since a view and its run share one. */
#ifndef CKPT_RUN_SAVE_H
#define CKPT_RUN_SAVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "ckpt/reader.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "tensor/catalog.h"

/* The file that a save writes after its shards. */
struct ckpt_save_marker {
    const char *name; /* the reader's text; NULL: there is none */
    int64_t mtime_ns;
    uint64_t hash; /* of its identity */
};

struct ckpt_save_marker ckpt_save_marker_of(const struct ckpt_reader *reader,
                                            const struct ckpt_dir *dir);

struct ckpt_save_file {
    struct ckpt_dir *dir; /* referenced */
    const char *name;     /* dir's */
    struct ckpt_file_id id;
    uint64_t sample; /* a hash of the header and of places all over the file */
    bool sampled;
};

struct ckpt_save {
    atomic_uint refs;
    struct ckpt_dir *step;
    const struct ckpt_reader *reader;
    struct ckpt_save_marker marker;
    CKPT_VEC(struct ckpt_save_file) files; /* by path */
    bool late; /* shards are younger than the marker (or there is none): a copy, or a save under
                  way; nobody can tell */
};

/* The save that cat, which reader made of the directory `step`, was read from. `sample`: also look
 * at contents, where that is cheap, so that a file that is only touched can be told from one that
 * was written again. */
int ckpt_save_new(const struct ckpt_catalog *cat, struct ckpt_dir *step,
                  const struct ckpt_reader *reader, const struct ckpt_save_marker *marker,
                  bool sample, struct ckpt_save **ret, struct ckpt_err *err);
struct ckpt_save *ckpt_save_ref(struct ckpt_save *s);
void ckpt_save_unref(struct ckpt_save *s);

/* May a view be made of what was found? CONFLICT, which says what to do, if it holds shards of two
 * saves, or is being saved now. `before`: the save that was found last time; NULL: this is the
 * first time. */
int ckpt_save_accept(const struct ckpt_save *now, const struct ckpt_save *before,
                     struct ckpt_err *err);

/* ---- afterwards: what became of the files that a view was opened on ---- */

struct ckpt_save_counts {
    size_t equal; /* shards that are what they were, or were only touched */
    size_t other; /* another file, or other bytes, lie in their place */
    size_t gone;  /* nothing does: tells nothing */
    bool late;    /* struct ckpt_save's */
};

enum ckpt_save_state {
    CKPT_SAVE_SAME,  /* nothing happened */
    CKPT_SAVE_OLD,   /* saved again as a whole: open descriptors go on serving the old save */
    CKPT_SAVE_MIXED, /* perhaps the view was opened in the middle of a save: its bytes may be of two
                      */
};

enum ckpt_save_state ckpt_save_judge(const struct ckpt_save_counts *c);

/* Look at all files again. For MIXED, *err says which ones (and 0 is returned all the same). */
int ckpt_save_compare(const struct ckpt_save *s, struct ckpt_fdpool *pool,
                      enum ckpt_save_state *ret, struct ckpt_err *err);

/* ---- times ---- */

struct ckpt_written {
    int64_t begin_ns, end_ns; /* created (0: not known); last written */
    uint64_t size;
    const struct ckpt_save_file *file;
};

enum ckpt_save_times {
    CKPT_TIMES_ONE,
    CKPT_TIMES_TWO,      /* shards of two saves */
    CKPT_TIMES_NEW_ONLY, /* all are of a save after the one that the marker ended: if they are
                            young, it has not ended */
};

/* What do the times of these shards (n of them, which become sorted by end_ns) say? Copies have
 * files in any order and at any pace, so this asks for a gap in which nothing was written, longer
 * than a minute and than four times every gap before it, after the marker (NULL: there is none;
 * then anywhere), with a shard on either side; or, for NEW_ONLY, between the marker and the first
 * of several shards, and longer than four times every gap after it. A file that was created after
 * the marker (if there is none: after the file before the gap) was being written from then on, at a
 * pace that is not absurd: a large file in a copy takes its time. */
enum ckpt_save_times ckpt_save_times(struct ckpt_written *w, size_t n, const int64_t *marker_ns);

#endif
