/* SPDX-License-Identifier: Apache-2.0 */
/* Reading pickles as data (CPython's Modules/_pickle.c, protocols 2 to 5): nothing is ever called.
 *
 * The result is a tree of 8-byte values. The caller's table lists the known globals. An object of
 * any other class, and the result of any other function, is one opaque value that only remembers
 * the global's name. Built for large files: the input is read in windows, equal strings and equal
 * tuples of integers are stored once, and the memory of a state is reused after it was put into its
 * object. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "io/source.h"

/* Limits. All memory is also bounded by the length of the pickle. */
enum {
    CKPT_PICKLE_MAX_STACK = 1 << 24, /* values at once */
    CKPT_PICKLE_MAX_MARKS = 1024,    /* nesting */
    CKPT_PICKLE_MAX_STRING = 1 << 24,
    CKPT_PICKLE_MAX_SLOTS = 8,
};

typedef uint64_t ckpt_pv;

enum ckpt_pv_kind {
    CKPT_PV_ABSENT, /* a slot that the state did not set */
    CKPT_PV_NONE,
    CKPT_PV_BOOL,
    CKPT_PV_INT, /* of 60 bits; larger ones are opaque */
    CKPT_PV_FLOAT,
    CKPT_PV_STR,
    CKPT_PV_BYTES,
    CKPT_PV_INTS,  /* a tuple of integers, the empty tuple, a torch.Size */
    CKPT_PV_INTS1, /* a tuple that holds one of those */
    CKPT_PV_TUPLE,
    CKPT_PV_LIST, /* also sets */
    CKPT_PV_DICT,
    CKPT_PV_GLOBAL,
    CKPT_PV_OBJ, /* of a class, or the result of a function, of the table */
    CKPT_PV_OPAQUE,
};

enum ckpt_pickle_role {
    CKPT_PICKLE_OBJ,  /* class or function: becomes an object that keeps arguments and state */
    CKPT_PICKLE_SIZE, /* torch.Size: its argument */
    CKPT_PICKLE_DICT, /* OrderedDict: a dict */
};

struct ckpt_pickle_global {
    const char *module; /* NULL: any (a plug-in's own copy of a known class) */
    const char *name;
    enum ckpt_pickle_role role;
    /* OBJ: names of the state's members that are kept, each in its slot; NULL-terminated. Without
     * them the arguments are slot 0 and the whole state is slot 1. */
    const char *const *slot;
};

struct ckpt_pickle_rules {
    const struct ckpt_pickle_global *global; /* the end has no name */
    bool persid;                             /* BINPERSID is expected: an object of no class */
};

enum { CKPT_PICKLE_PERSID = -1, CKPT_PICKLE_OTHER = -2 };

struct ckpt_pickle_str {
    const char *ptr; /* NUL-terminated; may hold others */
    uint32_t len;
};

/* A list, or a dict: keys and values in turn. */
struct ckpt_pickle_box {
    ckpt_pv *ptr;
    uint32_t len, cap;
    uint32_t memo; /* its number in the memo + 1 */
    bool shared;   /* more than one place may hold it */
};

/* A global that occurs in the pickle. */
struct ckpt_pickle_name {
    uint32_t module, name; /* strings */
    int32_t rule;          /* row of the table, or OTHER */
};

/* The tree. Values are valid as long as it exists. */
struct ckpt_pickle {
    const struct ckpt_pickle_rules *rules;
    struct ckpt_arena text;
    CKPT_VEC(struct ckpt_pickle_str) strs;
    struct ckpt_map str_ids;
    CKPT_VEC(int64_t) ints;   /* n, then n integers */
    CKPT_VEC(uint64_t) words; /* tuples: n, then n values; objects: global, slots */
    CKPT_VEC(double) floats;
    CKPT_VEC(struct ckpt_pickle_box) boxes;
    CKPT_VEC(struct ckpt_pickle_name) globals;
    ckpt_pv root;
};

/* Parse bytes [off, off+len) of s, or of memory. ret_crc, if not NULL: the CRC-32 of all of them.
 */
int ckpt_pickle_read(struct ckpt_source *s, uint64_t off, uint64_t len,
                     const struct ckpt_pickle_rules *rules, uint32_t *ret_crc,
                     struct ckpt_pickle *ret, struct ckpt_err *err);
int ckpt_pickle_parse(const void *data, size_t len, const struct ckpt_pickle_rules *rules,
                      struct ckpt_pickle *ret, struct ckpt_err *err);
void ckpt_pickle_release(struct ckpt_pickle *p);

static inline enum ckpt_pv_kind ckpt_pv_kind(ckpt_pv v) { return (enum ckpt_pv_kind)(v & 15); }
static inline uint64_t ckpt_pv_id(ckpt_pv v) { return v >> 4; }
static inline ckpt_pv ckpt_pv_make(enum ckpt_pv_kind kind, uint64_t id)
{
    return id << 4 | (uint64_t)kind;
}

/* INT; false if it is something else. */
bool ckpt_pv_int(ckpt_pv v, int64_t *ret);

/* STR without a NUL inside; else NULL. */
const char *ckpt_pv_str(const struct ckpt_pickle *p, ckpt_pv v);

/* A list or tuple of any kind: its length (0 for others) and members. */
bool ckpt_pv_is_seq(ckpt_pv v);
size_t ckpt_pv_len(const struct ckpt_pickle *p, ckpt_pv v);
ckpt_pv ckpt_pv_at(const struct ckpt_pickle *p, ckpt_pv v, size_t i);

/* INTS: its integers. */
const int64_t *ckpt_pv_ints(const struct ckpt_pickle *p, ckpt_pv v, size_t *ret_n);

/* A list or tuple of integers as INTS (ABSENT if it is not one). */
ckpt_pv ckpt_pickle_pack(struct ckpt_pickle *p, ckpt_pv seq);

/* DICT: number of pairs, keys and values in the order of the file (a key may come twice: the last
 * one counts). */
size_t ckpt_pv_npair(const struct ckpt_pickle *p, ckpt_pv v);
ckpt_pv ckpt_pv_key(const struct ckpt_pickle *p, ckpt_pv v, size_t i);
ckpt_pv ckpt_pv_value(const struct ckpt_pickle *p, ckpt_pv v, size_t i);

/* The value of a string key; ABSENT. Linear. */
ckpt_pv ckpt_pv_get(const struct ckpt_pickle *p, ckpt_pv dict, const char *key);

/* OBJ: its row of the table (PERSID for a persistent id) and its slots; ABSENT past the last. A
 * GLOBAL's row. OTHER for everything else. */
int ckpt_pv_rule(const struct ckpt_pickle *p, ckpt_pv v);
ckpt_pv ckpt_pv_slot(const struct ckpt_pickle *p, ckpt_pv v, unsigned i);

/* Slots of an object of this row of the table. */
static inline unsigned ckpt_pickle_nslot(const struct ckpt_pickle *p, int rule)
{
    const char *const *slot = rule >= 0 ? p->rules->global[rule].slot : NULL;
    unsigned n = 0;

    while (slot && slot[n])
        n++;
    return slot ? n : 2;
}

/* GLOBAL, OBJ, OPAQUE: what the pickle calls it, "" if nothing. */
const char *ckpt_pv_module(const struct ckpt_pickle *p, ckpt_pv v);
const char *ckpt_pv_name(const struct ckpt_pickle *p, ckpt_pv v);

struct ckpt_pv_text {
    char text[160];
};
/* "os.system", "a string", "None": for messages, as ckpt_pv_text(p, v).text. */
struct ckpt_pv_text ckpt_pv_text(const struct ckpt_pickle *p, ckpt_pv v);
