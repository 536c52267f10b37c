/* SPDX-License-Identifier: Apache-2.0 */
/* The catalogue of a checkpoint: names -> tensors -> pieces, and where the bytes are.
 *
 * A reader makes one in the framework's names; a recipe makes another, in Hugging Face's, over the
 * same sources. While it is being built it belongs to one thread; afterwards it is immutable and
 * read by many without locks. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

/* A piece says where in a source certain elements of a tensor are stored.
 *
 *     tensor element  dst + sum i[j] * axis[j].dst        (linear, row-major)
 *     source byte     src + sum i[j] * axis[j].src        for every tuple 0 <= i[j] < axis[j].n
 *
 * Axes are slowest first in the tensor and nest (axis[j].dst >= axis[j+1].n * axis[j+1].dst), and
 * no axis crosses a dimension: it steps within one. A shard of a tensor has one axis per dimension;
 * a mapping (RoPE, query groups, a transpose) may have more and in any source order. Source strides
 * may be 0 (torch's expanded tensors) or interleave. */
struct ckpt_axis {
    uint64_t n;
    uint64_t dst; /* elements */
    uint64_t src; /* bytes */
};

struct ckpt_piece {
    uint64_t dst; /* element */
    uint64_t src; /* byte */
    const struct ckpt_axis *axis;
    uint32_t naxis;
    uint32_t source; /* index in the catalogue */
};

/* A piece that contains its axes, for building. `p.axis` is set when it is added to a catalogue. */
struct ckpt_piece_draft {
    uint64_t dst, src;
    uint32_t naxis, source;
    struct ckpt_axis axis[CKPT_MAX_AXES];
};

/* The box `b` of a tensor of shape dim[0..b->rank), whose first element lies at byte `src` of the
 * source, with byte strides src_stride[d]. Gives one axis per dimension (also where n is 1). */
void ckpt_piece_from_box(const uint64_t *dim, const struct ckpt_box *b, uint32_t source,
                         uint64_t src, const uint64_t *src_stride, struct ckpt_piece_draft *out);

/* The inverse, for pieces with one axis per dimension of unit step (what readers make): true and
 * the box. False for others. */
bool ckpt_piece_box(const struct ckpt_piece *p, const uint64_t *dim, uint32_t rank,
                    struct ckpt_box *out);

/* Numel of the piece; one past the last source byte (elements of esize bytes);
 * false if that overflows. */
uint64_t ckpt_piece_numel(const struct ckpt_piece *p);
bool ckpt_piece_src_end(const struct ckpt_axis *axis, uint32_t naxis, uint64_t src, uint64_t esize,
                        uint64_t *ret);

/* ---- how a training framework divides a tensor over the ranks of a job ---- */

enum ckpt_cut_way {
    CKPT_CUT_NOT, /* every rank has the whole part */
    CKPT_CUT_OVER_TP,
    CKPT_CUT_OVER_EP,
    CKPT_CUT_OVER_ETP, /* the ranks that divide an expert */
};

/* Elements lo..lo+n of a dimension: rank t of T has the t-th of T equal parts. */
struct ckpt_cut {
    uint64_t lo, n;
    uint64_t groups;  /* equal groups (such as heads) that stay whole; 0: none */
    const char *what; /* name of the groups, for messages */
    uint8_t dim, way;
    bool shared; /* several ranks may have the same group */
};

/* A tensor's place in a job. Of each dimension that is divided, all parts are there, in order. */
struct ckpt_cuts {
    uint32_t stage; /* of the pipeline */
    uint32_t n;     /* 0: no dimension is divided */
    const struct ckpt_cut *cut;
};

/* A training run has several values of each parameter: its weight, the F32 master from which that
 * is rounded, and an optimizer's moments. A tensor that is none of the weights says which parameter
 * it belongs to. */
struct ckpt_state {
    const char *kind; /* "master", "exp_avg", "exp_avg_sq", "step", else the framework's word */
    const char *parameter; /* the parameter, as the framework's optimizer calls it */
    const char *weight; /* the name that the tensor with its weight has, which may be the same one;
                           of a parameter that is stored in another form, the name that it would
                           have; or NULL: nothing says it */
};

struct ckpt_value;

struct ckpt_tensor {
    const struct ckpt_catalog *cat; /* of whose sources the pieces are; it outlives the tensor */
    const char *name;               /* the catalogue's arena, as is everything below */
    const uint64_t
        *dim; /* in packs if the dtype is counted in them; the shape in elements follows */
    const struct ckpt_piece *piece; /* ascending by dst; empty if value, or if numel is 0 */
    const struct ckpt_value *value; /* not NULL: computed (tensor/value.h) */
    const struct ckpt_cuts *cuts;   /* how ranks share the tensor in a checkpoint that is to be
                                       written (see above); NULL: not known */
    const struct ckpt_state *state; /* NULL: a weight, or no parameter's */
    const char *opaque;             /* of dtype CKPT_OPAQUE: the word that names it; else NULL */
    uint64_t numel;
    uint64_t max_span; /* largest dst_end - dst of a piece: bounds the search for an element */
    size_t npiece;
    uint32_t block; /* not 0: neighbours with the same number go into the same file when a view is
                       split */
    uint16_t ranks; /* not 0: the first dimension counts this many ranks of a job, each with its own
                       part; only a recipe knows how to join the parts */
    uint8_t rank;
    uint8_t dtype;  /* enum ckpt_dtype */
    uint8_t wanted; /* not 0: one more than the dtype in which the checkpoint wants the tensor shown
                       (16-bit weights of which it stores only the F32 masters) */
};

/* The shape in elements, as safetensors has it: t->dim, but where the dtype is counted in packs or
 * bytes. */
static inline const uint64_t *ckpt_tensor_shape(const struct ckpt_tensor *t)
{
    return ckpt_dtype_pack((enum ckpt_dtype)t->dtype) == 1 ? t->dim : t->dim + t->rank;
}

/* The word of the dtype, as safetensors has it. */
static inline const char *ckpt_tensor_dtype_name(const struct ckpt_tensor *t)
{
    return t->opaque ? t->opaque : ckpt_dtype_name((enum ckpt_dtype)t->dtype);
}

/* The number of elements by the shape. */
uint64_t ckpt_tensor_elements(const struct ckpt_tensor *t);

struct ckpt_catalog {
    struct ckpt_arena arena;
    CKPT_VEC(struct ckpt_source *) sources; /* referenced */
    CKPT_VEC(struct ckpt_tensor) tensors;   /* in the order they were added */
    CKPT_VEC(struct ckpt_catalog *) kept;   /* owned: others, of whose tensors some are computed */
    struct ckpt_map by_name;
    /* the framework's own model config, an object; NULL if the checkpoint has none */
    json_t *config;
    json_t *about; /* facts for people and recipes: {"format": "nanotron", "version": "1.4", "step":
                      20, ...} */
    json_t *warnings; /* array of strings */
};

/* Make an empty catalogue. */
int ckpt_catalog_new(struct ckpt_catalog **ret, struct ckpt_err *err);
/* Makes a catalogue likewise, over the sources of another one, with copies of its facts, its config
 * and its warnings. */
int ckpt_catalog_new_like(const struct ckpt_catalog *of, struct ckpt_catalog **ret,
                          struct ckpt_err *err);
/* Free the catalogue with all memory of its arena, and give back its sources. */
void ckpt_catalog_free(struct ckpt_catalog *cat);
CKPT_CLEANUP_BY(ckpt_catalog_free, struct ckpt_catalog)

/* Add a source (references it); its index, or UINT32_MAX and NOMEM. */
uint32_t ckpt_catalog_add_source(struct ckpt_catalog *cat, struct ckpt_source *s,
                                 struct ckpt_err *err);

/* Add all sources of another catalogue, in their order. */
int ckpt_catalog_add_sources(struct ckpt_catalog *cat, const struct ckpt_catalog *from,
                             struct ckpt_err *err);

/* Add a tensor without pieces; name and dim are copied. CONFLICT if the name is there already,
 * LIMIT for rank > CKPT_MAX_RANK or a size of 2^63 bytes and more. *ret_index is its place in
 * cat->tensors. */
int ckpt_catalog_add(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                     const uint64_t *dim, uint32_t rank, size_t *ret_index, struct ckpt_err *err);

/* Adds a tensor likewise that lies in a source as a whole, row-major, from byte `src` on. */
int ckpt_catalog_add_whole(struct ckpt_catalog *cat, const char *name, enum ckpt_dtype dtype,
                           const uint64_t *dim, uint32_t rank, uint32_t source, uint64_t src,
                           struct ckpt_err *err);

/* Adds a tensor likewise whose dtype is not known: `word` names it, nbytes are its bytes.
 * UNSUPPORTED: the shape has no dimensions. */
int ckpt_catalog_add_opaque(struct ckpt_catalog *cat, const char *name, const char *word,
                            const uint64_t *shape, uint32_t rank, uint64_t nbytes, uint32_t source,
                            uint64_t src, struct ckpt_err *err);

/* Set the pieces of tensor `index`, or of one that is not in the catalogue (copied into it, sorted
 * by dst). Each piece's range is checked against its source's size. */
int ckpt_catalog_set_pieces(struct ckpt_catalog *cat, size_t index,
                            const struct ckpt_piece_draft *piece, size_t npiece,
                            struct ckpt_err *err);

/* Sets pieces as ckpt_catalog_set_pieces does, of a tensor that need not be in the catalogue. */
int ckpt_tensor_set_pieces(struct ckpt_catalog *cat, struct ckpt_tensor *t,
                           const struct ckpt_piece_draft *piece, size_t npiece,
                           struct ckpt_err *err);

/* Give a tensor of cat, or one that is not in it, the pieces of a tensor of another catalogue,
 * whose sources are sources of cat from number first_source on. */
int ckpt_tensor_copy_pieces(struct ckpt_catalog *cat, struct ckpt_tensor *to,
                            const struct ckpt_tensor *from, uint32_t first_source,
                            struct ckpt_err *err);

/* Add tensor t of another catalogue, pieces and all, whose sources are sources of cat from number
 * first_source on. */
int ckpt_catalog_copy(struct ckpt_catalog *cat, const struct ckpt_tensor *t, uint32_t first_source,
                      struct ckpt_err *err);

/* State which value of which parameter tensor `index` is; the texts are copied. weight may be NULL.
 */
int ckpt_catalog_set_state(struct ckpt_catalog *cat, size_t index, const struct ckpt_state *state,
                           struct ckpt_err *err);

/* Keep another catalogue, of whose tensors some of cat are computed, as long as cat lives: cat owns
 * it afterwards. NOMEM: it does not. */
int ckpt_catalog_keep(struct ckpt_catalog *cat, struct ckpt_catalog *other, struct ckpt_err *err);

/* The names of all tensors, in an array that the caller frees; NULL: out of memory. */
const char **ckpt_catalog_names(const struct ckpt_catalog *cat);

/* Keep the tensors that have an entry in name[] (as many as there are tensors), under that name,
 * which lies in the catalogue's arena. CONFLICT if two get the same. On failure the catalogue is
 * only good for freeing. */
int ckpt_catalog_select(struct ckpt_catalog *cat, const char *const *name, struct ckpt_err *err);

/* Reserve memory for n more tensors. NOMEM. */
int ckpt_catalog_reserve(struct ckpt_catalog *cat, size_t n, struct ckpt_err *err);

/* Free memory that was reserved for more tensors and sources. Moves the tensors. */
void ckpt_catalog_shrink(struct ckpt_catalog *cat);

/* Make a catalogue of the same tensors over the same sources, to change them there. Names, shapes
 * and pieces are those of cat, which must outlive it; tensors are found by number alone. */
int ckpt_catalog_alias(const struct ckpt_catalog *cat, struct ckpt_catalog **ret,
                       struct ckpt_err *err);

/* Find a tensor by its name; NULL: it is not there. */
const struct ckpt_tensor *ckpt_catalog_find(const struct ckpt_catalog *cat, const char *name);

/* Add a line to cat->warnings (one is kept of equal ones, and 1000 at most), made printable. */
void ckpt_catalog_warn(struct ckpt_catalog *cat, const char *fmt, ...) CKPT_PRINTF(2, 3);
/* Adds a line likewise that tells of nothing wrong, to the list "notes" of cat->about. */
void ckpt_catalog_note(struct ckpt_catalog *cat, const char *fmt, ...) CKPT_PRINTF(2, 3);

/* The size of all elements in bytes. */
uint64_t ckpt_tensor_nbytes(const struct ckpt_tensor *t);

/* Index of the first piece that may hold an element >= lo. */
size_t ckpt_tensor_first_piece(const struct ckpt_tensor *t, uint64_t lo);
