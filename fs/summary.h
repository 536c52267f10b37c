/* SPDX-License-Identifier: Apache-2.0 */
/* These functions print what the library says in JSON, as a few lines for people. */
#pragma once

#include <stdbool.h>

#include <jansson.h>

#include <ckptfs/err.h>

/* Print a run: `info` is the JSON of `ckpt info`. */
void ckpt_summary_of_run(const json_t *info);

/* Print where a tensor's bytes come from: `explained` is the JSON of `ckpt explain`. If its pieces
 * are boxes, a small picture shows which piece fills which part of the first two dimensions. */
void ckpt_summary_of_tensor(const json_t *explained);

/* Draw it into a file: a rectangle for each piece, coloured by shard, and the shards' names. */
int ckpt_summary_to_svg(const json_t *explained, const char *path, struct ckpt_err *err);

/* Print what a load would do: `plan` is the JSON of `ckpt plan`. multiplied: the number of ranks is
 * the product of the numbers of its layout. */
void ckpt_summary_of_plan(const json_t *plan, bool multiplied);
