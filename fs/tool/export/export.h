/* SPDX-License-Identifier: Apache-2.0 */
/* The modules of an export share this: export.c writes the spans of this process, dest.c knows DEST
 * and the folder beside it, rest.c does what is left when all spans are written, with readback.c.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/vec.h"
#include "tool.h"
#include "tool/export/done.h"
#include "tool/export/job.h"
#include "tool/export/part.h"
#include "tool/export/spans.h"
#include "tool/items.h"

/* An item of `pieces` is a whole file, or one unit of a file that several processes write or have
 * written. */
struct ckpt_piece {
    size_t item, unit; /* of a whole file: its first unit */
    bool is_file;
};

struct exporting {
    struct ckpt_view *view;
    struct ckpt_items *items; /* all files */
    struct ckpt_part part;
    unsigned jobs; /* threads; 0: the usual number */
    struct ckpt_spans spans;
    struct ckpt_done done;
    struct ckpt_job job;
    struct ckpt_items pieces; /* what this process writes, or compares */
    struct ckpt_piece *piece;

    const char *dest; /* as it was given */
    char *source;     /* a text that identifies the view's bytes */
    const char *only; /* which of its files */
    char *shown;      /* the path that the name of the work folder is put behind, for messages */
    char *name;       /* DEST's name in the folder above it; NULL: `inside` */
    char *work;       /* the work folder's name in `above` */
    bool inside;      /* the work folder lies in DEST, which cannot be replaced by a folder */
    int above;        /* the folder in which the work folder lies: the one above DEST, or DEST */
    int dir;          /* DEST; -1: there is none */
    char *parent;     /* the path of the folder above */
    size_t made;      /* so many of the last folders of `parent` were made by this process */
    bool old;         /* DEST holds an unfinished export of a version before 0.3 */

    bool joined;   /* the work folder is open */
    bool resumed;  /* there was something of processes that were killed, or have failed */
    bool finished; /* DEST has all files of the view with the right sizes, and no others */
    CKPT_VEC(size_t) written; /* pieces: small files that are written, but not yet on disk */
    pthread_mutex_t lock;     /* protects `written`, and the pieces' fd while files are opened */
    atomic_bool durable;      /* something is on disk that a resumed export can use */
    atomic_bool other;        /* DEST holds other files */
};

/* The temporary name of a file: "sub/.NAME.partial" for "sub/NAME". The caller frees it; NULL: no
 * memory. */
char *ckpt_export_temp(const char *path);

/* Make the folders in `dir` that a file of this path lies in, those that are not there. */
int ckpt_export_folders(int dir, const char *path, struct ckpt_err *err);

/* All bytes of a file are in its temporary file: first fsync that, then give it its name, then
 * record it in the journal. */
int ckpt_export_complete(struct exporting *x, size_t item, int fd, const XXH128_hash_t *hash,
                         struct ckpt_err *err);

/* ---- dest.c ---- */

/* Find DEST, make the folders above it, and look what is there. CONFLICT: something else. */
int ckpt_dest_open(struct exporting *x, struct ckpt_err *err);

/* Look for the work folder of an unfinished export into `dest`, without changing anything: 1, 0
 * (there is none, *ret stays as it is) or -1. Release *ret, whose folder above is not open. */
int ckpt_dest_look(const char *dest, struct ckpt_job *ret, json_t **ret_what, struct ckpt_err *err);

/* Has the file its name and its size, in the work folder or in DEST? */
bool ckpt_dest_has(const struct exporting *x, size_t item, int64_t *ret_mtime_ns);

/* Move what an older version has left unfinished in DEST to the work folder. */
int ckpt_dest_adopt(struct exporting *x, struct ckpt_err *err);

/* Take the journal of the older version. */
int ckpt_dest_take_old(struct exporting *x, struct ckpt_err *err);

/* All files are whole: make them DEST. *ret_named: this process did; false: another one was first.
 */
int ckpt_dest_name(struct exporting *x, bool *ret_named, struct ckpt_err *err);

/* Delete the work folder that a process which was killed while it deleted it has left beside a
 * finished DEST. */
void ckpt_dest_tidy(struct exporting *x);

/* Delete everything that was made. */
void ckpt_dest_clean(struct exporting *x);

/* Free what ckpt_dest_open has made. */
void ckpt_dest_release(struct exporting *x);

/* ---- rest.c ---- */

/* Take what all journals say. */
int ckpt_rest_refresh(struct exporting *x, struct ckpt_err *err);

/* This process's spans are written: read back files that were cut, wait for others if a launcher
 * has started them, and make DEST if everything is whole. *ret_whole: DEST is there; *ret_named:
 * this process has made it. */
int ckpt_rest_finish(struct exporting *x, bool *ret_whole, bool *ret_named, struct ckpt_err *err);

/* Tell what lacks: a new list of {"part", "files", "bytes", "state"}; NULL: no memory. */
json_t *ckpt_rest_lacking(struct exporting *x);

/* ---- readback.c ---- */

/* Read back what this process can of files that are written but not whole. *ret: something was. */
int ckpt_readback(struct exporting *x, bool *ret, struct ckpt_err *err);

/* Compare a whole file, whose time is another than the journal says, with its hash. */
bool ckpt_readback_is_intact(const struct exporting *x, size_t item);

/* ---- report.c ---- */

/* Print the report of a whole export, by the process that has made DEST or compared all of it. */
int ckpt_report_whole(const struct ckpt_export *e, const struct exporting *x, double seconds,
                      struct ckpt_err *err);

/* Print the report of one part of several, which has not made DEST, and what lacks. `whole`: DEST
 * is there. */
int ckpt_report_part(const struct ckpt_export *e, struct exporting *x, bool whole, double seconds,
                     struct ckpt_err *err);
