/* SPDX-License-Identifier: Apache-2.0 */
/* One torch.save file of a DeepSpeed tag, open for reading. */
#ifndef CKPT_FORMAT_DEEPSPEED_FILE_H
#define CKPT_FORMAT_DEEPSPEED_FILE_H

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "container/torch.h"
#include "io/dir.h"
#include "io/fdpool.h"
#include "io/source.h"

struct ckpt_ds_file {
    struct ckpt_source *source;
    struct ckpt_torch archive;
    struct ckpt_pickle p;
    bool has_archive, has_pickle;
    struct ckpt_arena names;         /* those without torch's wrapper */
    struct ckpt_map by_unwrapped;    /* numbers of their originals */
    CKPT_VEC(const char *) original; /* with the wrapper */
};

/* Open the file and read its pickle; *ret is new. Errors name the file. */
int ckpt_ds_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                      struct ckpt_ds_file **ret, struct ckpt_err *err);
void ckpt_ds_file_free(struct ckpt_ds_file *f);
void ckpt_ds_file_freep(struct ckpt_ds_file **f);

/* The position of a tensor in the file. */
struct ckpt_ds_stored {
    enum ckpt_dtype dtype;
    uint32_t rank;
    uint64_t dim[CKPT_MAX_RANK];
    uint64_t stride[CKPT_MAX_RANK]; /* bytes */
    uint64_t numel;
    uint64_t off;    /* offset of the first element; undefined if numel is 0 */
    bool contiguous; /* row-major, without gaps */
};

/* Find out where tensor v of the file is stored. */
int ckpt_ds_file_tensor(const struct ckpt_ds_file *f, ckpt_pv v, struct ckpt_ds_stored *ret,
                        struct ckpt_err *err);

/* Is the value a tensor, by its pickle? */
bool ckpt_ds_is_tensor(const struct ckpt_ds_file *f, ckpt_pv v);

/* Does a file of the model list `name` as a buffer? */
bool ckpt_ds_is_buffer(const struct ckpt_ds_file *model, const char *name);
/* Take the word of torch's checkpoint_wrapper out of a model file's lists of parameters. The
 * wrapper itself takes it out of the names of a state dict, so that they would differ. */
int ckpt_ds_file_unwrap(struct ckpt_ds_file *f, struct ckpt_err *err);
/* The name from which the wrapper's word was taken, or the name itself. */
const char *ckpt_ds_file_original(const struct ckpt_ds_file *f, const char *name);
/* The parameter that this one is tied to, by shared_params of the model file; NULL: not tied. */
const char *ckpt_ds_owner(const struct ckpt_ds_file *model, const char *name);

/* Parse a tensor's size (a torch.Size, tuple or list of integers). */
int ckpt_ds_file_shape(struct ckpt_ds_file *f, ckpt_pv v, uint64_t *dim, uint32_t *ret_rank,
                       struct ckpt_err *err);

/* Get a member that is a non-negative integer; false: there is none. */
bool ckpt_ds_file_u64(const struct ckpt_ds_file *f, ckpt_pv dict, const char *key, uint64_t *ret);

#endif
