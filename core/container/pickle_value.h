/* SPDX-License-Identifier: Apache-2.0 */
/* A pickle's values as JSON from which a program gets them back, and the flat names of state dicts.
 *
 * None, booleans, integers, finite floats, strings, lists (sets, too) and dicts with string keys
 * are what they are in JSON. All else is an object of one member, or two, that begins with '$':
 *
 *     {"$float": "nan"}            "inf", "-inf"
 *     {"$bytes": "00ff"}           hexadecimal
 *     {"$text": "00ff"}            a string that JSON can't hold: a NUL, no UTF-8; hexadecimal
 *     {"$tuple": [...]}
 *     {"$dict": [[key, value]]}    with keys that are no strings, or begin with '$'
 *     {"$object": "module.name"}   a class, a function, or what one would have made: never called.
 *                                  With "state" where it is known (argparse.Namespace) */
#pragma once

#include "base/json.h"
#include "container/pickle.h"

/* Limits: a few bytes of pickle can hold one value many times over. */
enum {
    CKPT_VALUE_MAX_DEPTH = 48,
    CKPT_VALUE_MAX_COUNT = 4 * 1000 * 1000,
    CKPT_VALUE_MAX_BYTES = 256 * 1024 * 1024, /* of text */
};

/* *ret is new. LIMIT: more than the limits. */
int ckpt_pickle_value(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* The same for configurations, where every value is what it is in JSON: sequences are lists, known
 * objects with a state (argparse.Namespace) are dicts, others are their dotted names
 * ("torch.bfloat16"). Bytes, tensors, NaN and infinities are null; members of a dict whose keys are
 * not strings are left out. */
int ckpt_pickle_plain(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* Add to the object `out` the members of a dict that are no tensors, under the names that torch's
 * distributed checkpoints give them: "a.b.0.c" for what lies in dicts, and in lists that hold
 * dicts or tensors; a list without any is one value. `prefix` ("" for none) comes before all. If v
 * is no dict, it is one value, named prefix. Dicts with tensors among rows of ckpt_torch_rules
 * only. */
int ckpt_pickle_leaves(const struct ckpt_pickle *p, ckpt_pv v, const char *prefix, json_t *out,
                       struct ckpt_err *err);
