/* SPDX-License-Identifier: Apache-2.0 */
/* The table of readers. Each is one file and one line of format/readers.def. */
#pragma once

#include "format/reader.h"

#define CKPT_READER(NAME) extern const struct ckpt_reader ckpt_reader_##NAME;
#include "format/readers.def"
#undef CKPT_READER
