/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron's shard files: one safetensors file per parameter and shard, below model/. There is no
 * manifest, so the tree is scanned, and the files' names say what they are.
 *
 *     find: directories -> shards, grouped by parameter
 *     select: the shards of one topology (ckpt_nt_topology_choose chooses it)
 *     read: their headers, in parallel */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/pieces.h"
#include "format/reader.h"
#include "io/source.h"
#include "tensor/box.h"

/* ---- names of files ---- */

/* File names of nanotron's weights (nanotron/serialize/utils.py):
 *
 *     model_LEAF.safetensors
 *     model_LEAF_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *     model_model_LEAF.safetensors_pp-rank-P-of-PP_tp-rank-T-of-TP[_exp-rank-E-of-EP].safetensors
 *
 * The last form was written by the code of 2024-03-06 to 2024-04-25 (versions 1.2 and 1.3), for
 * sharded files only. It is also accepted without the suffix at its end. */

struct ckpt_nt_rank {
    uint32_t rank, size;
};

struct ckpt_nt_name {
    const char *leaf; /* a part of the name */
    size_t leaf_len;
    bool sharded;
    bool has_ep;
    bool broken; /* the name has the last form */
    struct ckpt_nt_rank pp, tp, ep;
};

/* The number of ranks of each kind in a save. */
struct ckpt_nt_topology {
    uint32_t pp, tp, ep; /* ep 0: no file name has an expert rank */
};

/* Parse a name; false if it is not a weight's. */
bool ckpt_nt_name_parse(const char *name, struct ckpt_nt_name *ret);

/* Parse "_tp-rank-3-of-8", where the axis is "tp" and the separator "-rank-", and move *s past it.
 * False: the text is different, or the rank is not less than its size. */
bool ckpt_nt_take_rank(const char **s, const char *axis, const char *separator,
                       struct ckpt_nt_rank *ret);

/* The topology of the save that a sharded file belongs to, by its name. */
struct ckpt_nt_topology ckpt_nt_name_topology(const struct ckpt_nt_name *name);

/* Can both be of one save? A number that is 0 matches any, as that of files without an expert rank.
 */
bool ckpt_nt_topology_fits(const struct ckpt_nt_topology *a, const struct ckpt_nt_topology *b);

/* ---- slices ---- */

/* The metadata of a sharded nanotron file: which slices of the file's tensor correspond to which
 * slices of the whole parameter.
 *
 *     local_global_slices_pairs   "0,16,None|None,None,None#16,32,None|None,None,None;..." pairs of
 * local # global slices unsharded_shape             "(64, 32)", "(64,)", and with NumPy 2
 * "(np.int64(64), 32)"
 *
 * Written by nanotron/serialize/metadata.py; a slice is start,stop,step with Python's None for the
 * whole. */

/* A parameter has at most this many chunks (qkv has three). */
enum { CKPT_NT_MAX_PAIRS = 4096 };

/* Parse a tuple of sizes. */
int ckpt_nt_shape_parse(const char *text, uint64_t *ret_dim, uint32_t *ret_rank,
                        struct ckpt_err *err);

/* Parse the pairs for a file of shape local_dim and a parameter of shape dim, both of this rank.
 * The two slices of a pair must have equal extents and be inside their shapes. *ret_pairs is
 * malloc'ed. */
int ckpt_nt_pairs_parse(const char *text, const uint64_t *local_dim, const uint64_t *dim,
                        uint32_t rank, struct ckpt_box_pair **ret_pairs, size_t *ret_n,
                        struct ckpt_err *err);

/* Is version `text` ("1.4") newer than 1.5, the newest known version? FORMAT: it is not integers
 * separated by dots. */
int ckpt_nt_version_check(const char *text, struct ckpt_err *err);

/* ---- ZeRO-1 ----
 *
 * Each data-parallel rank keeps the optimizer's states of one interval of every parameter, which is
 * the parameter's part on a tensor-parallel rank, flattened in row-major order. The intervals
 * follow each other in the order of the ranks and cover the parameter (nanotron/optim/zero.py). */

/* Elements [lo, hi). */
struct ckpt_nt_interval {
    uint64_t lo, hi;
};

/* The interval of one rank when numel elements are divided evenly; the first ranks get one more. */
struct ckpt_nt_interval ckpt_nt_zero_share(uint64_t numel, uint32_t rank, uint32_t size);

/* Get the interval of one rank from `offsets` if it lists the parameter, else as ckpt_nt_zero_share
 * does. `offsets` is the object param_name_to_dp_rank_offsets in optimizer_config.json, {PARAM:
 * {"0": ["0", "118"], ...}}, which the first pipeline stage writes for its own parameters; NULL:
 * not available. CONFLICT: the rank is not listed. FORMAT: the entry is not an interval of the
 * parameter. */
int ckpt_nt_zero_interval(const json_t *offsets, const char *param, uint64_t numel, uint32_t rank,
                          uint32_t size, struct ckpt_nt_interval *ret, struct ckpt_err *err);

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
    struct ckpt_box_pair *pair;
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
