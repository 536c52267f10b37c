/* SPDX-License-Identifier: Apache-2.0 */
/* Same-host copies: processes of one machine read each other's memory (process_vm_readv), so that
 * the kernel copies the bytes once, from the owner's buffer to the reader's.
 *
 * Each process has a word that says whether its buffers may be read; it is zero once they may not.
 * A reader looks at it after the bytes: only what was read while it stood is good. */
#ifndef CKPT_LOAD_SAME_HOST_H
#define CKPT_LOAD_SAME_HOST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A hash of the machine's name and boot. CKPTFS_NODE decides otherwise: tests play several. */
uint64_t ckpt_node_digest(void);

/* What a process tells another about itself. */
struct ckpt_same_host {
    uint64_t node;
    uint64_t pid;
    uint64_t at, word; /* where its word lies, and what it is */
};

/* `word` is not zero, and known to nobody else. */
void ckpt_same_host_self(struct ckpt_same_host *ret, const atomic_ullong *word);

/* Does a security module (Yama) let processes be read by their ancestors only, unless they permit
 * more? */
bool ckpt_same_host_restricted(void);

/* The nearest process that all of these are descendants of, or are themselves; 0: there is none but
 * init, or one of them cannot be seen. */
uint64_t ckpt_same_host_ancestor(const uint64_t *pid, size_t n);

/* Permit that process and its descendants to read this one, and take that back; counted. Several
 * permissions at a time are for the nearest common ancestor of all. */
void ckpt_same_host_permit(uint64_t ancestor);
void ckpt_same_host_forbid(void);

/* Is it this machine, and do we find the word there? */
bool ckpt_same_host_reach(const struct ckpt_same_host *of);

/* False: the bytes could not be read, or were not good any more. */
bool ckpt_same_host_read(const struct ckpt_same_host *of, void *buf, size_t len, uint64_t at);

#endif
