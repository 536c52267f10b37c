/* SPDX-License-Identifier: Apache-2.0 */
/* Name templates: tensor names with numbers that are axes.
 *
 *     layers.{layer}.experts.{r j}.{gate|up}_proj<.weight|>      experts[.{expert}].w1
 *
 * {layer} a number; {r j} a product, slowest first; {k+layers}, {k+1} an offset; {kinds:i} the i-th
 * entry of a list of the config; {expert/ep} a sharding annotation; {a|b} words, paired by position
 * with the words of the other side; <a|b> spellings; [.{expert}] may be absent: then the axis is
 * the tensor's first dimension. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "recipe/language/pattern.h"

enum {
    CKPT_NAME_PARTS = 32,
    CKPT_NAME_NUMBERS = 8,   /* limit of numbers in a name */
    CKPT_NAME_FACTORS = 4,   /* limit of factors of a number */
    CKPT_NAME_LEN = 4096,    /* limit of a name's length in bytes */
    CKPT_NAME_CHOICES = 256, /* limit of combinations of words */
};

struct ckpt_name_part {
    const char *text; /* NULL: a number */
    size_t len;
    const char *list; /* the config key of {list:axis}, or NULL */
    const char *rank;
    uint64_t plus;   /* {axis+3} */
    int8_t plus_var; /* {axis+layers}, or -1 */
    uint8_t naxis;
    uint8_t axis[CKPT_NAME_FACTORS];
};

struct ckpt_name {
    const struct ckpt_name_part *part;
    const char *text; /* for messages */
    uint32_t npart;
    uint32_t axes; /* the axes in the numbers */
    int8_t lead;   /* if an optional part is absent: the axis that is the tensor's first dimension
                      instead; or -1 */
};

/* The axes in the numbers, and `lead`. */
static inline uint32_t ckpt_name_axes(const struct ckpt_name *n)
{
    return n->axes | (n->lead >= 0 ? 1u << n->lead : 0);
}

/* The length of the name at the beginning of a side, which ends at the first blank outside of
 * braces. */
size_t ckpt_name_extent(const char *side);

/* The groups of words {a|b} in a name: their number, the number of words in each, and how many
 * combinations of words there are. */
struct ckpt_words {
    uint32_t n, total;
    uint32_t count[CKPT_NAME_NUMBERS];
};
/* Count the groups and their words. `what` names the text in errors. LIMIT. */
int ckpt_name_words(const char *what, const char *s, struct ckpt_words *ret, struct ckpt_err *err);
/* Get s with each group replaced by its word in the k-th combination, into the arena. `pos` gets,
 * for each byte of the result and for its end, the index in s. */
int ckpt_name_choose(struct ckpt_arena *arena, const char *s, const struct ckpt_words *words,
                     uint32_t k, char **ret, uint16_t **ret_pos, struct ckpt_err *err);

/* Parse all spellings of the name in t->s[0..len) into the scope's arena. Groups of words must have
 * been replaced. */
int ckpt_name_parse(struct ckpt_scope *sc, const struct ckpt_pattern_text *t, size_t len,
                    struct ckpt_name **ret, uint32_t *ret_n, struct ckpt_err *err);

/* Parse a text that is no part of a rule, as ckpt_name_parse does: its axes have names only. */
int ckpt_name_parse_alone(struct ckpt_arena *arena, const char *what, const char *text,
                          const struct ckpt_name **ret, uint32_t *ret_n, struct ckpt_err *err);

/* Parse the beginning of names, as ckpt_name_parse_alone does, with at most one number:
 * "layers.{l}.mlp.". FORMAT if it has several spellings or numbers. */
int ckpt_name_parse_start(struct ckpt_arena *arena, const char *what, const char *text,
                          const struct ckpt_name **ret, struct ckpt_err *err);

/* Does name[0..len) match? value[] gets the numbers, in order. */
bool ckpt_name_match(const struct ckpt_name *n, const char *name, size_t len,
                     uint64_t value[CKPT_NAME_NUMBERS]);

/* The length of the part of name[0..len) that matches, at its beginning; 0: it does not. */
size_t ckpt_name_match_start(const struct ckpt_name *n, const char *name, size_t len,
                             uint64_t value[CKPT_NAME_NUMBERS]);

/* Append the name with these numbers. */
void ckpt_name_render(const struct ckpt_name *n, const uint64_t value[CKPT_NAME_NUMBERS],
                      struct ckpt_str *out);

/* The name with every run of digits and every number replaced by '#', which is the same for a
 * template and all names that match it. */
void ckpt_name_skeleton(const char *s, size_t len, struct ckpt_str *out);
void ckpt_name_template_skeleton(const struct ckpt_name *n, struct ckpt_str *out);
