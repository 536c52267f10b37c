/* SPDX-License-Identifier: Apache-2.0 */
/* Axis patterns: each dimension of a tensor as a polynomial of named axes.
 *
 *     (kv_heads (q=share + k=1 + v=1) head_dim) h
 *
 * Juxtaposition multiplies (slowest first), + concatenates. Multiplied out, a pattern is a list of
 * terms; a term is a set of axes, one box of elements each, and what makes a rule is that terms
 * with equal axes on its two sides are the same elements. Sizes are variables, known only when a
 * checkpoint is there; everything else is checked when the text is parsed. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/mem.h"

enum {
    CKPT_SCOPE_AXES = 32, /* a set of axes is a uint32_t */
    CKPT_SCOPE_VARS = 32,
    CKPT_PATTERN_DIMS = 12,
    CKPT_PATTERN_SUMS = 16,
    CKPT_PATTERN_TERMS = 256,
};

/* The axes and sizes that the sides of one rule share. */
struct ckpt_scope {
    struct ckpt_scope_axis {
        /* the axis "..." represents all dimensions that a pattern does not spell out */
        const char *name;
        uint64_t size; /* if var < 0 */
        int8_t var;    /* the variable that is its size, or -1 */
        bool sized;    /* its size was given as "axis=size" */
    } axis[CKPT_SCOPE_AXES];
    struct ckpt_scope_var {
        const char *name;
        bool dim; /* named by the model file; else local to the rule */
    } var[CKPT_SCOPE_VARS];
    uint32_t naxis, nvar;
    struct ckpt_arena *arena; /* borrowed */
};

/* A text and where it came from, for errors: "<what>: '<text>' character 7: ...". */
struct ckpt_pattern_text {
    const char *what;
    const char *whole;   /* as written, prefixes included */
    const char *s;       /* what is parsed */
    const uint16_t *pos; /* index in whole of each byte of s, and of its end; NULL: the same */
};

/* The length of the word at the beginning of s: letters, digits and '_', but no digit first. */
size_t ckpt_word_len(const char *s);

/* Record a USAGE error at character `at` of the text. Always returns -1. */
int ckpt_pattern_fail(const struct ckpt_pattern_text *t, size_t at, struct ckpt_err *err,
                      const char *fmt, ...) CKPT_PRINTF(4, 5);

/* The axis or variable of that name, added if it is new; -1 and LIMIT or NOMEM. */
int ckpt_scope_axis(struct ckpt_scope *sc, const char *name, size_t len, struct ckpt_err *err);
int ckpt_scope_var(struct ckpt_scope *sc, const char *name, size_t len, struct ckpt_err *err);

/* Give every axis without "=" a variable of its own, which is a dim if its name has two letters or
 * more and does not begin with '_'. Call it after all sides were parsed. */
int ckpt_scope_close(struct ckpt_scope *sc, struct ckpt_err *err);

struct ckpt_factor {
    enum { CKPT_FACTOR_ONE, CKPT_FACTOR_AXIS, CKPT_FACTOR_PRODUCT, CKPT_FACTOR_SUM } kind;
    uint8_t axis; /* AXIS */
    uint8_t sum;  /* SUM: its number in the pattern */
    uint16_t nchild;
    const struct ckpt_factor *child; /* PRODUCT, SUM */
    const char *rank;                /* "X/tp": rank t holds the t-th equal part of X; or NULL */
    bool shared; /* "X/tp*": where there are more ranks than X's first factor has values, several
                    ranks have the same part */
};

struct ckpt_term {
    uint32_t axes;          /* of the dimensions and of the name */
    uint16_t side, partner; /* the side and term of the other direction with the same elements */
    uint8_t choice[CKPT_PATTERN_SUMS]; /* the chosen child of each sum; undefined for sums that the
                                          term does not contain */
};

struct ckpt_pattern {
    const struct ckpt_factor *dim;
    uint32_t ndim;   /* number of dimensions that are spelt out */
    int32_t rest_at; /* index in dim before which "..." stands, or -1 */
    uint32_t nsum;
    uint32_t axes; /* all of them, "..." too */
    const struct ckpt_term *term;
    uint32_t nterm;
};

/* Parse t->s[from..end of string) into out (the scope's arena). Blank text is no dimensions. */
int ckpt_pattern_parse(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, size_t from,
                       struct ckpt_pattern *out, struct ckpt_err *err);

/* Multiply out: fill term and nterm. name_axes are part of every term. Errors: an axis twice in a
 * term, two equal terms. */
int ckpt_pattern_terms(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, uint32_t name_axes,
                       struct ckpt_pattern *p, struct ckpt_err *err);

/* "q head_dim h", for messages; always terminated. Returns buf. */
char *ckpt_axes_text(const struct ckpt_scope *sc, uint32_t axes, char *buf, size_t cap);

/* Values of a scope's variables. */
struct ckpt_sizes {
    const struct ckpt_scope *scope;
    uint64_t var[CKPT_SCOPE_VARS];
    uint32_t known;
};

/* The size of an axis; false if unknown. */
bool ckpt_axis_size(const struct ckpt_sizes *s, uint32_t axis, uint64_t *ret);

enum ckpt_size_state { CKPT_SIZE_KNOWN, CKPT_SIZE_UNKNOWN, CKPT_SIZE_OVERFLOW };

/* The size of a factor. UNKNOWN: *ret_var is a variable that is needed. */
enum ckpt_size_state ckpt_factor_size(const struct ckpt_factor *f, const struct ckpt_sizes *s,
                                      uint64_t *ret, uint32_t *ret_var);

/* Solve f for its only unknown variable: true, and s is updated. False: there are several unknowns,
 * f is not linear, there is no integer solution, or the unknown is a dim, which may be solved for
 * only with `dims`, for a size that only says how one dimension is divided: several dims together
 * could match any shape and be wrong. */
bool ckpt_factor_solve(const struct ckpt_factor *f, struct ckpt_sizes *s, uint64_t size, bool dims);

/* The elements of a term in one dimension: index = offset + sum stride * axis, slowest axis first.
 */
struct ckpt_layout {
    uint64_t offset;
    uint32_t n;
    struct ckpt_layout_axis {
        uint64_t stride;
        uint8_t axis;
    } at[CKPT_SCOPE_AXES];
};
/* Compute the layout of a term in dimension f. All sizes must be known; the result cannot overflow.
 */
void ckpt_factor_layout(const struct ckpt_factor *f, const struct ckpt_term *term,
                        const struct ckpt_sizes *s, struct ckpt_layout *out);
