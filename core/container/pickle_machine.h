/* SPDX-License-Identifier: Apache-2.0 */
/* The pickle's stack machine (pickle_machine.c), and what it keeps (pickle_keep.c).
 *
 * Functions return 0, or -1 with *m->err filled. */
#pragma once

#include "container/pickle.h"

enum {
    CKPT_PM_NO_GLOBAL = (1 << 28) - 1,      /* an opaque value that has no name */
    CKPT_PM_MAX_ID = CKPT_PM_NO_GLOBAL - 1, /* what a memo entry can hold */
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
