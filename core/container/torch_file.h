/* SPDX-License-Identifier: Apache-2.0 */
/* A torch.save file that is open for reading: its archive, and its pickle as data. */
#pragma once

#include "base/json.h"
#include "container/pickle.h"
#include "container/torch.h"
#include "io/dir.h"
#include "io/source.h"

enum { CKPT_TORCH_MAX_PICKLE = 1 << 30 }; /* bytes */

/* All zero: nothing is open. */
struct ckpt_torch_file {
    struct ckpt_source *source;
    struct ckpt_torch archive;
    struct ckpt_pickle p;
};

/* Open a file below dir, whose name errors have; or the archive s, which is referenced. *ret is all
 * zero before, and can be released after a failure too. */
int ckpt_torch_file_open(struct ckpt_dir *dir, const char *name, struct ckpt_fdpool *pool,
                         struct ckpt_torch_file *ret, struct ckpt_err *err);
int ckpt_torch_file_read(struct ckpt_source *s, struct ckpt_torch_file *ret, struct ckpt_err *err);
void ckpt_torch_file_release(struct ckpt_torch_file *f);

/* Find out where tensor v of the file is stored. */
int ckpt_torch_file_tensor(const struct ckpt_torch_file *f, ckpt_pv v,
                           struct ckpt_torch_tensor *ret, struct ckpt_err *err);

/* UNSUPPORTED if the pickle asks for a call that only an attack needs ("os.system"). No function is
 * ever called here, but the pickle was made to call it where it is loaded with Python. */
int ckpt_torch_refuse_attack(const struct ckpt_pickle *p, struct ckpt_err *err);

/* Add the value of the archive s to the object `out` under a name, as ckpt_pickle_value
 * writes values; or, if `leaves`, the members of the dict that it is, or that is
 * alone in the list that it is. STALE if the file changed since it was opened. */
int ckpt_torch_object(struct ckpt_source *s, const char *name, bool leaves, json_t *out,
                      struct ckpt_err *err);

/* Add the members of the dict in a file below dir; `prefix` as in ckpt_pickle_leaves. */
int ckpt_torch_objects_of(struct ckpt_dir *dir, const char *file, struct ckpt_fdpool *pool,
                          const char *prefix, json_t *out, struct ckpt_err *err);

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
 *                                  With "state" where it is known (argparse.Namespace)
 *
 * Limits: a few bytes of pickle can hold one value many times over. */
enum {
    CKPT_VALUE_MAX_DEPTH = 48,
    CKPT_VALUE_MAX_COUNT = 4 * 1000 * 1000,
    CKPT_VALUE_MAX_BYTES = 256 * 1024 * 1024, /* of text */
};

/* *ret is new. LIMIT: more than the limits. */
int ckpt_pickle_value(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* Converts likewise for configurations, where every value is what it is in JSON: sequences are
 * lists, known objects with a state (argparse.Namespace) are dicts, others are their dotted names
 * ("torch.bfloat16"). Bytes, tensors, NaN and infinities are null; members of a dict whose keys are
 * not strings are left out. */
int ckpt_pickle_plain(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err);

/* Call fn for all values of a nested dict that are no dicts; their names are the keys, joined by
 * dots. FORMAT: a key is not UTF-8, or, if `strict`, no string (others are passed over). LIMIT: it
 * nests too deeply, or has too many values. `file` names it in errors. */
typedef int ckpt_pickle_value_fn(void *ctx, const char *name, ckpt_pv v, struct ckpt_err *err);
int ckpt_pickle_each(const struct ckpt_pickle *p, ckpt_pv dict, bool strict, const char *file,
                     ckpt_pickle_value_fn *fn, void *ctx, struct ckpt_err *err);

/* Add to the object `out` the members of a dict that are no tensors, under the names that torch's
 * distributed checkpoints give them: "a.b.0.c" for what lies in dicts, and in lists that hold
 * dicts or tensors; a list without any is one value. `prefix` ("" for none) comes before all. If v
 * is no dict, it is one value, named prefix. Dicts with tensors among rows of ckpt_torch_rules
 * only. */
int ckpt_pickle_leaves(const struct ckpt_pickle *p, ckpt_pv v, const char *prefix, json_t *out,
                       struct ckpt_err *err);
