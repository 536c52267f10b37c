/* SPDX-License-Identifier: Apache-2.0 */
/* libckptfs: presents sharded training checkpoints as Hugging Face models.
 *
 *     ckpt_run_open -> ckpt_run_view -> ckpt_node_* / ckpt_node_pread, ckpt_view_tensor_*
 *
 * A run is the directory that a user names: one checkpoint, or a folder of checkpoints (steps). A
 * view is one checkpoint laid out as a Hugging Face model directory, as a tree of virtual files.
 *
 * Conventions, unless a function says otherwise:
 * - A function returns 0, or -1 with *err filled. err may be NULL. Outputs (`ret...`) are written
 *   on success only.
 * - All functions may be called from many threads on the same object, except those that free it.
 * - Text and arrays that are passed in are copied. Paths and names are NUL-terminated; names of
 *   tensors are UTF-8.
 * - Every _free, _close and _release function accepts NULL.
 * - A struct that the caller allocates begins with `size`, which the caller sets to its sizeof
 *   before the call, so that later versions can add members. The library reads and writes no
 *   member beyond it, and refuses a struct whose size is 0, and one to read that is larger than it
 *   knows (USAGE; the text names the struct). Only
 *   struct ckpt_err and structs inside others or in arrays have none: they get no further members.
 *
 * No FUSE, MPI, CUDA or JSON type appears in this header. */
#ifndef CKPTFS_CKPTFS_H
#define CKPTFS_CKPTFS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <ckptfs/err.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library, for example "0.3.0". Static storage. */
CKPT_PUBLIC const char *ckpt_version(void);

/* ---- options: the keys are those of the -o option of ckptfs(1) and ckpt(1) ---- */

/* The options of a run. An object starts with the defaults of ckptfs(1). */
struct ckpt_options;

/* Make options with all defaults. */
CKPT_PUBLIC int ckpt_options_new(struct ckpt_options **ret, struct ckpt_err *err);
/* Free the options. Runs that were opened with them keep their own copy. */
CKPT_PUBLIC void ckpt_options_free(struct ckpt_options *opt);

/* Compare copies of a file that several directories of a run have (option "also") to the last byte,
 * larger ones than 1 MiB, too, of which otherwise samples are compared. For whoever reads all. */
CKPT_PUBLIC void ckpt_options_compare_whole(struct ckpt_options *opt);

/* Set one option. `key` is a word of ckpt_options_word (ckptfs(1) describes each), or the name of a
 * number in the model's config.json (num_attention_heads), which then overrides that number.
 * `value` is NULL for an option without a value, such as allow_partial. USAGE: the key or the value
 * is not known. Not to be called while another thread uses `opt`. */
CKPT_PUBLIC int ckpt_options_set(struct ckpt_options *opt, const char *key, const char *value,
                                 struct ckpt_err *err);

/* Does ckpt_options_set accept this key? A mount program passes the other words of -o to FUSE. */
CKPT_PUBLIC bool ckpt_options_knows(const char *key);

/* The options, for the help of a program: the word of option i, and what its value may be ("DIR",
 * "adapter|merge|base"; NULL: none is needed) and a line that explains it. NULL: there are only i
 * options. Static storage. */
CKPT_PUBLIC const char *ckpt_options_word(size_t i, const char **ret_value, const char **ret_help);

/* The topics by which a help groups the options. */
enum ckpt_option_topic {
    CKPT_TOPIC_MODEL,  /* which model is shown of a checkpoint */
    CKPT_TOPIC_FORMAT, /* how a view in a training framework's format is divided among ranks */
    CKPT_TOPIC_BUCKET, /* how a run in a bucket, or on storage at a distance, is read */
};

/* Return the topic of option i of ckpt_options_word. */
CKPT_PUBLIC enum ckpt_option_topic ckpt_options_topic(size_t i);

/* Translate another program's word for an option into what the user should write: "dtype=bfloat16"
 * for bf16, "view=hf|raw|..." for output_format, "allow_partial" for ignore_missing. The caller
 * frees it; NULL: the word is not known, or memory ran out. */
CKPT_PUBLIC char *ckpt_options_meant(const char *word);

/* How serious a message is. */
enum ckpt_log_severity { CKPT_ERROR, CKPT_WARNING, CKPT_INFO, CKPT_DEBUG };

/* Call `line` for each message of the library: one line of text without a newline, valid during the
 * call, from any thread. Without a log, messages are dropped. */
CKPT_PUBLIC void ckpt_options_set_log(struct ckpt_options *opt,
                                      void (*line)(void *ctx, enum ckpt_log_severity severity,
                                                   const char *text),
                                      void *ctx);

/* For programs that confine themselves before they read a checkpoint: call `visit` once for each
 * file and each directory that views of the run at `path` may read with these options. Each is an
 * absolute path without symbolic links; for a directory it means everything below it. The paths are
 * the run itself (or, while it does not exist, the folder in which it may appear), the base model,
 * and the recipe and key mapping files. With follow_symlinks, the targets of all links in the run
 * and in the base are included; both directories are searched for links. `visit` returns 0 to
 * continue; any other value ends the search, and the call returns -1. */
CKPT_PUBLIC int ckpt_options_places(const struct ckpt_options *opt, const char *path,
                                    int (*visit)(void *ctx, const char *place), void *ctx,
                                    struct ckpt_err *err);

/* Start what reads from buckets, if the run at `path` or the base is in one (s3://...), and make
 * the temporary file of the option cache_dir: a process and a file that a sandbox would not let be
 * started or made later. ckpt_run_open does this itself. */
CKPT_PUBLIC int ckpt_options_connect(struct ckpt_options *opt, const char *path,
                                     struct ckpt_err *err);

/* Name a folder for the option cache_dir, unless it was given: that of files that the program will
 * write. The temporary file is made there when something has to be decompressed. */
CKPT_PUBLIC int ckpt_options_offer_cache_dir(struct ckpt_options *opt, const char *folder,
                                             struct ckpt_err *err);

/* For how many milliseconds storage may give no answer before a read of it fails: the option
 * timeout=, or its default. */
CKPT_PUBLIC uint32_t ckpt_options_timeout_ms(const struct ckpt_options *opt);

/* ---- runs ---- */

struct ckpt_run;
struct ckpt_view;

/* Open the run at `path`. Only names of files are looked at; no shard is opened. MISSING: `path` is
 * neither a checkpoint nor a folder that contains one. */
CKPT_PUBLIC int ckpt_run_open(const char *path, const struct ckpt_options *opt,
                              struct ckpt_run **ret, struct ckpt_err *err);
CKPT_PUBLIC void ckpt_run_close(struct ckpt_run *run); /* views that are still held stay valid */

/* True: the run is a folder of steps. False: the run is one checkpoint, whose only step is named
 * "". */
CKPT_PUBLIC bool ckpt_run_is_folder(const struct ckpt_run *run);

/* Prepare the run for a long life, as in a mount. Its views are opened again whenever the times of
 * a shard change. To tell a shard that was only touched from a shard that was written again,
 * opening a view then also reads samples of the shards' contents. */
CKPT_PUBLIC void ckpt_run_watch(struct ckpt_run *run);

/* Scan the folder again. *ret_changed (may be NULL) is true if, since the last scan, a step
 * appeared, disappeared or was saved again. If a step was saved again while its view was being
 * opened, that view mixes two saves: all later reads of it fail with STALE. */
CKPT_PUBLIC int ckpt_run_scan(struct ckpt_run *run, bool *ret_changed, struct ckpt_err *err);

/* One step of a run, in a snapshot of all steps. */
struct ckpt_step {
    char *name;          /* name of the step's directory */
    uint64_t generation; /* changes when the step is saved again */
    int64_t mtime_ns;
    bool is_latest;
};
/* Get a snapshot of the steps, oldest first: *ret_n of them in *ret_steps, which the caller frees
 * with ckpt_steps_free. Steps whose names have no number come first, in the order of their times.
 * The latest is the one that the format's own pointer file names, else the last one. */
CKPT_PUBLIC int ckpt_run_steps(struct ckpt_run *run, struct ckpt_step **ret_steps, size_t *ret_n,
                               struct ckpt_err *err);
/* Free a snapshot of n steps. */
CKPT_PUBLIC void ckpt_steps_free(struct ckpt_step *steps, size_t n);

/* A symbolic link in the folder of a run that leads to one of its steps ("checkpoint-best"), and so
 * is a second name of that step. */
struct ckpt_step_link {
    char *name;
    char *step; /* name of the step */
};
/* Get a snapshot of these links: *ret_n of them in *ret_links, which the caller frees with
 * ckpt_step_links_free. */
CKPT_PUBLIC int ckpt_run_links(struct ckpt_run *run, struct ckpt_step_link **ret_links,
                               size_t *ret_n, struct ckpt_err *err);
/* Free a snapshot of n links. */
CKPT_PUBLIC void ckpt_step_links_free(struct ckpt_step_link *links, size_t n);

/* Find the step that a user means by `want`: the full name of a step or of a link to one, or the
 * number at the end of its name ("200" finds "iter_0000200"); NULL: the latest step. *ret_name is a
 * new string that the caller frees; it is "" for a run that is one checkpoint. MISSING: no step
 * matches. CONFLICT: several match. USAGE: `want` was given, but the run is one checkpoint. */
CKPT_PUBLIC int ckpt_run_find_step(struct ckpt_run *run, const char *want, char **ret_name,
                                   struct ckpt_err *err);

/* Get the view of a step, by its name or that of a link to it (NULL: the latest). The first call
 * opens the view, for which it reads the headers of all shards in parallel; later calls return the
 * same view while it is held. The caller must call ckpt_view_release. Errors: if the step cannot be
 * read, every call returns the reason. MISSING: the step does not exist or was deleted. CONFLICT:
 * the step's shards come from two saves, or a save is in progress. After a read of a view has
 * failed with STALE, the next call opens the step anew instead of returning that view. */
CKPT_PUBLIC int ckpt_run_view(struct ckpt_run *run, const char *step, struct ckpt_view **ret,
                              struct ckpt_err *err);
/* Get the view of a step only if it is open already; NULL if it would have to be opened or the step
 * does not exist. Never waits for storage, nor for another thread that is opening the view. */
CKPT_PUBLIC struct ckpt_view *ckpt_run_view_if_open(struct ckpt_run *run, const char *step);
/* Hold a view once more, so that it needs one more ckpt_view_release. Returns the view. */
CKPT_PUBLIC struct ckpt_view *ckpt_view_hold(struct ckpt_view *view);
/* Give back one hold. The last one frees the view with its nodes and texts. */
CKPT_PUBLIC void ckpt_view_release(struct ckpt_view *view);

/* Get the view of the newest step that can be read: tries the latest step first, then older ones.
 * If no step can be read, returns the error of the newest. The caller must call ckpt_view_release.
 */
CKPT_PUBLIC int ckpt_run_newest_view(struct ckpt_run *run, struct ckpt_view **ret,
                                     struct ckpt_err *err);

/* ---- views: virtual files ---- */

struct ckpt_node; /* a file or directory of a view; freed with the view */

/* The root directory of the view, and the node at a path below it ("a/b", without a leading slash).
 */
CKPT_PUBLIC const struct ckpt_node *ckpt_view_root(const struct ckpt_view *view);
CKPT_PUBLIC const struct ckpt_node *ckpt_view_find(const struct ckpt_view *view,
                                                   const char *path); /* NULL: no such path */

/* Properties of a node. The name is its last path component ("" for the root); the size is in bytes
 * (0 for a directory); the time is the newest modification time of the shards, in nanoseconds since
 * 1970. */
CKPT_PUBLIC const char *ckpt_node_name(const struct ckpt_node *node);
CKPT_PUBLIC bool ckpt_node_is_dir(const struct ckpt_node *node);
CKPT_PUBLIC uint64_t ckpt_node_size(const struct ckpt_node *node);
CKPT_PUBLIC int64_t ckpt_node_mtime_ns(const struct ckpt_node *node);
CKPT_PUBLIC size_t ckpt_node_children(const struct ckpt_node *node); /* 0 for files */
CKPT_PUBLIC const struct ckpt_node *ckpt_node_child(const struct ckpt_node *node,
                                                    size_t i); /* sorted by name */

/* Read bytes [off, off+len) of a file into buf. *ret_len is less than len only if the file ends
 * within the range (0 at or after its end). A read is never short for any other reason: it succeeds
 * in full or fails, and then the contents of buf are undefined. The error's text begins with the
 * file's name. */
CKPT_PUBLIC int ckpt_node_pread(struct ckpt_view *view, const struct ckpt_node *file, void *buf,
                                size_t len, uint64_t off, size_t *ret_len, struct ckpt_err *err);

/* ---- views: tensors ---- */

/* Set size before the call. */
struct ckpt_tensor_info {
    size_t size;           /* sizeof(struct ckpt_tensor_info) */
    const char *name;      /* this and all pointers below: valid as long as the view */
    const char *dtype;     /* as in the safetensors format: "BF16", "F32", ... */
    const uint64_t *shape; /* in elements; F4 and F6 are stored in packs of 2 and 4 of them */
    uint32_t rank;
    uint64_t nbytes;
    const struct ckpt_node *file; /* the virtual file that contains all of it, or NULL */
    uint64_t file_off;
    const char *torch_dtype; /* torch's name of it: "bfloat16", "float32", ... */
};

/* The number of tensors. Tensors are numbered in the order of the model's state dict. */
CKPT_PUBLIC size_t ckpt_view_tensors(const struct ckpt_view *view);
/* Describe tensor i, which must be less than ckpt_view_tensors. Fails only if ret->size is not set
 * (USAGE). */
CKPT_PUBLIC int ckpt_view_tensor(const struct ckpt_view *view, size_t i,
                                 struct ckpt_tensor_info *ret, struct ckpt_err *err);
/* Find the number of a tensor by its name; false, and *ret_i unchanged, if there is none. */
CKPT_PUBLIC bool ckpt_view_find_tensor(const struct ckpt_view *view, const char *name,
                                       size_t *ret_i);

/* Read bytes [off, off+len) of tensor i, in row-major order and in the dtype of ckpt_tensor_info,
 * into buf. USAGE: the range is not inside the tensor. On failure the contents of buf are
 * undefined. */
CKPT_PUBLIC int ckpt_view_tensor_pread(struct ckpt_view *view, size_t i, void *buf, size_t len,
                                       uint64_t off, struct ckpt_err *err);

/* A change says what has changed in a tensor, as frameworks ship it to inference engines (`ckpt
 * delta`). */
struct ckpt_change {
    size_t size;       /* sizeof(struct ckpt_change), set before the call */
    void *data;        /* compressed by zstd, in memory that the caller frees; NULL: no byte has */
    size_t len;        /* bytes of it */
    uint64_t changed;  /* bytes of the tensor */
    char checksum[33]; /* XXH3-128 of the new bytes, as hexadecimal digits */
};

/* A tensor with a change, in a version that holds only what has changed since another. */
struct ckpt_changed {
    struct ckpt_tensor_info tensor; /* the tensor of the newer view */
    size_t file;                    /* the number of the version's file that holds the change */
    uint64_t len;                   /* bytes of the change, compressed */
    char checksum[33];              /* as in struct ckpt_change */
};

/* All changes of a version, which become its index. */
struct ckpt_changes {
    uint64_t version, base_version;
    bool overwrite;           /* how they are encoded (ckpt_view_change) */
    uint64_t nbytes, written; /* bytes of all tensors, and of the changes */
    size_t nfile, ntensor;
    const struct ckpt_changed *tensor; /* in the order in which the changes lie in the files */
};

/* The form in which a trainer's inference engines expect such versions: a folder with files of
 * safetensors, in which a change is a tensor of bytes under its tensor's name, and an index. */
struct ckpt_changes_form {
    const char *name;    /* "slime" */
    const char *example; /* a version's folder: "weight_v000001" */
    const char *index;   /* the file that makes a version complete, and is written last */
    bool has_overwrite;  /* changes may be encoded by overwriting, too, not by XOR alone */
    bool has_sums;       /* the files' __metadata__ has the checksum of each tensor */
    /* The name of file i of n; n is 0 as long as their number is not known, and a file is renamed
     * if its name is another one then. */
    void (*file_name)(size_t i, size_t n, char ret[64]);
    /* Can a file of this name be one of a version's, without the index? */
    bool (*is_file)(const char *name);
    /* The text of the index; the caller frees it. */
    int (*index_text)(const struct ckpt_changes *changes, char **ret, size_t *ret_len,
                      struct ckpt_err *err);
};

/* The i-th form that this library knows; the first one is the default. NULL: there are no more. */
CKPT_PUBLIC const struct ckpt_changes_form *ckpt_changes_form_at(size_t i);

/* Compare a tensor of one view with tensor i of another, for a form of ckpt_changes_form_at. What
 * is compressed: all bytes of both, combined by XOR; or, with overwrite, the number of changed
 * bytes and their positions, as uint32_t (little-endian), then their new values. Safe from many
 * threads. MISSING: `from` has no tensor of that name; CONFLICT: it has another shape or dtype
 * there. USAGE: the form is none of the library's. */
CKPT_PUBLIC int ckpt_view_change(struct ckpt_view *from, struct ckpt_view *to, size_t i,
                                 const struct ckpt_changes_form *form, bool overwrite,
                                 struct ckpt_change *ret, struct ckpt_err *err);

/* True: tensor i of `to` is known to be as in `from`, without reading data: both views make it of
 * the same bytes of the same files, as steps of changes do of what they do not touch. */
CKPT_PUBLIC bool ckpt_view_unchanged(const struct ckpt_view *from, const struct ckpt_view *to,
                                     size_t i);

/* All files of the view will be read, in the order in which directories list them: where bytes are
 * far, in a bucket, the first ones are fetched from now on. */
CKPT_PUBLIC void ckpt_view_will_read(struct ckpt_view *view);

/* Bytes [off, end) of a file will be read soon: make the first part of them that takes long to make
 * and is not made yet (decompressed chunks, transposed tensors). Threads that read all files in
 * order call this between two reads, instead of waiting for each other when they come to that part.
 * Returns 2 if all parts are made; 1 if other threads make what is left, so that what follows may
 * be prepared; 0 if one was made now, or there is no room for it; -1 if it can't be made, for which
 * the read that needs it gives the reason. Safe from many threads. */
CKPT_PUBLIC int ckpt_view_prepare(struct ckpt_view *view, const struct ckpt_node *file,
                                  uint64_t off, uint64_t end);

/* Check that everything read from the view so far belongs to one save. Returns 0 if all shards are
 * unchanged since the view was opened, or if all of them have been replaced by another save (the
 * files that the view holds open still contain the old save). STALE: only some shards have changed,
 * so the data may mix two saves. Call this after the last read and before reporting success. */
CKPT_PUBLIC int ckpt_view_verify_unchanged(struct ckpt_view *view, struct ckpt_err *err);

/* Is the save that the view shows at rest? *ret: the file that ends a save of this format is there,
 * and not older than its shards, or no shard has changed for quiet_ms. A caller that copies the
 * view as soon as its step appears asks again until it is: a writer may give files their size
 * before it writes their bytes. STALE: a shard has changed since the view was opened; the next
 * ckpt_run_view opens the step anew. */
CKPT_PUBLIC int ckpt_view_at_rest(struct ckpt_view *view, uint32_t quiet_ms, bool *ret,
                                  struct ckpt_err *err);

/* ---- views: facts, as JSON text in a new string that the caller frees ---- */

/* Facts about the view as one JSON object: {"format", "step", "model_type", "recipe",
 * "architectures", "tensors", "parameters", "bytes", "files", "shard_files",
 * "stored_bytes" (of these files), "saved_ns" (the newest time of them, since 1970), "pieces",
 * "warnings": [...], "notes": [...] (lines that tell of nothing wrong), "view": the word of that
 * option, "tied": {other name in the model's class: the tensor that it is tied to}, "dtype" and
 * "stored_dtype": of most elements, in torch's spelling, "dtypes" and "stored_dtypes": {dtype:
 * number of tensors}, "storage": the filesystem, if it is or could be far, and why ("NFS: far, by
 * its type"), ...} */
CKPT_PUBLIC int ckpt_view_info(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* How a tensor of the view is made: the recipe's rule, the source tensors, and the bytes that are
 * read from each shard file. Of a tensor that the model's class ties to another, which alone is
 * stored, the other is explained, with the name that was asked for under "is_the_same_as". MISSING:
 * there is no such tensor. */
CKPT_PUBLIC int ckpt_view_explain(struct ckpt_view *view, const char *tensor, char **ret_json,
                                  struct ckpt_err *err);

/* The values that the checkpoint holds besides tensors, such as an optimizer's param_groups, the
 * state of a scheduler or the arguments of the run, as {"name": value, ...}. The names are those of
 * torch's distributed checkpoints ("optim.param_groups"). Values are read at the time of the call.
 * Pickles are decoded without calling any function that they name. Where every rank wrote its own
 * file, the values are those of the first rank. The result is {} if the format holds no such
 * values. With the option optimizer it is {"optim.param_groups": [...]}, as the view has them.
 * None, booleans, numbers, strings, lists, sets (as lists) and dicts with string keys become the
 * corresponding JSON values. Other values become an object whose first key begins with
 * "$":
 *
 *     {"$float": "nan"}, "inf" or "-inf"    {"$bytes": "00ff"}: hexadecimal
 *     {"$text": "00ff"}: a string that has a NUL or is not UTF-8, in hexadecimal
 *     {"$tuple": [...]}    {"$dict": [[key, value], ...]}: a dict with keys that are not strings
 *     {"$object": "module.name"}: any other object, with its "state" if that is known
 *
 * LIMIT: a pickle has more than 4 million values, 256 MiB of text or 48 levels. UNSUPPORTED: a
 * pickle uses an opcode or a global that only an attack needs. */
CKPT_PUBLIC int ckpt_view_objects(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* The values that the checkpoint has of its parameters: {"weight": {"tensors": 10, "bytes": 4000,
 * "dtypes": {"BF16": 10}}, "master": ..., "exp_avg": ..., "exp_avg_sq": ...}, others by their
 * framework's names. The option state= shows one of them. The headers are read at the time of the
 * call. A tensor of an optimizer that names no parameter counts as a weight. */
CKPT_PUBLIC int ckpt_view_states(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* The paths of stored names, of tensors and of other values, in the nested state dict that was
 * saved, as a JSON object that the caller frees: {"optim.lr": ["optim", "lr"]}; an element of a
 * path is a string, or an integer. Torch's distributed checkpoints keep them (planner_data); of
 * other formats the result is {}. The checkpoint's metadata is read again at the time of the call.
 */
CKPT_PUBLIC int ckpt_view_paths(struct ckpt_view *view, char **ret_json, struct ckpt_err *err);

/* Totals of all reads of the run's views so far: read requests and their bytes, reads of shard
 * files and their bytes, bytes of memory in slabs (buffers that hold transposed rows), descriptors
 * of shard files that are open now, and failed requests. */
struct ckpt_stats {
    size_t size; /* sizeof(struct ckpt_stats), set before the call */
    uint64_t requests, bytes, source_reads, source_bytes, slab_bytes, open_files, errors;
};
/* Get them. Fails only if ret->size is not set (USAGE). */
CKPT_PUBLIC int ckpt_run_stats(struct ckpt_run *run, struct ckpt_stats *ret, struct ckpt_err *err);

/* Describe what this process has done with buckets so far, as JSON text that the caller frees:
 * {"endpoint", "region", "credentials" (their kind), "requests", "bytes", "retries",
 * "connections"}. NULL if no run in a bucket is open. */
CKPT_PUBLIC int ckpt_bucket_info(char **ret_json, struct ckpt_err *err);

/* The warnings of all views that the run has opened so far, as JSON text that the caller frees:
 * [{"step": name, "text": warning}, ...], at most 1000; the name is "" for a single checkpoint.
 * Each warning was also sent to the log (ckpt_options_set_log) once, when its view was first
 * opened. */
CKPT_PUBLIC int ckpt_run_warnings(struct ckpt_run *run, char **ret_json, struct ckpt_err *err);

/* Facts about the run as one JSON object, in a new string that the caller frees: "average": [...],
 * the steps whose mean is shown, if the option average asks for one; "storage": as in
 * ckpt_view_info, of the views that are open. */
CKPT_PUBLIC int ckpt_run_facts(struct ckpt_run *run, char **ret_json, struct ckpt_err *err);

/* A short text that identifies format and step, for example "nanotron 1.4, step 20". Valid as long
 * as the view. */
CKPT_PUBLIC const char *ckpt_view_source(const struct ckpt_view *view);

/* A hash of the checkpoint's generation and the options. It differs whenever the bytes of the view
 * may differ, so that inode numbers can be derived from it. */
CKPT_PUBLIC uint64_t ckpt_view_generation(const struct ckpt_view *view);

#ifdef __cplusplus
}
#endif

#endif
