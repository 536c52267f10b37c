/* SPDX-License-Identifier: Apache-2.0 */
/* The journal of an unfinished export, DEST/.ckptfs-export: a record of what is on disk, one JSON
 * object per line, deleted when the export is finished. The first line identifies the view's bytes
 * by its generation. A line is written only after the data that it describes has been fsynced. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include <ckptfs/ckptfs.h>

/* The journal's file name. */
extern const char ckpt_journal_name[];

struct ckpt_journal {
    FILE *file;   /* locked so that no second export can use it; NULL: not open */
    json_t *line; /* path -> its last line, {"file", "len", "mtime_ns", "xxh3"} */
};

/* Open the journal of DEST, or create it (*ret_new is then true). CONFLICT: the journal belongs to
 * another source, or to an export that is still running. */
int ckpt_journal_open(int dest, const char *source, struct ckpt_journal *ret, bool *ret_new,
                      struct ckpt_err *err);
void ckpt_journal_close(struct ckpt_journal *j);

/* Record that the first len bytes of a file are on disk, with their hash: under its own name, with
 * this time of modification, or (mtime_ns is 0) in its temporary file. Safe from many threads. */
int ckpt_journal_add(const struct ckpt_journal *j, const char *path, uint64_t len, int64_t mtime_ns,
                     const char *xxh3, struct ckpt_err *err);
