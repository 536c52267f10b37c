/* SPDX-License-Identifier: Apache-2.0 */
/* Processes of one machine that read each other's memory: the kernel copies once, from where the
 * owner has the bytes to where the reader wants them (process_vm_readv).
 *
 * Each process has a word that says whether its buffers may be read; it is zero once they may not.
 * A reader looks at it after the bytes: only what was read while it stood is good. */
#ifndef CKPT_LOAD_NEAR_H
#define CKPT_LOAD_NEAR_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A hash of the machine's name and boot. CKPTFS_NODE decides otherwise: tests play several. */
uint64_t ckpt_node_digest(void);

/* What a process tells another about itself. */
struct ckpt_near {
    uint64_t node;
    uint64_t pid;
    uint64_t at, word; /* where its word lies, and what it is */
};

/* `word` is not zero, and known to nobody else. */
void ckpt_near_self(struct ckpt_near *ret, const atomic_ullong *word);

/* Let any process of this user read us, where a security module (Yama) asks for that: true, if it
 * was asked for; disallow takes one of those back, and the last of them the right. */
bool ckpt_near_allow(void);
void ckpt_near_disallow(void);

/* Is it this machine, and do we find the word there? */
bool ckpt_near_reach(const struct ckpt_near *of);

/* False: the bytes could not be read, or were not good any more. */
bool ckpt_near_read(const struct ckpt_near *of, void *buf, size_t len, uint64_t at);

#endif
