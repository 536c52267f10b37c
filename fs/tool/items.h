/* SPDX-License-Identifier: Apache-2.0 */
/* The files or tensors of a view as one flat list, and how far each has been read or written. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <xxhash.h>

#include <ckptfs/ckptfs.h>

struct ckpt_item {
    char *path; /* path of a file below the view's root, or the name of a tensor */
    uint64_t size;
    const struct ckpt_node *file; /* NULL: it is a tensor */
    size_t tensor;
    /* of the pump (pump.h): */
    uint64_t first;      /* the item is the bytes [first, size) of the file; 0: all */
    uint64_t start;      /* the byte to begin at, or CKPT_PUMP_SKIP */
    XXH3_state_t *state; /* of the hash of the bytes before it; NULL: begins at 0. Owned */
    XXH128_hash_t hash;  /* of the bytes so far, at the end of all */
    int fd;              /* of an export: the temporary file, which is owned; or -1 */
};

struct ckpt_items {
    struct ckpt_item *item;
    size_t n, cap;
    uint64_t bytes;
};

/* List all files, sorted by path but with the weights (*.safetensors) first, so that an export
 * writes config.json last. The list is empty before; release it also after a failure. */
int ckpt_items_files(const struct ckpt_view *view, struct ckpt_items *ret, struct ckpt_err *err);

/* Is there a config.json, of a model or of an adapter? */
bool ckpt_items_have_config(const struct ckpt_items *items);

/* Drop the files that are not weights and not their index; or, if !weights, those that are. */
void ckpt_items_keep(struct ckpt_items *items, bool weights);

/* List all tensors, in the order of the state dict, as ckpt_items_files lists files. */
int ckpt_items_tensors(const struct ckpt_view *view, struct ckpt_items *ret, struct ckpt_err *err);

/* Add the bytes [from, to) of another list's item, whose file is borrowed. */
int ckpt_items_add_part(struct ckpt_items *items, const struct ckpt_item *of, uint64_t from,
                        uint64_t to, struct ckpt_err *err);

/* Add a file of which nothing can be read. */
int ckpt_items_add_name(struct ckpt_items *items, const char *path, uint64_t size,
                        struct ckpt_err *err);

/* Free the list. */
void ckpt_items_release(struct ckpt_items *items);

/* Read all bytes [off, off+len) of an item, or fail. */
int ckpt_item_pread(struct ckpt_view *view, const struct ckpt_item *item, void *buf, size_t len,
                    uint64_t off, struct ckpt_err *err);

/* Is it a file of weights (*.safetensors)? */
bool ckpt_is_weights(const char *path);
