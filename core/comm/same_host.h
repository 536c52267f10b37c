/* SPDX-License-Identifier: Apache-2.0 */
/* Same-host copies: processes of one machine read each other's memory (process_vm_readv), so that
 * the kernel copies the bytes once, from the owner's buffer to the reader's.
 *
 * Each process has a word in memory: a random number while its buffers may be read, and zero
 * afterwards. A reader checks the word after it has copied bytes: if the word has changed, the
 * owner may have reused the buffer, and the copy is not valid. */
#ifndef CKPT_COMM_SAME_HOST_H
#define CKPT_COMM_SAME_HOST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A hash of the machine's name and boot id, equal for processes of one machine. If CKPTFS_NODE is
 * set, a hash of its value: tests play several machines. */
uint64_t ckpt_node_digest(void);

/* What another process must know to read from this one. */
struct ckpt_same_host {
    uint64_t node; /* ckpt_node_digest */
    uint64_t pid;
    uint64_t at, word; /* the address of the word, and its value */
};

/* Describe this process. `word` holds a random number that is not zero. */
void ckpt_same_host_self(struct ckpt_same_host *ret, const atomic_ullong *word);

/* Does the Yama security module restrict reading a process's memory to its ancestors, unless the
 * process permits another one? */
bool ckpt_same_host_restricted(void);

/* The nearest common ancestor of these processes (a process counts as its own ancestor). 0: there
 * is none but init, or one of the processes is not visible in /proc. */
uint64_t ckpt_same_host_ancestor(const uint64_t *pid, size_t n);

/* Permit a process and its descendants to read this one (PR_SET_PTRACER); forbid ends that. Calls
 * are counted. While there are several permissions, the nearest common ancestor of all is
 * permitted. From any thread. */
void ckpt_same_host_permit(uint64_t ancestor);
void ckpt_same_host_forbid(void);

/* Is that process on this machine, and can its word be read? */
bool ckpt_same_host_reach(const struct ckpt_same_host *of);

/* Copy len bytes from address `at` of that process. From any thread. False: they could not be read,
 * or the word has changed: buf is undefined then. */
bool ckpt_same_host_read(const struct ckpt_same_host *of, void *buf, size_t len, uint64_t at);

#endif
