/* SPDX-License-Identifier: Apache-2.0 */
/* This module knows what of an unfinished export is on disk, by the journals of all processes.
 *
 * Three kinds of lines say something of a file, each with a hash of the bytes that it means, and
 * each is written only after these bytes have been fsynced:
 *     {"file", "len", "mtime_ns", "xxh3"}            mtime_ns not 0: the file is whole, under its
 * name
 *     {"file", "len", "mtime_ns": 0, "xxh3"}         the first len bytes, in the temporary file
 *     {"file", "from", "len", "xxh3"}                one unit of a file that several write
 * A fourth one is of reading such a file back:
 *     {"file", "hashed", "state"}                    the first `hashed` bytes, as a state of XXH3
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>
#include <xxhash.h>

#include "base/vec.h"
#include "tool/export/spans.h"
#include "tool/items.h"

struct ckpt_prefix {
    uint64_t len;
    XXH128_hash_t hash;
};

struct ckpt_file_done {
    bool whole; /* with the hash below; its time of modification was mtime_ns */
    bool has_units;
    int64_t mtime_ns;
    XXH128_hash_t hash;
    CKPT_VEC(struct ckpt_prefix) prefix;
    uint64_t hashed; /* so many bytes have been read back */
    char *state;     /* of their hash, in hexadecimal digits; NULL: none have */
};

struct ckpt_unit_done {
    bool is;
    XXH128_hash_t hash;
};

struct ckpt_done {
    const struct ckpt_items *items; /* borrowed, as the spans */
    const struct ckpt_spans *spans;
    json_t *index; /* path -> the item's number */
    struct ckpt_file_done *file;
    struct ckpt_unit_done *unit;
};

/* Begin with nothing. Release also after a failure. */
int ckpt_done_init(struct ckpt_done *ret, const struct ckpt_items *items,
                   const struct ckpt_spans *spans, struct ckpt_err *err);
void ckpt_done_release(struct ckpt_done *d);

/* Take a line of a journal; lines that say nothing of these items are left out. */
int ckpt_done_take(struct ckpt_done *d, const json_t *line, struct ckpt_err *err);

/* Forget what is known of a file. */
void ckpt_done_forget(struct ckpt_done *d, size_t item);

/* Is anything on disk? */
bool ckpt_done_any(const struct ckpt_done *d);

/* Is the unit on disk? */
bool ckpt_done_has(const struct ckpt_done *d, size_t item, size_t unit);

/* Are all units of the file on disk? */
bool ckpt_done_has_all(const struct ckpt_done *d, size_t item);

/* Lines for the journal; NULL: no memory. */
json_t *ckpt_done_line(const char *path, uint64_t len, int64_t mtime_ns, const XXH128_hash_t *hash);
json_t *ckpt_done_unit_line(const char *path, uint64_t from, uint64_t len,
                            const XXH128_hash_t *hash);
