/* SPDX-License-Identifier: Apache-2.0 */
/* Output of the tool: aligned columns, human-readable sizes, JSON, and JSON as an outline. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include <ckptfs/ckptfs.h>

/* Write a size as "512 B" or "1.5 GiB". */
#define CKPT_OUT_SIZE 24
const char *ckpt_out_size(uint64_t bytes, char buf[CKPT_OUT_SIZE]);

/* n numbers, with a text between them, such as a shape; the caller frees it. NULL: no memory. */
char *ckpt_out_numbers(const uint64_t *number, size_t n, const char *between);

/* Print `ncell / ncolumn` rows in aligned columns. align[i] is 'l' or 'r'; head is the row of
 * titles, or NULL. */
void ckpt_out_table(const char *const *head, const char *align, size_t ncolumn, char *const *cell,
                    size_t ncell);

/* Print a JSON value, indented or as one line, with a final newline. */
int ckpt_out_json(const json_t *j, struct ckpt_err *err);
int ckpt_out_json_line(const json_t *j, struct ckpt_err *err);

/* Print a JSON value as an outline: "key: value" lines, with "- item" for the elements of lists. */
void ckpt_out_outline(const json_t *j);

/* Parse the library's JSON text. *ret is new. */
int ckpt_out_parse(const char *text, json_t **ret, struct ckpt_err *err);

/* The escape sequences that begin and end bold text, if stdout is a terminal that supports them;
 * else "". */
const char *ckpt_out_bold(void);
const char *ckpt_out_plain(void);

/* ---- a progress bar on stderr, drawn if that is a terminal ---- */

struct ckpt_progress {
    bool shown;       /* stderr is a terminal, and --quiet was not given */
    uint64_t begin;   /* by ckpt_now_ns */
    uint64_t already; /* bytes that were done before this run, which the rate does not count */
    uint64_t total;
};

/* Begin a bar of `total` bytes; `already` and `quiet` are as in the struct. */
void ckpt_progress_begin(struct ckpt_progress *p, uint64_t already, uint64_t total, bool quiet);

/* Redraw the bar. `name` is the item in progress. */
void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name);

/* Erase the bar. */
void ckpt_progress_end(const struct ckpt_progress *p);
