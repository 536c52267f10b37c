/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's shard files: one safetensors file per parameter and shard, below model/. There is no
 * manifest, so the tree is scanned, and the files' names say what they are.
 *
 *     find: directories -> shards, grouped by parameter
 *     select: the shards of one topology (nanotron_topology.h)
 *     read: their headers, in parallel */
#ifndef CKPT_CKPT_NANOTRON_SHARDS_H
#define CKPT_CKPT_NANOTRON_SHARDS_H

#include "base/mem.h"
#include "base/vec.h"
#include "ckpt/nanotron_name.h"
#include "ckpt/nanotron_slices.h"
#include "ckpt/nanotron_topology.h"
#include "ckpt/reader.h"
#include "io/source.h"

enum { CKPT_NT_MAX_VERSION = 16 };

struct ckpt_nt_shard {
    const char *file; /* name in its directory */
    struct ckpt_nt_name name;
    uint32_t folder;
    uint32_t param;
    /* from its header */
    struct ckpt_source *source;
    uint64_t *dim; /* of the whole parameter */
    uint64_t *local_dim;
    struct ckpt_nt_pair *pair;
    size_t npair;
    uint64_t off; /* of the data */
    uint32_t rank;
    enum ckpt_dtype dtype;
    char version[CKPT_NT_MAX_VERSION]; /* of the writer; "" where the file does not say (plain ones
                                          never do) */
};

struct ckpt_nt_param {
    const char *name; /* dotted */
    size_t first, n;  /* its shards */
};

struct ckpt_nt_subdir {
    char *name;
    bool linked;
};

struct ckpt_nt_folder {
    struct ckpt_dir *dir;
    const char *path; /* dotted, below model/ */
    uint32_t parent;
    unsigned depth;
    bool linked; /* it, or one that it lies in, was reached by a link */
    /* what listing it found */
    CKPT_VEC(struct ckpt_nt_subdir) subdirs;
    CKPT_VEC(char *) files;
};

/* Begin with all zero, and a directory and options that outlive it. */
struct ckpt_nt_shards {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    CKPT_VEC(struct ckpt_nt_shard) shards; /* by parameter, then by rank */
    CKPT_VEC(struct ckpt_nt_param) params;
    /* of the scan */
    struct ckpt_arena names; /* of files, folders and parameters */
    CKPT_VEC(struct ckpt_nt_folder) folders;
    size_t nlinked; /* of them */
};

void ckpt_nt_shards_release(struct ckpt_nt_shards *set);

/* All shards below dir's model/, by their names. MISSING if there are none. */
int ckpt_nt_shards_find(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                        struct ckpt_nt_shards *ret, struct ckpt_err *err);

/* Leave out the shards of other topologies. A parameter that then has none, or plain and sharded
 * files, is refused: never mixed. */
int ckpt_nt_shards_select(struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                          struct ckpt_err *err);

/* Read their headers. */
int ckpt_nt_shards_read(struct ckpt_nt_shards *set, struct ckpt_err *err);

struct ckpt_dir *ckpt_nt_shard_dir(const struct ckpt_nt_shards *set, const struct ckpt_nt_shard *s);

#endif
