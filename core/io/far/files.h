/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of files on storage at a distance, which threads of this process read: up to 32 at once, in
 * at most 256 MiB. Threads and memory come with the first request, and go when nothing was asked
 * for during some seconds. A thread that hangs in a read stays, and counts, and so does the memory
 * of its part, until the kernel has returned. */
#pragma once

#include "io/far/far.h"

/* A file, as `what` of a struct ckpt_far_object. */
struct ckpt_far_file {
    /* Count a reference to the file, and give it back, without the lock. */
    void *(*ref)(void *file);
    void (*unref)(void *file);
    /* Read bytes [off, off+len) into buf, which is aligned to CKPT_PARTS_UNIT, and has room for len
     * rounded up to it. 0, or -1 and *err, whose text names the file. */
    int (*read)(void *file, bool shared, unsigned char *buf, size_t len, uint64_t off,
                struct ckpt_err *err);
    void *file;
    uint32_t at_once; /* parts that are read at once */
    bool shared;      /* other processes of this machine will read the same: for the page cache */
};

/* The parts of all files of this process. Always the same. */
struct ckpt_far *ckpt_far_files(void);
