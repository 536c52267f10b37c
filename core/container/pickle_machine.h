/* SPDX-License-Identifier: Apache-2.0 */
/* The pickle's stack machine, for its own files: what it reads (pickle_input.c), what it keeps
 * (pickle_keep.c), what calls make (pickle_object.c), its opcodes (pickle_machine.c).
 *
 * Functions return 0, or -1 with *m->err filled. */
#pragma once

#include "container/pickle.h"

enum {
    CKPT_PM_NO_GLOBAL = (1 << 28) - 1,      /* an opaque value that has no name */
    CKPT_PM_MAX_ID = CKPT_PM_NO_GLOBAL - 1, /* what a memo entry can hold */
    CKPT_PM_WINDOW = 256 * 1024,            /* bytes of the input that are read at once */
    CKPT_PM_AHEAD = 16 << 20,               /* and that are fetched ahead, if they are far */
};

struct ckpt_pickle_machine {
    struct ckpt_pickle *p;
    struct ckpt_err *err;
    /* input: the window, and its position */
    const unsigned char *at, *stop;
    uint64_t pos, end; /* of `stop`, and of the pickle, in the source */
    struct ckpt_source *source;
    unsigned char *buf;
    size_t buf_cap;
    uint32_t *crc;  /* of all that was read; or NULL */
    uint64_t begin; /* of the pickle, in the source */
    /* stack */
    CKPT_VEC(ckpt_pv) stack;
    CKPT_VEC(uint32_t) marks;
    size_t floor;            /* the innermost mark */
    CKPT_VEC(uint32_t) memo; /* values whose id fits 28 bits; 0: none */
    CKPT_VEC(uint32_t) free_boxes;
    /* tuples of integers that there are: their place + 1 */
    uint32_t *tuple;
    size_t tuple_cap, ntuple;
    CKPT_VEC(uint32_t) slot_name; /* CKPT_PICKLE_MAX_SLOTS strings for each row of the table */
};

/* ---- input ---- */

/* Have at least n bytes in the window, moving it. */
int ckpt_pm_refill(struct ckpt_pickle_machine *m, size_t n);

/* A length of n bytes, and then as many bytes, which stay until the window moves. */
int ckpt_pm_take_counted(struct ckpt_pickle_machine *m, unsigned n, const char **ret,
                         size_t *ret_len);

/* Record that the pickle ends too early. Returns -1. */
int ckpt_pm_fail_end(struct ckpt_pickle_machine *m);

/* Bytes of the pickle that were not taken. */
static inline uint64_t ckpt_pm_left(const struct ckpt_pickle_machine *m)
{
    return (uint64_t)(m->stop - m->at) + (m->end - m->pos);
}

/* Have at least n bytes in the window. */
static inline int ckpt_pm_need(struct ckpt_pickle_machine *m, size_t n)
{
    return (size_t)(m->stop - m->at) >= n ? 0 : ckpt_pm_refill(m, n);
}

/* Take a number of n bytes, little-endian, which are in the window. */
static inline uint64_t ckpt_pm_take_le(struct ckpt_pickle_machine *m, unsigned n)
{
    uint64_t v = 0;

    for (unsigned i = 0; i < n; i++)
        v |= (uint64_t)m->at[i] << 8 * i;
    m->at += n;
    return v;
}

/* ---- stack ---- */

static inline int ckpt_pm_push(struct ckpt_pickle_machine *m, ckpt_pv v)
{
    if (m->stack.len >= CKPT_PICKLE_MAX_STACK)
        return ckpt_fail(m->err, CKPT_LIMIT, "more than %d values on the stack",
                         CKPT_PICKLE_MAX_STACK);
    return ckpt_vec_push(&m->stack, v) < 0 ? ckpt_nomem(m->err) : 0;
}

/* FORMAT if there are fewer than n values above the innermost mark. */
static inline int ckpt_pm_has(struct ckpt_pickle_machine *m, size_t n)
{
    return m->stack.len - m->floor >= n
               ? 0
               : ckpt_fail(m->err, CKPT_FORMAT, "takes more values than the stack holds");
}

static inline ckpt_pv *ckpt_pm_top(struct ckpt_pickle_machine *m)
{
    return &m->stack.ptr[m->stack.len - 1];
}

/* ---- what is kept ---- */

/* LIMIT if there are too many values to number another. */
int ckpt_pm_check_id(struct ckpt_pickle_machine *m, size_t id);

/* The number of a string, which is kept once. */
int ckpt_pm_str(struct ckpt_pickle_machine *m, const char *ptr, size_t len, uint32_t *ret);

/* The tuple of these INT values, kept once; and whether all are INT. */
int ckpt_pm_ints(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret);
bool ckpt_pm_all_ints(const ckpt_pv *v, size_t n);

/* A tuple of any values; v may be part of the stack. */
int ckpt_pm_tuple(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret);

/* An object of a global that has this row of the table. */
int ckpt_pm_obj(struct ckpt_pickle_machine *m, uint64_t global, int rule, ckpt_pv args,
                ckpt_pv *ret);

/* Boxes are lists and dicts: is it one, a new one, and further values for one. */
bool ckpt_pm_is_box(ckpt_pv v);
int ckpt_pm_box(struct ckpt_pickle_machine *m, enum ckpt_pv_kind kind, ckpt_pv *ret);
int ckpt_pm_add(struct ckpt_pickle_machine *m, ckpt_pv box, const ckpt_pv *v, size_t n);

/* Free a dict or list that is no longer needed. If nothing else can refer to it, its memory is
 * reused for the next one, and the memo drops it. */
void ckpt_pm_recycle(struct ckpt_pickle_machine *m, ckpt_pv v);

/* Record "what", and what v is. Returns -1. */
int ckpt_pm_fail_kind(struct ckpt_pickle_machine *m, ckpt_pv v, const char *what);

/* ---- globals and objects: opcodes ---- */

/* STACK_GLOBAL, GLOBAL. */
int ckpt_pm_stack_global(struct ckpt_pickle_machine *m);
int ckpt_pm_text_global(struct ckpt_pickle_machine *m);

/* REDUCE, NEWOBJ, NEWOBJ_EX: `n` values, which are class, arguments, and keyword arguments, which
 * are dropped. */
int ckpt_pm_reduce(struct ckpt_pickle_machine *m, size_t n);

/* BINPERSID, BUILD. */
int ckpt_pm_persistent_id(struct ckpt_pickle_machine *m);
int ckpt_pm_build(struct ckpt_pickle_machine *m);
