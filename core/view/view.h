/* SPDX-License-Identifier: Apache-2.0 */
/* The view of one checkpoint: a catalogue laid out as the files of a Hugging Face model directory.
 *
 * Immutable once built; read from many threads without locks. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "container/weight_map.h"
#include "io/dir.h"
#include "io/source.h"
#include "tensor/catalog.h"
#include "tensor/read.h"

struct ckpt_text;

/* A virtual file is its segments, end to end. Half-open, ascending, without gaps; the last one ends
 * at the file's size. */
struct ckpt_segment {
    uint64_t off; /* in the file */
    uint64_t len;
    enum { CKPT_SEGMENT_MEM, CKPT_SEGMENT_TEXT, CKPT_SEGMENT_TENSOR, CKPT_SEGMENT_SOURCE } kind;
    uint64_t from; /* texts and tensors: the first of their bytes */
    union {
        const void *mem;                  /* the view's */
        const struct ckpt_text *text;     /* written when it is read (view/text.h) */
        const struct ckpt_tensor *tensor; /* its bytes from..from+len, row-major */
        struct ckpt_source *source;       /* its first len bytes */
    };
};

/* Segments of so many bytes: of memory, of a text or a tensor from its byte `from` on. */
static inline struct ckpt_segment ckpt_segment_mem(const void *mem, uint64_t len)
{
    return (struct ckpt_segment){.len = len, .kind = CKPT_SEGMENT_MEM, .mem = mem};
}

static inline struct ckpt_segment ckpt_segment_text(const struct ckpt_text *text, uint64_t from,
                                                    uint64_t len)
{
    return (struct ckpt_segment){.len = len, .kind = CKPT_SEGMENT_TEXT, .from = from, .text = text};
}

static inline struct ckpt_segment ckpt_segment_tensor(const struct ckpt_tensor *tensor,
                                                      uint64_t from, uint64_t len)
{
    return (struct ckpt_segment){
        .len = len, .kind = CKPT_SEGMENT_TENSOR, .from = from, .tensor = tensor};
}

enum ckpt_node_kind { CKPT_NODE_FILE, CKPT_NODE_DIR };

struct ckpt_vnode {
    const char *name;
    enum ckpt_node_kind kind;
    uint64_t size;                      /* files: bytes */
    int64_t mtime_ns;                   /* of the newest shard or side file that goes into it */
    const struct ckpt_segment *segment; /* files */
    size_t nsegment;
    uint64_t at; /* files: where they begin if they lie one after the other, with tensors first */
    const struct ckpt_vnode *next;   /* of files with tensors: the next one */
    struct ckpt_vnode *const *child; /* directories: by name (strcmp) */
    size_t nchild;
};

struct ckpt_vtree;

/* A file that is passed through as it is (tokenizer.json, *.py ...). */
struct ckpt_side_file {
    const char *path; /* below the view's root; may have '/' */
    struct ckpt_source *source;
};

struct ckpt_vtree_options {
    const json_t *config;                     /* config.json, complete (dtype too), or NULL: none */
    const json_t *generation;                 /* generation_config.json, or NULL */
    const json_t *adapter;                    /* adapter_config.json, or NULL */
    const struct ckpt_weight_map *weight_map; /* of an index; NULL: split by max_shard_size */
    const char *index_name;                   /* NULL: model.safetensors.index.json */
    uint64_t max_shard_size;                  /* bytes; 0: transformers' default, 50 GB */
    uint64_t buffer_numel; /* elements of buffers, which the index's total_parameters leaves out */
    bool bare;             /* headers without __metadata__ */
    /* Entries of __metadata__: of a file that weight_map names, by its name ({file: {key: value}});
     * and of every other file. NULL: none but the format. */
    const json_t *metadata, *joined;
    bool sort;       /* split in the order of names, not the catalogue's (see below) */
    bool keep_order; /* in each file tensors are in the catalogue's order, not in safetensors' */
    const struct ckpt_side_file *side;
    size_t nside;
    int64_t mtime_ns; /* of the checkpoint */
};

/* Lay out cat (borrowed: it must outlive the tree) as model.safetensors, or its shards and their
 * index, beside config.json and side files: byte for byte what `save_pretrained` of transformers 5
 * writes for a model that has these tensors.
 *
 * Split by size: tensors are taken in the catalogue's order, which should be that of the state dict
 * that transformers saves; after from_pretrained this is the order of names with numbers by value
 * (lm_head.weight first). `sort` says that the catalogue has no such order and to use that one. A
 * block (ckpt_tensor.block: neighbours with the same number that is not 0) is one item whose size
 * is the sum of its tensors; it never spans two files. An item above max_shard_size gets its own
 * file, numbered before the file being filled, which goes on being filled. (view/shards.h)
 *
 * Split by a weight_map: each tensor goes where the map says; tensors that it does not know go into
 * the last of the files (by name); files without tensors are left out. If it knows none of the
 * tensors, it is ignored. Blocks do not matter. There is an index unless the only file is
 * model.safetensors (or diffusers' or PEFT's name for it). A catalogue without tensors gives no
 * such file at all. The index's total_parameters counts every element but those of buffers.
 *
 * Of a file of the weight_map, opt->metadata has the entries of __metadata__; all others have
 * opt->joined. "format" is "pt" if they do not say it.
 *
 * A side file with the path of a generated one is left out, and so is an index of other weights.
 * Two side files with one path, or a file where another needs a directory, are CONFLICT; a path
 * that is not plain (absolute, "..", empty components) is FORMAT. */
int ckpt_vtree_new(const struct ckpt_catalog *cat, const struct ckpt_vtree_options *opt,
                   struct ckpt_vtree **ret, struct ckpt_err *err);
void ckpt_vtree_free(struct ckpt_vtree *t);
CKPT_CLEANUP_BY(ckpt_vtree_free, struct ckpt_vtree)

/* Does any file have the joined entries? */
bool ckpt_vtree_joins(const struct ckpt_vtree *t);

/* The root directory. Valid as long as the tree. */
const struct ckpt_vnode *ckpt_vtree_root(const struct ckpt_vtree *t);

/* The node at a path below the root ("" is the root itself), or NULL. */
const struct ckpt_vnode *ckpt_vtree_find(const struct ckpt_vtree *t, const char *path);

/* Which file and byte a tensor of the catalogue (by index) begins at; NULL and 0 if it does not lie
 * in one piece of a file. */
void ckpt_vtree_place(const struct ckpt_vtree *t, size_t tensor, const struct ckpt_vnode **ret_file,
                      uint64_t *ret_off);

/* The number of the last segment that begins at or before off. Empty ones share their offset with
 * the next, which is the one found. */
size_t ckpt_segment_at(const struct ckpt_vnode *file, uint64_t off);

/* Read up to len bytes of a file at off; *ret_len is less than len only at the end of the file (0
 * at or past it). This is the only clamp in the tree: all bytes asked for that exist are delivered,
 * or it fails. */
int ckpt_vfile_pread(struct ckpt_reading *rd, const struct ckpt_vnode *file, void *buf, size_t len,
                     uint64_t off, size_t *ret_len, struct ckpt_err *err);
