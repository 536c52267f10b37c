/* SPDX-License-Identifier: Apache-2.0 */
/* The listing of a directory: all files and folders below it, with their identities, as bytes that
 * are sent to other ranks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "container/archive.h"
#include "io/cursor.h"
#include "io/dir.h"

/* The path of a node's directory: {rank} and {node} in what was given are replaced by numbers. */
int ckpt_listing_path(const char *given, uint32_t rank, uint32_t node, char **ret,
                      struct ckpt_err *err);

/* Open a node's directory. USAGE: it is a file. MISSING: the node has none. */
int ckpt_listing_open(const char *path, const struct ckpt_access *how, struct ckpt_dir **ret,
                      struct ckpt_err *err);

/* The error of a node's directory, as the functions of a directory return it (ckpt_dir_ops). */
int ckpt_listing_errno(struct ckpt_err *own, struct ckpt_err *err);

/* An entry: its path below the directory ("." is the directory itself). */
struct ckpt_seen {
    const char *path;
    enum ckpt_entry_kind kind;
    bool is_link;
    struct ckpt_file_id id;
};

/* Append the listing of a directory. Folders that links lead to are listed, too. LIMIT: it has more
 * than a million entries, or folders 32 deep. */
int ckpt_listing_read(struct ckpt_dir *dir, struct ckpt_str *out, struct ckpt_err *err);

/* Append one entry. */
void ckpt_seen_put(struct ckpt_str *out, const struct ckpt_seen *e);

/* Get the next entry; its path is borrowed from the bytes. 1; 0: there are no more; FORMAT. */
int ckpt_seen_get(struct ckpt_cursor *c, struct ckpt_seen *ret, struct ckpt_err *err);

/* A hash of paths, and of the sizes and times of files: machines that share a directory get equal
 * ones. FORMAT. */
int ckpt_listing_digest(const void *data, size_t len, uint64_t *ret, struct ckpt_err *err);
