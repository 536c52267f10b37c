/* SPDX-License-Identifier: Apache-2.0 */
/* The roster of a checkpoint that no rank has as a whole: all files and folders of all ranks, and
 * for each which ranks have it. Rank 0 merges the ranks' listings, and all ranks get the result. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "load/local/listing.h"

/* Who has a file. The number stands for all ranks that have sent the same listing: it is that of
 * the first of them. */
struct ckpt_holder {
    uint32_t rank;
    uint32_t is_copy; /* 1: its size is that of the first holder's file, but its times are not */
};

/* A file or folder. What several ranks have is that of the first of them; a folder is as new as the
 * newest of them. */
struct ckpt_roster_entry {
    struct ckpt_seen is;
    size_t name;              /* where in the path its name begins */
    uint32_t nholder, holder; /* holder: index of the first in the roster's list */
    uint32_t differs; /* a rank that has something else by this name, or other bytes; CKPT_NONE:
                         there is none */
};

struct ckpt_roster {
    CKPT_VEC(struct ckpt_roster_entry) entry; /* by folder, then as ckpt_dir_list has them */
    CKPT_VEC(struct ckpt_holder) holder;
    struct ckpt_arena arena;
};

/* Merge the listings of n ranks: data[r], len[r]; a rank may have none. Appends the roster's bytes.
 */
int ckpt_roster_merge(const unsigned char *const *data, const size_t *len, uint32_t n,
                      struct ckpt_str *out, struct ckpt_err *err);

/* Decode these bytes. ret is zeroed before; released after a failure, too. FORMAT. */
int ckpt_roster_decode(const void *data, size_t len, uint32_t nrank, struct ckpt_roster *ret,
                       struct ckpt_err *err);
void ckpt_roster_release(struct ckpt_roster *r);

/* The entry with this path; NULL: no rank has it. */
const struct ckpt_roster_entry *ckpt_roster_find(const struct ckpt_roster *r, const char *path);

/* Append the entries of a folder to a list (ckpt_listed_add). 0, ENOENT or ENOTDIR. */
int ckpt_roster_list(const struct ckpt_roster *r, const char *path, struct ckpt_str *list);

/* Does a rank that has sent this listing have the entry? */
bool ckpt_roster_has(const struct ckpt_roster *r, const struct ckpt_roster_entry *e, uint32_t rank);
