/* SPDX-License-Identifier: Apache-2.0 */
/* A directory that we were given, and the only way to files below it. It may be an archive, too.
 *
 * Names that come out of a checkpoint are resolved beneath this directory: absolute names and ".."
 * are refused, symbolic links are followed only as the policy says, and what is opened must be a
 * regular file (a FIFO, a device or a directory is an error, never a hang). Counted: a catalogue,
 * its sources and several threads share one. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "io/storage.h"

/* ---- paths below a directory; "." is the directory itself ---- */

/* Where a symbolic link below the directory may lead. */
enum ckpt_links {
    CKPT_LINKS_BENEATH, /* anywhere below `root` (see ckpt_dir_open_below) */
    CKPT_LINKS_ANY,     /* -o follow_symlinks */
};

struct ckpt_below {
    int fd; /* of the directory; -1: none */
    enum ckpt_links links;
    char *real;  /* its canonical path, for links that are absolute or leave and come back */
    char *blobs; /* of the same model in a hub cache, canonical; or NULL */
};

/* May this be the name of a file below a directory: relative, no "..", no empty component? */
bool ckpt_below_ok(const char *name);

/* Is the path the path `top`, or below it, by their texts? */
bool ckpt_is_below(const char *path, const char *top);

/* ---- directories ---- */

struct statx;
struct ckpt_source_run;

/* The identity of a file's content while it is held open; it is compared before every reply. */
struct ckpt_file_id {
    uint64_t inode; /* device and inode number, folded: only good for comparing */
    uint64_t size;
    int64_t mtime_ns, ctime_ns;
};

/* Are all members equal? */
bool ckpt_file_id_eq(const struct ckpt_file_id *a, const struct ckpt_file_id *b);

/* The identity in the result of statx(2). */
struct ckpt_file_id ckpt_file_id_of_statx(const struct statx *st);

/* The identity of an open file. *ret_unlinked: no name leads to the file any more. */
int ckpt_file_id_of(int fd, struct ckpt_file_id *ret, bool *ret_unlinked, struct ckpt_err *err);

struct ckpt_dir;

enum ckpt_entry_kind {
    CKPT_ENTRY_FILE,
    CKPT_ENTRY_DIR,
    CKPT_ENTRY_OTHER,
    CKPT_ENTRY_UNKNOWN, /* only in a listing of ckpt_dir_ops: ask for it */
};

/* The bytes of a file in the file that is opened for it: all of them, or a part of an archive. */
struct ckpt_extent {
    uint64_t off, len;
};

enum { CKPT_TAG_MAX = 96 }; /* bytes of an ETag, with the NUL */

/* How bytes of a file or an object are read. */
enum ckpt_read_how {
    CKPT_READ_AHEAD,  /* wait for them; what is around them may be fetched, too */
    CKPT_READ_EXACT,  /* wait for them, and fetch nothing else */
    CKPT_READ_LOOK,   /* as AHEAD, by somebody who will read what is beside them, or has read it */
    CKPT_READ_CACHED, /* only if that needs no waiting for storage, nor a request */
    CKPT_READ_PREFETCH, /* do not read them: begin to fetch them. iov has lengths only */
};

/* Are the bytes there when such a read returns? */
static inline bool ckpt_read_waits(enum ckpt_read_how how)
{
    return how != CKPT_READ_CACHED && how != CKPT_READ_PREFETCH;
}

/* The facts that a directory knows of an entry. */
struct ckpt_dir_found {
    enum ckpt_entry_kind kind;
    struct ckpt_file_id id;    /* a file's: of what is opened for it; differs between folders */
    struct ckpt_extent extent; /* of a file */
    int64_t birth_ns;          /* when the file was created; 0: not known */
    uint64_t device;           /* of a file with a descriptor: its filesystem's number */
    char tag[CKPT_TAG_MAX];    /* of an object, which has no descriptor: its ETag; else "" */
};

/* Open the directory at `path`. Links may lead anywhere below it; if it is a snapshot of a Hugging
 * Face hub cache
 * (.../models--ORG--NAME/snapshots/REV), also into the same model's blobs/. The path itself may be
 * or contain links. */
int ckpt_dir_open(const char *path, enum ckpt_links links, struct ckpt_dir **ret,
                  struct ckpt_err *err);

/* A subdirectory, or with "." the same once more (without its troubles). It keeps the parent's
 * limit: links inside may lead anywhere below the directory of ckpt_dir_open. */
int ckpt_dir_open_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                        struct ckpt_err *err);

/* Opens a directory as ckpt_dir_open_below does, but without accessing it, for a name that a
 * listing of dir has. An error is found when it is used. */
int ckpt_dir_listed_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                          struct ckpt_err *err);

/* Opens a directory as ckpt_dir_open does, as the way to one file: the directory itself may be
 * unreadable, it can't be listed, and links lead anywhere. */
int ckpt_dir_open_passage(const char *path, struct ckpt_dir **ret, struct ckpt_err *err);

/* Open a directory as ckpt_dir_open does, to look around in it with no thread but this one, as a
 * program must that confines itself afterwards: nothing of it is far. */
int ckpt_dir_open_near(const char *path, enum ckpt_links links, struct ckpt_dir **ret,
                       struct ckpt_err *err);

/* Say which of the directory's files are far, and how these are read, also for directories below
 * it; before others use it. At first they are zeroed. */
void ckpt_dir_set_far(struct ckpt_dir *dir, const struct ckpt_far_options *far);
const struct ckpt_far_options *ckpt_dir_far_options(const struct ckpt_dir *dir);

/* May a request about it hang, as its storage is another machine's or a FUSE daemon's, or is to be
 * taken for that? Then it is given up after a time (io/far/calls.h). False for a bucket, whose
 * helper sees to that. */
bool ckpt_dir_may_hang(const struct ckpt_dir *dir);

/* The filesystem of the directory itself. NULL: nothing is known of it. */
struct ckpt_storage *ckpt_dir_storage(const struct ckpt_dir *dir);

/* Are its files objects of a bucket, which have no descriptors? */
bool ckpt_dir_has_objects(const struct ckpt_dir *dir);

/* Is the entry a folder in each of the directories of which this one is the union
 * (io/dir_union.h)? `ret_lacks`, if it is not, has the path of the first that lacks it. True for
 * any other directory. */
bool ckpt_dir_is_everywhere(const struct ckpt_dir *dir, const char *name, const char **ret_lacks);

/* Where a file is that other machines have and this one has not, for messages; NULL: it is here, or
 * nowhere. ckpt_dir_open_file gives no descriptor for such a file, and ckpt_dir_read_elsewhere
 * reads it. Borrowed from dir. */
const char *ckpt_dir_elsewhere(const struct ckpt_dir *dir, const char *name);

/* Is it the inside of a file (io/dir_archive.h), or the union of such directories? */
bool ckpt_dir_is_archive(const struct ckpt_dir *dir);

/* Can a file be elsewhere? */
bool ckpt_dir_is_spread(const struct ckpt_dir *dir);

/* Set ret[r] for each of the n ranks of the job: has rank r the file? False: all of them see the
 * same files. */
bool ckpt_dir_holders(const struct ckpt_dir *dir, const char *name, bool *ret, uint32_t n);

/* Does each question about an entry take a round trip, so that many are to be asked at once? True
 * for a bucket. */
bool ckpt_dir_is_far(const struct ckpt_dir *dir);

/* May an entry be found by a name that its list does not have, as on Windows' filesystems? */
bool ckpt_dir_ignores_case(const struct ckpt_dir *dir);

/* Count a reference (NULL is allowed); give one back; the same for ckpt_cleanup. The last one
 * closes the directory. */
struct ckpt_dir *ckpt_dir_ref(struct ckpt_dir *dir);
void ckpt_dir_unref(struct ckpt_dir *dir);
CKPT_CLEANUP_BY(ckpt_dir_unref, struct ckpt_dir)

/* Describe an entry. */
int ckpt_dir_look(const struct ckpt_dir *dir, const char *name, struct ckpt_dir_found *ret,
                  struct ckpt_err *err);

/* The path as the user gave it, with the names of subdirectories appended; for messages. Lives as
 * long as dir. */
const char *ckpt_dir_path(const struct ckpt_dir *dir);

/* The name of the directory of ckpt_dir_open: the last component of its path after resolving links.
 * Valid as long as dir. */
const char *ckpt_dir_real_name(const struct ckpt_dir *dir);

/* The path of the directory of ckpt_dir_open after resolving links; and, for a snapshot in a hub
 * cache, the path of the same model's blobs/ (else NULL), to which its links lead, and which
 * several revisions share. Both are valid as long as dir. */
const char *ckpt_dir_real_path(const struct ckpt_dir *dir);
const char *ckpt_dir_hub_blobs(const struct ckpt_dir *dir);

/* A copy of `name` that lives as long as the directory of ckpt_dir_open; equal names share one.
 * NULL: no memory. Safe from many threads. */
const char *ckpt_dir_intern(struct ckpt_dir *dir, const char *name);

/* The identity of the entry `name`, "." for the directory itself. MISSING: it does not exist. */
int ckpt_dir_identify(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret,
                      struct ckpt_err *err);

/* Identifies a file as ckpt_dir_identify does; false if it does not exist or cannot be determined.
 */
bool ckpt_dir_stat(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret);

/* When the file was created, where the file system knows that; else 0. */
int64_t ckpt_dir_birth_ns(const struct ckpt_dir *dir, const char *name);

/* Probes treat every failure as "no". This returns the first failure in this directory or below it
 * that was not simply "does not exist" (permission denied, too many open files ...): -1 and *err,
 * else 0. */
int ckpt_dir_trouble(const struct ckpt_dir *dir, struct ckpt_err *err);

/* Fails likewise for the first link that leads out, which probes take for no file. */
int ckpt_dir_leaving(const struct ckpt_dir *dir, struct ckpt_err *err);

/* Is this error a normal answer about a name that leads nowhere? Other errors are trouble. */
bool ckpt_errno_is_answer(int errnum);

/* Open a regular file for reading (close-on-exec); *ret_fd is the caller's, and *ret (may be NULL)
 * describes it. In an archive, the descriptor and the identity are the archive's. An object is not
 * opened: *ret_fd is -1. */
int ckpt_dir_open_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err);

/* Finds a file likewise, but a directory that replays a recording does not open it yet: *ret_fd is
 * -1. */
int ckpt_dir_find_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_dir_found *ret, struct ckpt_err *err);

/* Fill iov[0..n) from `off` on with bytes of the object that had this size and ETag when it was
 * found. 1: bytes are missing (CKPT_READ_CACHED), or there is no room for them now
 * (CKPT_READ_PREFETCH). STALE: it has been replaced. */
int ckpt_dir_read_object(const struct ckpt_dir *dir, const char *name, const char *tag,
                         uint64_t size, const struct iovec *iov, int n, uint64_t off,
                         enum ckpt_read_how how, struct ckpt_err *err);

/* Read n runs (io/source.h) of such a file, in few requests; each must lie in the file. STALE: it
 * has changed. PEER: the machine that has it can't be reached. */
int ckpt_dir_read_elsewhere(const struct ckpt_dir *dir, const char *name,
                            const struct ckpt_source_run *run, size_t n, struct ckpt_err *err);

/* The first bytes of a far file, for which many probes ask: recall them, if they or all of a
 * shorter file were kept, and keep them, until ckpt_dir_refresh. */
bool ckpt_dir_recall_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap,
                          size_t *ret);
void ckpt_dir_keep_head(const struct ckpt_dir *dir, const char *name, const void *data, size_t len,
                        bool whole);

/* Makes a directory forget the lists and the first bytes of files that it keeps, so that the next
 * question looks again. Only far ones keep any. */
void ckpt_dir_refresh(const struct ckpt_dir *dir);

/* Begin to fetch, all at once, what every reader of a bucket's folder needs at first: the files
 * that describe others, and the first bytes of those of safetensors. Does nothing for others. */
void ckpt_dir_small_soon(const struct ckpt_dir *dir);

/* Read the first bytes of a file, at most cap; returns their number, 0 if it cannot be read. For
 * probes. */
size_t ckpt_dir_read_head(const struct ckpt_dir *dir, const char *name, void *buf, size_t cap);

/* A whole small file, NUL-terminated after *ret_len bytes. Longer than max_len is LIMIT. The caller
 * frees *ret_text. */
int ckpt_dir_read_file(const struct ckpt_dir *dir, const char *name, size_t max_len,
                       char **ret_text, size_t *ret_len, struct ckpt_err *err);

struct ckpt_entry {
    const char *name;
    enum ckpt_entry_kind kind; /* of the link's target, if it is a link that may be followed */
    bool is_link;
};

/* Is there such an entry (of that kind)? Any error counts as no. */
bool ckpt_dir_has_file(const struct ckpt_dir *dir, const char *name);
bool ckpt_dir_has_dir(const struct ckpt_dir *dir, const char *name);

/* Call fn for every entry except "." and "..", in natural order (ckpt_natural_cmp). `name` lives
 * until fn returns. Stops with fn's result when that is negative. */
typedef int ckpt_dir_entry_fn(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err);
int ckpt_dir_list(const struct ckpt_dir *dir, ckpt_dir_entry_fn *fn, void *ctx,
                  struct ckpt_err *err);

/* Keep an error that a probe would take for a no, for ckpt_dir_trouble. */
void ckpt_dir_keep_trouble(const struct ckpt_dir *dir, const struct ckpt_err *err);

/* ---- kinds of directories ---- */

/* Does a directory keep what is read of its files, or recall what was kept? (io/recording.h) */
enum ckpt_dir_memory { CKPT_DIR_FORGETS, CKPT_DIR_KEEPS, CKPT_DIR_RECALLS };

/* All functions are safe from many threads. `below` is a path from the root. */
struct ckpt_dir_ops {
    /* Find an entry. 0; an errno if there is none (EXDEV: a link leads out); or -1 and *err. */
    int (*look)(void *ctx, const char *below, struct ckpt_dir_found *ret, struct ckpt_err *err);
    /* Find likewise, and open it for reading. NULL: all files are in one (ckpt_dir_open_other). */
    int (*open)(void *ctx, const char *below, int *ret_fd, struct ckpt_dir_found *ret,
                struct ckpt_err *err);
    /* Append all entries to ret (ckpt_listed_add), as ckpt_dir_list has them. 0, an errno, or -1
     * and *err. */
    int (*list)(void *ctx, const char *below, struct ckpt_str *ret, struct ckpt_err *err);
    /* NULL: there is nothing to free. */
    void (*free)(void *ctx);
    /* ckpt_dir_read_object, and ckpt_dir_refresh. NULL: files have descriptors. */
    int (*read)(void *ctx, const char *below, const char *tag, uint64_t size,
                const struct iovec *iov, int n, uint64_t off, enum ckpt_read_how how,
                struct ckpt_err *err);
    void (*refresh)(void *ctx);
    /* These three are NULL if no file is elsewhere: ckpt_dir_elsewhere, ckpt_dir_read_elsewhere,
     * and ckpt_dir_holders. */
    const char *(*elsewhere)(void *ctx, const char *below);
    int (*read_elsewhere)(void *ctx, const char *below, const struct ckpt_source_run *run, size_t n,
                          struct ckpt_err *err);
    void (*holders)(void *ctx, const char *below, bool *ret, uint32_t n);
    /* ckpt_dir_is_everywhere: NULL, or the path of the first directory that lacks the folder. The
     * member may be NULL. */
    const char *(*lacks)(void *ctx, const char *below);

    /* ---- all of the following, or none if the directory forgets ---- */
    enum ckpt_dir_memory (*memory)(void *ctx);
    /* Keep bytes of a file that were read at `off`. */
    void (*keep)(void *ctx, const char *below, const struct iovec *iov, int n, uint64_t off);
    /* Fill iov from what was kept; false: that is not possible, and nothing was written. */
    bool (*recall)(void *ctx, const char *below, const struct iovec *iov, int n, uint64_t off);
    /* Replace the identity of an open file by the one that look and open give it. */
    void (*known_as)(void *ctx, const char *below, struct ckpt_file_id *id);
};

/* Entries one after the other: their kinds, and their names with a NUL. */
void ckpt_listed_add(struct ckpt_str *list, const struct ckpt_entry *e);
/* Get the entry at *at, and move *at behind it. False: the list ends, or is malformed. */
bool ckpt_listed_next(const char **at, const char *end, struct ckpt_entry *ret);

/* A directory of some kind: its functions, and the ctx that they get. */
struct ckpt_dir_way {
    const struct ckpt_dir_ops *ops;
    void *ctx;
};

/* The functions for folders of the file system; their ctx is a struct ckpt_below. */
extern const struct ckpt_dir_ops ckpt_folder_ops;

/* Make a directory of functions. On success it owns what they work on. `path` is shown to people.
 * All its files are ranges of the file `name` of folder (an archive); both must live as long. NULL:
 * they are not. */
int ckpt_dir_open_other(const char *path, struct ckpt_dir_way way, struct ckpt_dir *folder,
                        const char *name, struct ckpt_dir **ret, struct ckpt_err *err);

/* Let a directory of functions, which nobody else uses yet, have the storage and the far rule of
 * another one, which lives as long (NULL: of none), and its canonical path, or this one if it is
 * not NULL. */
int ckpt_dir_take_after(struct ckpt_dir *dir, const struct ckpt_dir *of, const char *path,
                        struct ckpt_err *err);

/* Replace the functions of a directory that nobody else uses yet. The new ones get the old ones,
 * and free them. */
struct ckpt_dir_way ckpt_dir_replace(struct ckpt_dir *dir, struct ckpt_dir_way way);

/* ckpt_dir_ops.memory and so on, for a file: of an archive, they are about the archive's bytes. */
enum ckpt_dir_memory ckpt_dir_memory(const struct ckpt_dir *dir);
void ckpt_dir_keep(const struct ckpt_dir *dir, const char *name, const struct iovec *iov, int n,
                   uint64_t off);
bool ckpt_dir_recall(const struct ckpt_dir *dir, const char *name, const struct iovec *iov, int n,
                     uint64_t off);
void ckpt_dir_known_as(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *id);
