/* SPDX-License-Identifier: Apache-2.0 */
/* A temporary file without a name, for bytes that take long to make and are more than memory should
 * hold. It is made in a folder that the user has named, when it is first needed, and disappears
 * with the process.
 *
 * It never fills a disk: as much as ckpt_spill_leave says stays free. Safe from many threads. After
 * a fork only the process that made it uses it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/err.h"
#include "base/log.h"

struct ckpt_spill;

/* Name the folder (copied), in which nothing is made yet. The log gets a warning when there is no
 * file, or no room in it. Counted. */
int ckpt_spill_new(const char *folder, const struct ckpt_log *log, struct ckpt_spill **ret,
                   struct ckpt_err *err);
struct ckpt_spill *ckpt_spill_ref(struct ckpt_spill *s);
void ckpt_spill_unref(struct ckpt_spill *s); /* NULL is allowed */

/* Make the file now, for processes that can't later. */
int ckpt_spill_open(struct ckpt_spill *s, struct ckpt_err *err);

/* The folder that was named; borrowed. */
const char *ckpt_spill_folder(const struct ckpt_spill *s);

/* So many bytes of the filesystem are for others: the files of an export. Of several calls the
 * largest counts. */
void ckpt_spill_leave(struct ckpt_spill *s, uint64_t len);

/* Is the caller the process that uses the file? */
bool ckpt_spill_is_mine(const struct ckpt_spill *s);

/* Reserve room for len > 0 bytes. False: there is none, which a warning has said. */
bool ckpt_spill_take(struct ckpt_spill *s, uint64_t len, uint64_t *ret_off);

/* Give the room back to the filesystem. */
void ckpt_spill_give(struct ckpt_spill *s, uint64_t len, uint64_t off);

/* Write to reserved room. False: that was not possible, which a warning has said. */
bool ckpt_spill_write(struct ckpt_spill *s, const void *buf, size_t len, uint64_t off);

/* Read what was written; modifies iov. 1: with `cached`, not all of it is in the page cache. */
int ckpt_spill_read(struct ckpt_spill *s, struct iovec *iov, int n, uint64_t off, bool cached,
                    struct ckpt_err *err);
