/* SPDX-License-Identifier: Apache-2.0 */
/* Writing pickles of protocol 2: the opcodes that the objects of a checkpoint need. What is
 * appended to the text is what Python's pickler writes for the same object, if the caller puts
 * objects into the memo where Python does. */
#pragma once

#include <stdint.h>

#include "base/json.h"
#include "base/str.h"

struct ckpt_pickle_out {
    struct ckpt_str *out;
    uint32_t memo; /* entries so far */
};

/* Opcodes without arguments. */
enum {
    CKPT_PICKLE_OUT_MARK = '(',
    CKPT_PICKLE_OUT_STOP = '.',
    CKPT_PICKLE_OUT_POP = '0',
    CKPT_PICKLE_OUT_EMPTY_TUPLE = ')',
    CKPT_PICKLE_OUT_TUPLE = 't',
    CKPT_PICKLE_OUT_TUPLE1 = 0x85,
    CKPT_PICKLE_OUT_EMPTY_DICT = '}',
    CKPT_PICKLE_OUT_EMPTY_LIST = ']',
    CKPT_PICKLE_OUT_APPEND = 'a',
    CKPT_PICKLE_OUT_APPENDS = 'e',
    CKPT_PICKLE_OUT_SETITEMS = 'u',
    CKPT_PICKLE_OUT_NONE = 'N',
    CKPT_PICKLE_OUT_TRUE = 0x88,
    CKPT_PICKLE_OUT_FALSE = 0x89,
    CKPT_PICKLE_OUT_PERSID = 'Q',
    CKPT_PICKLE_OUT_REDUCE = 'R',
    CKPT_PICKLE_OUT_NEWOBJ = 0x81,
    CKPT_PICKLE_OUT_BUILD = 'b',
};
void ckpt_pickle_out_op(struct ckpt_pickle_out *p, int op);

/* The head of a stream. */
void ckpt_pickle_out_begin(struct ckpt_pickle_out *p);

/* Push a class or function. */
void ckpt_pickle_out_global(struct ckpt_pickle_out *p, const char *module, const char *name);

void ckpt_pickle_out_u64(struct ckpt_pickle_out *p, uint64_t n);
void ckpt_pickle_out_float(struct ckpt_pickle_out *p, double x);

/* Push a JSON value: dicts, lists, strings, numbers, booleans, None. A string that is the name of a
 * dtype ("torch.bfloat16") becomes that. */
void ckpt_pickle_out_json(struct ckpt_pickle_out *p, const json_t *j);

void ckpt_pickle_out_text(struct ckpt_pickle_out *p, const char *text);

/* Put the object on top of the stack into the memo, as its next entry. */
void ckpt_pickle_out_put(struct ckpt_pickle_out *p);

/* Push an entry of the memo again. */
void ckpt_pickle_out_get(struct ckpt_pickle_out *p, uint32_t entry);

/* Push a tuple of numbers. `put`: into the memo, too, if it is not empty, as Python does. */
void ckpt_pickle_out_tuple(struct ckpt_pickle_out *p, const uint64_t *n, uint32_t count, bool put);
