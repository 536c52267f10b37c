/* SPDX-License-Identifier: Apache-2.0 */
/* The family of readers: one file and one line each. */
#ifndef CKPT_CKPT_READERS_H
#define CKPT_CKPT_READERS_H

#include "ckpt/reader.h"

extern const struct ckpt_reader ckpt_reader_nanotron;
extern const struct ckpt_reader ckpt_reader_megatron;
extern const struct ckpt_reader ckpt_reader_dcp_hf;
extern const struct ckpt_reader ckpt_reader_dcp;
extern const struct ckpt_reader ckpt_reader_deepspeed;
extern const struct ckpt_reader ckpt_reader_rank_files;
extern const struct ckpt_reader ckpt_reader_hf;
extern const struct ckpt_reader ckpt_reader_peft;

#endif
