/* SPDX-License-Identifier: Apache-2.0 */
/* A directory that we were given, and the only way to files below it. It may be an archive, too.
 *
 * Names that come out of a checkpoint are resolved beneath this directory: absolute names and ".."
 * are refused, symbolic links are followed only as the policy says, and what is opened must be a
 * regular file (a FIFO, a device or a directory is an error, never a hang). Counted: a catalogue,
 * its sources and several threads share one. */
#ifndef CKPT_IO_DIR_H
#define CKPT_IO_DIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "io/below.h"
#include "io/file_id.h"
#include "io/recording.h"

struct ckpt_dir;

/* The bytes of a file in the file that is opened for it: all of them, or a part of an archive. */
struct ckpt_extent {
    uint64_t off, len;
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

/* As ckpt_dir_open_below, but without accessing it, for the name of a directory in a listing of
 * dir. An error is found when it is used. */
int ckpt_dir_listed_below(struct ckpt_dir *dir, const char *name, struct ckpt_dir **ret,
                          struct ckpt_err *err);

/* As ckpt_dir_open, for the way to one file: the directory itself may be unreadable, it can't be
 * listed, and links lead anywhere. */
int ckpt_dir_open_passage(const char *path, struct ckpt_dir **ret, struct ckpt_err *err);

/* Count a reference (NULL is allowed); give one back; the same for ckpt_cleanup. The last one
 * closes the directory. */
struct ckpt_dir *ckpt_dir_ref(struct ckpt_dir *dir);
void ckpt_dir_unref(struct ckpt_dir *dir);
void ckpt_dir_unrefp(struct ckpt_dir **dir);

/* Record what the directory of ckpt_dir_open answers, or answer from a recording; to be called
 * right after ckpt_dir_open, and for several directories in the same order on all sides. NULL:
 * neither. It does nothing to a directory of ckpt_dir_open_other. */
void ckpt_dir_use(struct ckpt_dir *dir, struct ckpt_recording *rec);

/* The same for a directory of ckpt_dir_open_other: the file `name` of folder has the bytes of all
 * its files. They are recorded, or replayed, as that file's, if there is a recording of folder. */
int ckpt_dir_use_within(struct ckpt_dir *dir, const struct ckpt_dir *folder, const char *name,
                        struct ckpt_err *err);

/* Does a recording of this directory run? */
bool ckpt_dir_records(const struct ckpt_dir *dir);

/* Where a recording has the entry `name`; of an archive: where it has the archive, whatever the
 * name. The caller frees *ret_path, which ret->path points to. ret->rec is NULL if there is no
 * recording, or no memory. */
void ckpt_dir_place(const struct ckpt_dir *dir, const char *name, struct ckpt_place *ret,
                    char **ret_path);

/* A regular file as a replay has it; false: it has none of that name, or there is no replay. The
 * extent is that of the file's bytes in the file of ckpt_dir_place. */
bool ckpt_dir_replay_file(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret_id,
                          struct ckpt_extent *ret_extent);

/* Describe an entry: a replay's answer, or the real one, which is recorded. */
int ckpt_dir_look(const struct ckpt_dir *dir, const char *name, struct ckpt_look *ret,
                  struct ckpt_err *err);

/* The path as the user gave it, with the names of subdirectories appended; for messages. Lives as
 * long as dir. */
const char *ckpt_dir_path(const struct ckpt_dir *dir);

/* The name of the directory of ckpt_dir_open: the last component of its path after resolving links.
 * Valid as long as dir. */
const char *ckpt_dir_real_name(const struct ckpt_dir *dir);

/* The path of the directory of ckpt_dir_open after resolving links; and, for a snapshot in a hub
 * cache, the path of the same model's blobs/ (else NULL). Both are valid as long as dir. */
const char *ckpt_dir_real_path(const struct ckpt_dir *dir);
const char *ckpt_dir_hub_blobs(const struct ckpt_dir *dir);

/* A copy of `name` that lives as long as the directory of ckpt_dir_open; equal names share one.
 * NULL: no memory. Safe from many threads. */
const char *ckpt_dir_intern(struct ckpt_dir *dir, const char *name);

/* The identity of the entry `name`, "." for the directory itself. MISSING: it does not exist. */
int ckpt_dir_identify(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret,
                      struct ckpt_err *err);

/* As ckpt_dir_identify; false if it does not exist or cannot be determined. */
bool ckpt_dir_stat(const struct ckpt_dir *dir, const char *name, struct ckpt_file_id *ret);

/* When the file was created, where the file system knows that; else 0. */
int64_t ckpt_dir_birth_ns(const struct ckpt_dir *dir, const char *name);

/* A snapshot of a hub cache: its links lead to blobs that several revisions share. */
bool ckpt_dir_in_hub(const struct ckpt_dir *dir);

/* Probes treat every failure as "no". This returns the first failure in this directory or below it
 * that was not simply "does not exist" (permission denied, too many open files ...): -1 and *err,
 * else 0. */
int ckpt_dir_trouble(const struct ckpt_dir *dir, struct ckpt_err *err);

/* The same for the first link that leads out, which probes take for no file. */
int ckpt_dir_leaving(const struct ckpt_dir *dir, struct ckpt_err *err);

/* As ckpt_fail_errno of "what 'dir/name'" (name may be NULL); keeps trouble for ckpt_dir_trouble.
 */
int ckpt_dir_fail(const struct ckpt_dir *dir, int errnum, const char *what, const char *name,
                  struct ckpt_err *err);

/* Open the directory itself, to list it; or a file by its path below the directory of
 * ckpt_dir_open. *ret_fd is the caller's. */
int ckpt_dir_open_itself(const struct ckpt_dir *dir, int *ret_fd, struct ckpt_err *err);
int ckpt_dir_open_from_root(const struct ckpt_dir *dir, const char *path, int *ret_fd);

/* Open a regular file for reading (close-on-exec), never from a replay; *ret_fd is the caller's. In
 * an archive, the descriptor and the identity are the archive's. ret_id and ret_extent may be NULL.
 */
int ckpt_dir_open_file(const struct ckpt_dir *dir, const char *name, int *ret_fd,
                       struct ckpt_file_id *ret_id, struct ckpt_extent *ret_extent,
                       struct ckpt_err *err);

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
int ckpt_dir_list(const struct ckpt_dir *dir,
                  int (*fn)(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                  void *ctx, struct ckpt_err *err);

/* ---- directories that are no folders of the file system ---- */

struct ckpt_dir_found {
    enum ckpt_entry_kind kind;
    struct ckpt_file_id id; /* a file's: of what `open` opens; differs between folders */
    struct ckpt_extent extent;
};

/* All functions are safe from many threads. `below` is a path from the root. */
struct ckpt_dir_ops {
    /* Find an entry. 0; an errno if there is none (EXDEV: a link leads out); or -1 and *err. */
    int (*look)(void *ctx, const char *below, struct ckpt_dir_found *ret, struct ckpt_err *err);
    /* Open the file that has the bytes of all files. */
    int (*open)(void *ctx, int *ret_fd, struct ckpt_file_id *ret_id, struct ckpt_err *err);
    /* As ckpt_dir_list. */
    int (*list)(void *ctx, const char *below,
                int (*fn)(void *fn_ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                void *fn_ctx, struct ckpt_err *err);
    void (*free)(void *ctx);
};

/* True: the directory is one of functions, and has been listed by them with the result *ret_rc. */
bool ckpt_dir_list_other(const struct ckpt_dir *dir,
                         int (*fn)(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err),
                         void *ctx, int *ret_rc, struct ckpt_err *err);

/* Make a directory of functions. On success it owns ctx. `path` is shown to people, `real` is its
 * canonical path. */
int ckpt_dir_open_other(const char *path, const char *real, const struct ckpt_dir_ops *ops,
                        void *ctx, struct ckpt_dir **ret, struct ckpt_err *err);

#endif
