/* SPDX-License-Identifier: Apache-2.0 */
/* The facts about the ranks of a job on which a plan is built: all ranks have the same. */
#ifndef CKPT_LOAD_JOB_H
#define CKPT_LOAD_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct ckpt_load;

/* A rank's wants as bytes (ckpt_wants_dump). */
struct ckpt_table {
    unsigned char *data;
    size_t len;
};

struct ckpt_job {
    uint32_t nclass, nnode, nshare;
    uint32_t *class_of; /* per rank: ranks with equal wants have the same number */
    uint32_t *node;     /* per rank: the number of its machine */
    uint32_t *share;    /* per rank: the number of the caller's group in which it shares */
    uint32_t *first_of; /* per class: its first rank */
    double hot;         /* the part of the files that is in the page cache of every node */
    bool shared;        /* the files are on a storage that nodes share */
    bool copies;        /* not all ranks have the very same files */
    bool far;           /* some rank does not read the memory of all ranks of its node */
};

/* Number equal keys of n ranks in the order of their first rank; first (may be NULL): that rank of
 * each number; *ret_n: how many there are. -1: no memory. */
int ckpt_number_keys(const uint64_t (*key)[2], uint32_t n, uint32_t *ret, uint32_t *first,
                     uint32_t *ret_n);

/* COLLECTIVE. Find out whether all ranks load the same tensors of the same step with the same
 * options (else CONFLICT), and who wants the same. rc and *err are this rank's verdict so far: if
 * that of any rank is negative, all fail with its error. Release *ret after a failure, too. */
int ckpt_job_agree(struct ckpt_load *load, int rc, const struct ckpt_table *table,
                   struct ckpt_job *ret, struct ckpt_err *err);
void ckpt_job_release(struct ckpt_job *job);

#endif
