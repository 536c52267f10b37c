/* SPDX-License-Identifier: Apache-2.0 */
/* The family of writers: one file, and one line of format/writers.def, each. */
#pragma once

#include "format/writer.h"

#define CKPT_WRITER(NAME) extern const struct ckpt_writer ckpt_writer_##NAME;
#include "format/writers.def"
#undef CKPT_WRITER

/* Ends with NULL. */
extern const struct ckpt_writer *const ckpt_writers[];

/* Does the format have all the dimensions that were given? `view` is the word of the option view,
 * for the message. USAGE. */
int ckpt_writers_check(const struct ckpt_output *o, const char *view, struct ckpt_err *err);
