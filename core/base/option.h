/* SPDX-License-Identifier: Apache-2.0 */
/* A row of a table of options. The library has such a table (model/options.c), and the programs
 * have one (fs/options.c). Parsing, --help and the shell completions are made of the rows. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The kind says what a value may be, and the type of the member in which it is stored. */
enum ckpt_option_kind {
    CKPT_OPTION_FLAG,    /* bool: yes, no, true, ...; an option without a value means yes */
    CKPT_OPTION_TEXT,    /* char *, a copy */
    CKPT_OPTION_PATH,    /* char *, made absolute, because daemons change their directory */
    CKPT_OPTION_CHOICE,  /* uint32_t or an enumeration: `least` for the first of the words */
    CKPT_OPTION_NUMBER,  /* uint32_t, from `least` to `most` */
    CKPT_OPTION_OCTAL,   /* the same, written in octal */
    CKPT_OPTION_BYTES,   /* uint64_t; the units K, M, G and T are powers of 1024 */
    CKPT_OPTION_SECONDS, /* uint32_t milliseconds */
};

struct ckpt_option {
    const char *word;
    const char *value; /* as help has it: "DIR", or the words of a choice, "auto|never|always";
                          NULL: the option is a flag */
    const char *help;  /* NULL: help does not list the option */
    const char *also;  /* what other programs call the option, as ckpt_words_find has it; or NULL */
    enum ckpt_option_kind kind;
    size_t at; /* the member's offset in the struct that is filled */
    uint32_t least, most;
    unsigned topic; /* in the library's table: an enum ckpt_option_topic */
    /* Store the value instead; `into` is the struct that is filled. NULL: `kind` says how. */
    int (*set)(void *into, const struct ckpt_option *o, const char *value, struct ckpt_err *err);
    /* For a program's table: */
    char letter;         /* of the short form; 0: none */
    bool takes_rest;     /* the value is the rest of the command line, as it is */
    uint32_t of;         /* the commands that take the option, as bits */
    uint32_t refused_by; /* those that have no use for it */
    const char *why;     /* the reason, and what to do */
};

/* Parse the value (NULL: none was given) and store it in the struct `into`. USAGE. */
int ckpt_option_set(const struct ckpt_option *o, void *into, const char *value,
                    struct ckpt_err *err);

/* Which of the words of o->value is it? The first is 0. USAGE. */
int ckpt_option_choice(const struct ckpt_option *o, const char *value, uint32_t *ret,
                       struct ckpt_err *err);

/* Are these the same letter of a word? '-' and '_' are equal. */
static inline bool ckpt_option_same_letter(char a, char b)
{
    return (a == '-' ? '_' : a) == (b == '-' ? '_' : b);
}

/* Find a word in a list such as "precision bf16:bfloat16", whose words are separated by spaces and
 * may have a value after ':'. '-' and '_' are equal. Returns what follows the word in the list, so
 * ":bfloat16" or less; NULL: the list, which may be NULL, has no such word. */
const char *ckpt_words_find(const char *list, const char *word);

/* Translate another program's word for the option into what the user should write:
 * "dtype=bfloat16". The caller frees it; NULL: the word is not in o->also, or memory ran out. */
char *ckpt_option_meant(const struct ckpt_option *o, const char *word);

/* The word that was meant by one that is not known. */
struct ckpt_near {
    const char *word;  /* NULL: none is near */
    unsigned distance; /* letters that must be inserted, removed or replaced */
};

/* Keep the word, which is borrowed, if none before was as near to the one that was written. Where
 * they differ, words are compared up to 63 letters. */
void ckpt_near_consider(struct ckpt_near *near, const char *written, const char *word);
