/* SPDX-License-Identifier: Apache-2.0 */
/* What all ranks of a job want, by tensor. Ranks with equal tables are one class. */
#ifndef CKPT_LOAD_JOB_WANTS_H
#define CKPT_LOAD_JOB_WANTS_H

#include <stdint.h>

#include "base/err.h"
#include "load/want.h"
#include "tensor/catalog.h"

struct ckpt_job_wants {
    const struct ckpt_catalog *cat; /* borrowed */
    uint32_t nrank, nclass;
    uint32_t *class_of;       /* per rank */
    struct ckpt_wants *table; /* per class */
    /* the ranks of class c: class_rank[class_first[c]] .. class_rank[class_first[c + 1]], ascending
     */
    uint32_t *class_first, *class_rank;
    /* wants of a tensor: use[first[t]] .. use[first[t+1]], by class, then by entry */
    uint64_t *first;
    struct ckpt_use {
        uint32_t class, entry;
    } * use;
};

/* Takes table and class_of (malloc'ed), whatever comes of it. */
int ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat, uint32_t nrank,
                        uint32_t *class_of, struct ckpt_wants *table, uint32_t nclass,
                        struct ckpt_err *err);
void ckpt_job_wants_release(struct ckpt_job_wants *r);

/* The uses of a tensor by a class are use[*ret_lo] .. use[return value]. */
uint64_t ckpt_job_wants_uses(const struct ckpt_job_wants *r, uint32_t tensor, uint32_t class,
                             uint64_t *ret_lo);

#endif
