/* SPDX-License-Identifier: Apache-2.0 */
/* The first round of the agreement (agree.c): all ranks check that they load the same checkpoint
 * with the same options, and learn the facts about all ranks on which plans are built. All ranks
 * get the same facts from rank 0. */
#pragma once

#include <stdint.h>

#include "base/err.h"
#include "load/want/want.h"

struct ckpt_load;

/* Rank 0 sends these facts to all ranks. */
struct ckpt_job_facts {
    uint32_t nclass; /* number of different tables of wants */
    uint32_t nnode;  /* number of machines */
    uint32_t nshare; /* number of groups of options.share */
    /* 0 or 1: */
    uint32_t shared;       /* the files are on a storage that machines share */
    uint32_t copies;       /* not all ranks see the very same files: some see copies */
    uint32_t no_same_host; /* on some node, not all ranks can map each other's memory */
    uint32_t send_all;     /* ranks do not skip the same tensors (ckpt_job_wants.skip): none is */
    uint32_t alone;        /* not all ranks have the communicators of an earlier load */
    double cached;         /* fraction of the files in the page cache of the node that has least */
};

/* The facts, and what follows them in rank 0's answer. */
struct ckpt_job {
    struct ckpt_job_facts is;
    const uint32_t *class_of; /* per rank: ranks with equal tables have the same number */
    const uint32_t *node;     /* per rank: number of its machine */
    const uint32_t *share;    /* per rank: number of its group of options.share */
    const uint32_t *first_of; /* per class: its first rank */
    const uint32_t *owner_of; /* per class: the first class whose tables have the same form */
    uint64_t hash;            /* of all that rank 0 sent, for the check of the plans */
    unsigned char *answer;    /* in which the arrays lie; the caller frees it */
};

/* COLLECTIVE. Check that all ranks load the same tensors of the same step with the same options
 * (CONFLICT), and fill *ret. rc and *err are the result of what this rank did before: if it is
 * negative on any rank, all ranks fail with that rank's error. The caller frees ret->answer, also
 * after a failure. */
int ckpt_job_agree(struct ckpt_load *load, int rc, const struct ckpt_table *table,
                   struct ckpt_job *ret, struct ckpt_err *err);
