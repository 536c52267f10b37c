/* SPDX-License-Identifier: Apache-2.0 */
/* OCDBT, tensorstore's database of keys and values in files (its page "ocdbt Key-Value Store
 * driver" defines the format): manifest.ocdbt names the root of a B+tree, whose nodes lie in data
 * files, and whose leaves hold small values and say where the others lie.
 *
 * All keys of the newest version are read at once. Nodes are read whole, and their checksums are
 * compared; values are not read. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"

#define CKPT_OCDBT_MANIFEST "manifest.ocdbt"

/* Opens a file by its path in the database: *ret is new. */
typedef int ckpt_ocdbt_open_fn(void *ctx, const char *path, struct ckpt_source **ret,
                               struct ckpt_err *err);

/* The place of a key's value. */
struct ckpt_ocdbt_value {
    const char *key; /* without a NUL in it */
    struct ckpt_source *source;
    uint64_t off, len; /* in the source, which has them */
};

struct ckpt_ocdbt_file {
    const char *path;
    struct ckpt_source *source;
};

/* A database of which all keys are known. All zero: there is none. */
struct ckpt_ocdbt {
    struct ckpt_arena arena;                  /* keys and paths */
    CKPT_VEC(struct ckpt_ocdbt_value) values; /* ascending by key */
    CKPT_VEC(struct ckpt_ocdbt_file) files;   /* that were opened; their sources are referenced */
    struct ckpt_source *small; /* values that the nodes hold, one behind the other; or NULL */
    uint64_t generation;       /* of the version; 0: the database has none, and no keys */
};

/* Read the keys of the newest version. *ret is all zero before. On failure it is only good for
 * release. FORMAT, UNSUPPORTED and LIMIT name the file and the byte of the node. */
int ckpt_ocdbt_read(ckpt_ocdbt_open_fn *open, void *ctx, struct ckpt_ocdbt *ret,
                    struct ckpt_err *err);

/* Free it, and give back its sources. */
void ckpt_ocdbt_release(struct ckpt_ocdbt *db);

/* The first key that is not less than `key`, as an index of values; values.len: there is none. */
size_t ckpt_ocdbt_at_least(const struct ckpt_ocdbt *db, const char *key);

/* The value of this key, or NULL. */
const struct ckpt_ocdbt_value *ckpt_ocdbt_find(const struct ckpt_ocdbt *db, const char *key);
