/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor as torch.save writes it into a stream (torch 2.7 to 2.14), all but the tensor's bytes:
 *
 *     head, nbytes bytes of the tensor, tail
 *
 * The archive has a CRC of every record, which needs all of the tensor's bytes. It is written as
 * after torch.serialization.set_crc32_options(False): the CRCs are 0, and torch does not look at
 * them. Byte for byte what torch writes then, the serialization_id included. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "base/str.h"
#include "tensor/dtype.h"

/* ---- pickles of protocol 2 ---- */

/* Writing pickles of protocol 2: the opcodes that the objects of a checkpoint need. What is
 * appended to the text is what Python's pickler writes for the same object, if the caller puts
 * objects into the memo where Python does. */

struct ckpt_pickle_out {
    struct ckpt_str *out;
    uint32_t memo; /* entries so far */
};

/* Opcodes without arguments, to be written one after the other. */
#define CKPT_PICKLE_OUT_MARK "("
#define CKPT_PICKLE_OUT_STOP "."
#define CKPT_PICKLE_OUT_POP "0"
#define CKPT_PICKLE_OUT_EMPTY_TUPLE ")"
#define CKPT_PICKLE_OUT_TUPLE "t"
#define CKPT_PICKLE_OUT_TUPLE1 "\x85"
#define CKPT_PICKLE_OUT_EMPTY_DICT "}"
#define CKPT_PICKLE_OUT_EMPTY_LIST "]"
#define CKPT_PICKLE_OUT_APPENDS "e"
#define CKPT_PICKLE_OUT_SETITEMS "u"
#define CKPT_PICKLE_OUT_NONE "N"
#define CKPT_PICKLE_OUT_TRUE "\x88"
#define CKPT_PICKLE_OUT_FALSE "\x89"
#define CKPT_PICKLE_OUT_PERSID "Q"
#define CKPT_PICKLE_OUT_REDUCE "R"
#define CKPT_PICKLE_OUT_NEWOBJ "\x81"
#define CKPT_PICKLE_OUT_BUILD "b"
void ckpt_pickle_out_ops(struct ckpt_pickle_out *p, const char *ops);

/* The head of a stream. */
void ckpt_pickle_out_begin(struct ckpt_pickle_out *p);

/* Push a class or function. */
void ckpt_pickle_out_global(struct ckpt_pickle_out *p, const char *module, const char *name);

/* Begin an OrderedDict, which SETITEMS ends. */
void ckpt_pickle_out_ordered(struct ckpt_pickle_out *p);

/* Push a number; a string. */
void ckpt_pickle_out_u64(struct ckpt_pickle_out *p, uint64_t n);
void ckpt_pickle_out_float(struct ckpt_pickle_out *p, double x);
void ckpt_pickle_out_text(struct ckpt_pickle_out *p, const char *text);

/* Push a JSON value: dicts, lists, strings, numbers, booleans, None; {"$tuple": [...]} is a tuple.
 * A string that is the name of a dtype ("torch.bfloat16") becomes that. */
void ckpt_pickle_out_json(struct ckpt_pickle_out *p, const json_t *j);

/* Put the object on top of the stack into the memo, as its next entry. */
void ckpt_pickle_out_put(struct ckpt_pickle_out *p);

/* Push an entry of the memo again. */
void ckpt_pickle_out_get(struct ckpt_pickle_out *p, uint32_t entry);

/* Push a tuple of numbers. `put`: into the memo, too, if it is not empty, as Python does. */
void ckpt_pickle_out_tuple(struct ckpt_pickle_out *p, const uint64_t *n, uint32_t count, bool put);

struct ckpt_torch_out {
    enum ckpt_dtype dtype;
    const uint64_t *dim; /* contiguous, row-major */
    uint32_t rank;       /* CKPT_MAX_RANK at most */
    uint64_t nbytes;
};

/* Append the archive of a tensor, all but the tensor's bytes, which belong behind *ret_at bytes of
 * what is appended. */
void ckpt_torch_out(const struct ckpt_torch_out *t, struct ckpt_str *text, size_t *ret_at);

struct ckpt_pickle_out;

/* Push the tensor; its bytes are record data/KEY of the archive. */
void ckpt_torch_out_tensor(struct ckpt_pickle_out *p, const struct ckpt_torch_out *t,
                           const char *key);

/* The content of a file of torch.save: a pickled object with n tensors (0, 1 ...). */
struct ckpt_torch_archive {
    const char *folder; /* of its records: "archive/", or a file's name without its suffix */
    const char *pickle; /* len bytes */
    size_t len;
    const uint64_t *nbytes; /* of each tensor */
    size_t n;
};

/* Append the file, all but the bytes of its tensors: those of tensor i belong behind ret_at[i]
 * bytes of what is appended. NOMEM. */
int ckpt_torch_out_file(const struct ckpt_torch_archive *f, struct ckpt_str *text, size_t *ret_at,
                        struct ckpt_err *err);

/* Append the file of an object that has no tensors. */
void ckpt_torch_out_pickle(const char *folder, const char *pickle, size_t len,
                           struct ckpt_str *out);

/* Append the archive of a JSON value, as ckpt_pickle_out_json has it. */
void ckpt_torch_out_json(const json_t *j, struct ckpt_str *out);

/* Append the file of the object [None]. */
void ckpt_torch_out_none(struct ckpt_str *out);
