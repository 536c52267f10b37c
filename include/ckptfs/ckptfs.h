/* SPDX-License-Identifier: Apache-2.0 */
/* libckptfs: sharded training checkpoints as Hugging Face models.
 *
 *     ckpt_run_open -> ckpt_run_view -> ckpt_node_* / ckpt_node_pread, ckpt_view_tensor_*
 *
 * A run is what the user names: one checkpoint, or a folder of them (steps). A view is one
 * checkpoint laid out as a Hugging Face model directory: a tree of virtual files. All functions
 * return 0, or -1 with *err filled, unless they say otherwise, and are safe from many threads on
 * the same object. No FUSE, MPI, CUDA or JSON type appears here. */
#ifndef CKPTFS_CKPTFS_H
#define CKPTFS_CKPTFS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0" */
CKPT_PUBLIC const char *ckpt_version(void);

/* ---- options: the same words for the mount's -o, the tool's -o and this library ---- */

struct ckpt_options;

CKPT_PUBLIC int ckpt_options_new(struct ckpt_options **ret, struct ckpt_err *err);
CKPT_PUBLIC void ckpt_options_free(struct ckpt_options *opt);

/* Set one: base, dtype, view, max_shard_size, recipe, rope, allow_partial, allow_mixed,
 * allow_leftover, follow_symlinks ..., or a
 * number of the model in the HF config's spelling (num_attention_heads). value is NULL for a bare
 * word. USAGE for a value that is not understood. */
CKPT_PUBLIC int ckpt_options_set(struct ckpt_options *opt, const char *key, const char *value,
                                 struct ckpt_err *err);

/* Does ckpt_options_set know the key? (A mount program keeps other words for FUSE.) */
CKPT_PUBLIC bool ckpt_options_knows(const char *key);

enum ckpt_log_severity { CKPT_ERROR, CKPT_WARNING, CKPT_INFO, CKPT_DEBUG };

/* Where remarks go: one line each, from any thread. Default: nowhere. */
CKPT_PUBLIC void ckpt_options_set_log(struct ckpt_options *opt,
                                      void (*line)(void *ctx, enum ckpt_log_severity severity,
                                                   const char *text),
                                      void *ctx);

/* For programs that confine themselves before they read a checkpoint: call `visit` with the
 * absolute path, without links, of each file and directory below which views of the run at `path`
 * with these options are read. These are the run (if it is not there yet, the folder in which it
 * may appear), the base, and recipes and mappings from files; with follow_symlinks also where links
 * in the run and the base lead now, for which both are walked. `visit` returns 0 to go on, else the
 * call ends with -1. */
CKPT_PUBLIC int ckpt_options_places(const struct ckpt_options *opt, const char *path,
                                    int (*visit)(void *ctx, const char *place), void *ctx,
                                    struct ckpt_err *err);

/* ---- runs ---- */

struct ckpt_run;
struct ckpt_view;

/* Look at `path` (copied): names only, no shard is opened. MISSING if it is neither a checkpoint
 * nor a folder with at least one. The options are copied. */
CKPT_PUBLIC int ckpt_run_open(const char *path, const struct ckpt_options *opt,
                              struct ckpt_run **ret, struct ckpt_err *err);
CKPT_PUBLIC void ckpt_run_close(struct ckpt_run *run); /* views that are still held stay valid */

/* True: a folder of steps. False: one checkpoint; its only step is named "". */
CKPT_PUBLIC bool ckpt_run_is_folder(const struct ckpt_run *run);

/* The run will be looked at for long (a mount): its views are opened again when a shard's times
 * change, so opening one also samples what the shards hold, to tell a file that was only touched
 * from one that was written again. */
CKPT_PUBLIC void ckpt_run_watch(struct ckpt_run *run);

/* Look at the folder again. *ret_changed (may be NULL): steps came or went, or one was saved again,
 * since the last scan. Views of a step that has been saved again meanwhile are compared with it,
 * once: one that was opened in the middle of that save gives STALE from then on. */
CKPT_PUBLIC int ckpt_run_scan(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err);

/* A snapshot of the steps in order (oldest first); free with ckpt_steps_free. */
struct ckpt_step {
    char *name; /* the directory's name */
    uint64_t
        generation; /* changes when the step was saved again under the same name: a stable hash */
    int64_t mtime_ns;
    bool is_latest;
};
CKPT_PUBLIC int ckpt_run_steps(struct ckpt_run *run, struct ckpt_step **ret_steps, size_t *ret_n,
                               struct ckpt_err *err);
CKPT_PUBLIC void ckpt_steps_free(struct ckpt_step *steps, size_t n);

/* The name of the step that a user means: a step's name, or the number that one ends in ("200" is
 * "iter_0000200"); NULL: the latest. *ret_name is the caller's to free; "" for the only step of one
 * checkpoint. MISSING, CONFLICT: no step, or several; USAGE: there is nothing to choose from. */
CKPT_PUBLIC int ckpt_run_find_step(struct ckpt_run *run, const char *want, char **ret_name,
                                   struct ckpt_err *err);

/* The view of a step (NULL: the latest), opened on first use (headers are read in parallel) and
 * kept while anybody holds it; the caller gives it back with ckpt_view_release. A step that can't
 * be read gives its error, each time; one that is not there, or not any more, MISSING; one of which
 * the shards are of two saves, or being written, CONFLICT. A view of which a read gave STALE is not
 * given out again: the step is opened anew. */
CKPT_PUBLIC int ckpt_run_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret,
                              struct ckpt_err *err);
/* The same if the view is open already; NULL if it would have to be opened, or there is no such
 * step. Never waits for storage, nor for another thread that is opening it. */
CKPT_PUBLIC struct ckpt_view *ckpt_run_view_if_open(struct ckpt_run *run, const char *step);
CKPT_PUBLIC struct ckpt_view *ckpt_view_hold(struct ckpt_view *view);
CKPT_PUBLIC void ckpt_view_release(struct ckpt_view *view);

/* Open the newest step that can be read: latest first, then older ones. If none can, the error of
 * the newest. */
CKPT_PUBLIC int ckpt_run_newest_view(struct ckpt_run *run, struct ckpt_view **ret,
                                     struct ckpt_err *err);

/* ---- views: virtual files ---- */

struct ckpt_node; /* a file or directory of a view; lives as long as the view */

CKPT_PUBLIC const struct ckpt_node *ckpt_view_root(const struct ckpt_view *view);
CKPT_PUBLIC const struct ckpt_node *ckpt_view_find(const struct ckpt_view *view,
                                                   const char *path); /* or NULL */

CKPT_PUBLIC const char *ckpt_node_name(const struct ckpt_node *node);
CKPT_PUBLIC bool ckpt_node_is_dir(const struct ckpt_node *node);
CKPT_PUBLIC uint64_t ckpt_node_size(const struct ckpt_node *node);
CKPT_PUBLIC int64_t ckpt_node_mtime_ns(const struct ckpt_node *node);
CKPT_PUBLIC size_t ckpt_node_children(const struct ckpt_node *node); /* 0 for files */
CKPT_PUBLIC const struct ckpt_node *ckpt_node_child(const struct ckpt_node *node,
                                                    size_t i); /* by name */

/* Read bytes [off, off+len) of a file. *ret_len is less than len only where the file ends. All or
 * nothing otherwise. An error's text begins with the file's name. */
CKPT_PUBLIC int ckpt_node_pread(struct ckpt_view *view, const struct ckpt_node *file, void *buf,
                                size_t len, uint64_t off, size_t *ret_len, struct ckpt_err *err);

/* ---- views: tensors ---- */

struct ckpt_tensor_info {
    const char *name;  /* lives as long as the view */
    const char *dtype; /* safetensors' name: "BF16" */
    const uint64_t *shape;
    uint32_t rank;
    uint64_t nbytes;
    const struct ckpt_node *file; /* where it lies in the view */
    uint64_t file_off;
};

/* Tensors in the order of the model's state dict. */
CKPT_PUBLIC size_t ckpt_view_tensors(const struct ckpt_view *view);
CKPT_PUBLIC void ckpt_view_tensor(const struct ckpt_view *view, size_t i,
                                  struct ckpt_tensor_info *ret);
CKPT_PUBLIC bool ckpt_view_find_tensor(const struct ckpt_view *view, const char *name,
                                       size_t *ret_i);

/* Bytes [off, off+len) of tensor i, row-major. The range must lie inside it (else USAGE). */
CKPT_PUBLIC int ckpt_view_tensor_pread(struct ckpt_view *view, size_t i, void *buf, size_t len,
                                       uint64_t off, struct ckpt_err *err);

/* Are all shards still what they were when the view was opened, or at least all replaced by another
 * save, after which open files go on serving this one? STALE if only some are not: what was read
 * may be of two saves. Whoever has read all that it wants asks this before it says that it
 * succeeded. */
CKPT_PUBLIC int ckpt_view_verify_unchanged(struct ckpt_view *view, struct ckpt_err *err);

/* ---- views: facts, as JSON text that the caller frees ---- */

/* {"format", "step", "model_type", "recipe", "architectures", "dtype", "tensors", "parameters",
 * "bytes", "files", "shard_files", "pieces", "warnings": [...], ...} */
CKPT_PUBLIC int ckpt_view_info(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* Where a tensor comes from: rule, source tensors, and per shard file the bytes. MISSING if there
 * is no such tensor. */
CKPT_PUBLIC int ckpt_view_explain(struct ckpt_view *view, const char *tensor, char **ret_json,
                                  struct ckpt_err *err);

/* What the checkpoint holds beside tensors (an optimizer's param_groups, a scheduler's state, the
 * run's arguments), read now, from pickles of which nothing is ever called: {"name": value, ...},
 * named as torch's distributed checkpoints name them ("optim.param_groups"); of files that every
 * rank wrote, the first rank's. {} if the format has none. None, booleans, numbers, strings, lists
 * (and sets) and dicts with string keys are what they are in JSON; the rest are objects that begin
 * with a mark:
 *
 *     {"$float": "nan"} or "inf", "-inf"   {"$bytes": "00ff"}   {"$text": "00ff"}: with a NUL, or
 *     no UTF-8   {"$tuple": [...]}   {"$dict": [[key, value], ...]}: keys that are no strings
 *     {"$object": "module.name"}: what is none of these; "state" beside it, where that is known
 *
 * LIMIT: more than 4 million values in one pickle, 256 MiB of text, 48 levels. UNSUPPORTED: a
 * pickle asks for what only an attack needs. */
CKPT_PUBLIC int ckpt_view_objects(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* What reading cost so far. */
struct ckpt_stats {
    uint64_t requests, bytes, source_reads, source_bytes, slab_bytes, open_files, errors;
};
CKPT_PUBLIC void ckpt_run_stats(struct ckpt_run *run, struct ckpt_stats *ret);

/* The warnings of all views that the run has opened so far, as JSON text that the caller frees:
 * [{"step": name ("" of a single checkpoint), "text": warning}, ...], 1000 at most. Each was given
 * to the log (ckpt_options_set_log) once, when its view was opened first. */
CKPT_PUBLIC int ckpt_run_warnings(struct ckpt_run *run, char **ret_json, struct ckpt_err *err);

/* A short text that identifies format and step: "nanotron 1.4, step 20". Lives as long as the view.
 */
CKPT_PUBLIC const char *ckpt_view_source(const struct ckpt_view *view);

/* Changes whenever the bytes of the view may differ (checkpoint generation and options): for inode
 * numbers. */
CKPT_PUBLIC uint64_t ckpt_view_generation(const struct ckpt_view *view);

#ifdef __cplusplus
}
#endif

#endif
