/* SPDX-License-Identifier: Apache-2.0 */
/* The table of readers. Each is one file and one line of ckpt/readers.def. */
#ifndef CKPT_CKPT_READERS_H
#define CKPT_CKPT_READERS_H

#include "ckpt/reader.h"

#define CKPT_READER(NAME) extern const struct ckpt_reader ckpt_reader_##NAME;
#include "ckpt/readers.def"
#undef CKPT_READER

#endif
