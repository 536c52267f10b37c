/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's shard files: one safetensors file per parameter and shard, below model/. There is no
 * manifest, so the tree is scanned, and the files' names say what they are.
 *
 *     find: directories -> shards, grouped by parameter
 *     select: the shards of one topology (ckpt_nt_topology_choose chooses it)
 *     read: their headers, in parallel */
#pragma once

#include "base/json.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/nanotron/name.h"
#include "format/nanotron/slices.h"
#include "format/reader.h"
#include "io/source.h"

enum { CKPT_NT_MAX_VERSION = 16 };

struct ckpt_nt_shard {
    const char *file; /* file name in its directory */
    struct ckpt_nt_name name;
    uint32_t folder;
    uint32_t param;
    /* from its header */
    struct ckpt_source *source;
    uint64_t *dim; /* shape of the whole parameter */
    uint64_t *local_dim;
    struct ckpt_nt_pair *pair;
    size_t npair;
    uint64_t off; /* offset of the data */
    uint32_t rank;
    enum ckpt_dtype dtype;
    char version[CKPT_NT_MAX_VERSION]; /* version of the writer; "" if the file does not say it, as
                                          unsharded files never do */
};

struct ckpt_nt_param {
    const char *name; /* dotted */
    size_t first, n;  /* its range in `shards` */
};

struct ckpt_nt_subdir {
    const char *name;
    bool linked;
};

struct ckpt_nt_folder {
    struct ckpt_dir *dir;
    const char *path; /* path below model/, with dots */
    uint32_t parent;
    unsigned depth;
    bool linked; /* this directory, or one that contains it, is a symbolic link */
    /* the result of listing the directory */
    CKPT_VEC(struct ckpt_nt_subdir) subdirs;
    CKPT_VEC(const char *) files;
};

/* Initialise with all zero. dir and options must outlive it. */
struct ckpt_nt_shards {
    struct ckpt_dir *dir;
    const struct ckpt_reader_options *opt;
    CKPT_VEC(struct ckpt_nt_shard) shards; /* sorted by parameter, then by rank */
    CKPT_VEC(struct ckpt_nt_param) params;
    /* only during the scan */
    struct ckpt_arena names; /* names of folders and parameters */
    CKPT_VEC(struct ckpt_nt_folder) folders;
    size_t nlinked; /* number of linked ones */
};

/* Free everything that was found and read. */
void ckpt_nt_shards_release(struct ckpt_nt_shards *set);

/* Find all shards below dir's model/ by their names. MISSING: there are none. */
int ckpt_nt_shards_find(struct ckpt_dir *dir, const struct ckpt_reader_options *opt,
                        struct ckpt_nt_shards *ret, struct ckpt_err *err);

/* Choose the topology that `meta` (checkpoint_metadata.json) and `config` (config.yaml; both may be
 * NULL) describe, with a warning in cat if the shards are of several topologies. All zero: no
 * shard's name has a topology. CONFLICT: meta and config do not say which one. */
int ckpt_nt_topology_choose(const struct ckpt_nt_shards *set, const json_t *meta,
                            const json_t *config, struct ckpt_catalog *cat,
                            struct ckpt_nt_topology *ret, struct ckpt_err *err);

/* Drop the shards of other topologies. It is an error if a parameter then has no shard, or has both
 * sharded and unsharded files. */
int ckpt_nt_shards_select(struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                          struct ckpt_err *err);

/* Read the headers of all shards. */
int ckpt_nt_shards_read(struct ckpt_nt_shards *set, struct ckpt_err *err);

/* The directory with the shard's file. Borrowed from the set. */
struct ckpt_dir *ckpt_nt_shard_dir(const struct ckpt_nt_shards *set, const struct ckpt_nt_shard *s);

/* ---- states ---- */

/* nanotron's optimizer states (nanotron/serialize/optimizer.py):
 *
 *     optimizer/optimizer_pp-P-of-PP[_dp-D-of-DP]_tp-T-of-TP[_exp-E-of-EP].pt
 *
 * Each file holds, for the parameters of these ranks, tensors of the parameter's local shape, or
 * with ZeRO-1 (dp) of an interval of it (format/nanotron/slices.h). The parameter's own file says
 * which slice of the whole parameter that is. In the catalogue they are
 * optimizer.state.PARAMETER.KEY and optimizer.gradient_accumulator.PARAMETER (the parameters in
 * F32). */

/* Add all optimizer states of the save to the catalogue: of the parameters in `set`, which is of
 * this topology (0: any). Those that cannot be read are left out, with a warning. */
int ckpt_nt_states_add(const struct ckpt_nt_shards *set, const struct ckpt_nt_topology *t,
                       struct ckpt_catalog *cat, struct ckpt_err *err);
