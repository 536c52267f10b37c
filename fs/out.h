/* SPDX-License-Identifier: Apache-2.0 */
/* What the tool prints: aligned columns, sizes for people, JSON for programs, and outlines of JSON
 * for people. */
#ifndef CKPT_FS_OUT_H
#define CKPT_FS_OUT_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include <ckptfs/ckptfs.h>

/* "512 B", "1.5 GiB". */
#define CKPT_OUT_SIZE 24
const char *ckpt_out_size(uint64_t bytes, char buf[CKPT_OUT_SIZE]);

/* Rows of `ncell / ncolumn` columns, each as wide as its widest cell. align[i] is 'l' or 'r'; head
 * is the first row, or NULL. */
void ckpt_out_table(const char *const *head, const char *align, size_t ncolumn, char *const *cell,
                    size_t ncell);

/* One JSON text, indented, and a newline. */
int ckpt_out_json(const json_t *j, struct ckpt_err *err);

/* The same facts without punctuation: "key: value" lines, lists as "- item". */
void ckpt_out_outline(const json_t *j);

/* Parse the library's JSON text. *ret is new. */
int ckpt_out_parse(const char *text, json_t **ret, struct ckpt_err *err);

/* Bold, if stdout is a terminal that wants it; and its end. */
const char *ckpt_out_bold(void);
const char *ckpt_out_plain(void);

#endif
