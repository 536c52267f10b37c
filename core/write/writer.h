/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of a writer, which is to a format what a reader (ckpt/reader.h) is: a file of its
 * own in this folder, and one line in writers.def. */
#ifndef CKPT_WRITE_WRITER_H
#define CKPT_WRITE_WRITER_H

#include <stdbool.h>

#include "write/output.h"

/* Bits of ckpt_writer.keys: 1 << enum ckpt_cut_by, and these. */
enum {
    CKPT_WRITES_NAMES = 1 << CKPT_NCUT,      /* the option names= */
    CKPT_WRITES_SIZE = 1 << (CKPT_NCUT + 1), /* the option max_shard_size= */
};

struct ckpt_writer {
    const char *name;   /* the word of the option view */
    unsigned keys;      /* the options that the format has */
    const char *layout; /* how its files are cut, for whoever gives another option */
    bool ready;         /* false: it is not supported yet */
};

#endif
