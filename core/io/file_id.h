/* SPDX-License-Identifier: Apache-2.0 */
/* What identifies a file's content while we hold it; compared before every reply. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

struct statx;

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
