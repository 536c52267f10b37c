/* SPDX-License-Identifier: Apache-2.0 */
/* What an unfinished export has brought to disk: DEST/.ckptfs-export, one JSON object a line, gone
 * when the export is done.
 *
 * The first line says of which bytes (the view's generation); a line is only written once what it
 * claims has been fsynced. */
#ifndef CKPT_FS_JOURNAL_H
#define CKPT_FS_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include <ckptfs/ckptfs.h>

extern const char ckpt_journal_name[];

struct ckpt_journal {
    int fd;           /* locked against a second export */
    json_t *complete; /* path -> {"size", "mtime_ns", "xxh3"} */
    json_t *partial;  /* path -> {"len", "xxh3"}: the first len bytes of the temporary file */
};

/* Open DEST's journal, or begin one if DEST has none. CONFLICT if it belongs to another source, or
 * to an export that is running. *ret_new: begun. */
int ckpt_journal_open(int dest, const char *source, struct ckpt_journal *ret, bool *ret_new,
                      struct ckpt_err *err);
void ckpt_journal_close(struct ckpt_journal *j);

/* Safe from many threads. */
int ckpt_journal_add_complete(const struct ckpt_journal *j, const char *path, uint64_t size,
                              int64_t mtime_ns, const char *xxh3, struct ckpt_err *err);
int ckpt_journal_add_partial(const struct ckpt_journal *j, const char *path, uint64_t len,
                             const char *xxh3, struct ckpt_err *err);

#endif
