/* SPDX-License-Identifier: Apache-2.0 */
/* The index of an archive: a tree of names with the bytes of each file. It is filled while the
 * archive's headers are read, then sealed, and immutable from then on. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "io/dir.h"

enum {
    CKPT_ARCHIVE_MAX_MEMBERS = 1 << 22, /* files and folders of one archive */
    CKPT_ARCHIVE_MAX_NAME = 4096        /* bytes of a path, and of a link's target */
};

struct ckpt_archive_index;

struct ckpt_member {
    enum ckpt_entry_kind kind;
    uint64_t off, len; /* of a file's bytes in the archive */
    uint32_t number;   /* of the entry in the index; 0: the archive itself */
};

/* An empty index. */
int ckpt_archive_index_new(struct ckpt_archive_index **ret, struct ckpt_err *err);
void ckpt_archive_index_free(struct ckpt_archive_index *m);
CKPT_CLEANUP_BY(ckpt_archive_index_free, struct ckpt_archive_index)

/* Add an entry under the path name[0..name_len); the folders above it are added too. Of two files
 * with one name the second one counts, and a "/" in front is ignored, as when the archive is
 * unpacked. FORMAT: the path has a "..", or an entry would be a file and a folder. what->number is
 * ignored. */
int ckpt_archive_index_add(struct ckpt_archive_index *m, const char *name, size_t name_len,
                           const struct ckpt_member *what, struct ckpt_err *err);

/* Add a symbolic link (which is resolved when it is looked up), or another name of a file that was
 * added before (FORMAT: there is no such file). */
int ckpt_archive_index_add_link(struct ckpt_archive_index *m, const char *name, size_t name_len,
                                const char *target, struct ckpt_err *err);
int ckpt_archive_index_add_same(struct ckpt_archive_index *m, const char *name, size_t name_len,
                                const char *as, struct ckpt_err *err);

/* Sort the entries of all folders. Must be called once, after the last entry was added. */
int ckpt_archive_index_seal(struct ckpt_archive_index *m, struct ckpt_err *err);

/* ---- an archive as a directory ---- */

struct ckpt_recording;

/* Read the index of the archive `name` in folder, and the identity that the archive has.
 * *ret_index is sealed; the caller frees it. */
typedef int ckpt_archive_reader(struct ckpt_dir *folder, const char *name,
                                struct ckpt_archive_index **ret_index, struct ckpt_file_id *ret_id,
                                struct ckpt_err *err);

/* Open the archive at `path`, whose file is far as these options say. rec may be NULL; it is used
 * as by ckpt_dir_use, the index included: a recording has the archive as one file, in the folder
 * that it lies in. */
int ckpt_dir_open_archive(const char *path, ckpt_archive_reader *reader,
                          const struct ckpt_far_options *far, struct ckpt_recording *rec,
                          struct ckpt_dir **ret, struct ckpt_err *err);
