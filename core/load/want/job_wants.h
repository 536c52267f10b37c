/* SPDX-License-Identifier: Apache-2.0 */
/* The wants of all ranks of a job, indexed by tensor: the input of a plan. agree.c makes it after
 * the ranks have exchanged their wants, model.c for a job that does not exist. Ranks with equal
 * tables of wants form a class, which has one table. Tables that differ in their boxes alone have
 * one form: the first class that has it owns it, and stands for the others in the index. A rank may
 * leave out (as empty) tables of which it wants nothing, if they do not own a form. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "load/want/want.h"
#include "tensor/catalog.h"

struct ckpt_job_wants {
    const struct ckpt_catalog *cat; /* of what is read: the view's, which is borrowed, or `cast` */
    struct ckpt_catalog *cast;      /* the view's tensors in other dtypes; NULL: not needed */
    uint32_t nrank, nclass;
    uint32_t *class_of;       /* per rank */
    struct ckpt_wants *table; /* per class */
    /* The ranks of class c are class_rank[class_first[c]] .. class_rank[class_first[c + 1] - 1],
     * ascending. */
    uint32_t *class_first, *class_rank;
    uint32_t *next; /* per class: the next class whose table has the same form; or CKPT_NONE */
    /* The wants of tensor t are use[first[t]] .. use[first[t + 1] - 1], ordered by class, then by
     * entry of the class's table. They are also the wants of the classes next[class] and so on. */
    uint64_t *first;
    struct ckpt_use {
        uint32_t class, entry;
    } * use;
    bool *skip; /* per tensor: it is not sent, as all destinations have it; NULL: all are sent */
    uint64_t nskip;
};

/* Build the index. Takes table[nclass] and class_of[nrank], which are malloc'ed, even if it fails.
 * Where tables share a form, its owner is a table before them. NOMEM. */
int ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat, uint32_t nrank,
                        uint32_t *class_of, struct ckpt_wants *table, uint32_t nclass,
                        struct ckpt_err *err);

/* Read the tensors of a view (with the names, shapes and order of r->cat's) without rounding them
 * to the view's dtypes first: as they are stored (ckpt_value_unrounded), which placing casts. If
 * they travel, then in the wanted dtype, where all destinations of a tensor have the same one and
 * it is not wider. NOMEM, LIMIT; r->cat is the view's then. */
int ckpt_job_wants_cast(struct ckpt_job_wants *r, const struct ckpt_catalog *cat, bool travels,
                        struct ckpt_err *err);

/* The bytes of memory that the wants of all ranks take. */
uint64_t ckpt_job_wants_memory(const struct ckpt_job_wants *r);

/* Send all tensors. */
void ckpt_job_wants_skip_none(struct ckpt_job_wants *r);

/* Free what r owns, not r itself. */
void ckpt_job_wants_release(struct ckpt_job_wants *r);

/* Look up the wants that a class has of a tensor: use[*ret_lo] up to, but not including, use[the
 * returned number]. */
uint64_t ckpt_job_wants_uses(const struct ckpt_job_wants *r, uint32_t tensor, uint32_t class,
                             uint64_t *ret_lo);

/* Replica groups: sets of ranks that want exactly the same bytes of all tensors. On a mesh, the
 * ranks with the same coordinates in all dimensions that divide a tensor are a group; with FSDP,
 * every rank is a group of its own. model.c sums up the bytes of a job by group, so that the cost
 * depends on the number of different wants, not on the number of ranks. (The groups of groups.h are
 * found for each box of a tensor; a rank may be in many of them.) */
struct ckpt_replicas {
    uint32_t n;     /* number of groups; they are ordered by their first ranks */
    uint32_t *of;   /* per rank: its group */
    uint32_t *rank; /* per group: its first rank */
};

/* Find the replica groups of a job. The caller frees both arrays, also after a failure. NOMEM. */
int ckpt_replicas_find(const struct ckpt_job_wants *r, struct ckpt_replicas *ret,
                       struct ckpt_err *err);
