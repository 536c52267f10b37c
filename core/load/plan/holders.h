/* SPDX-License-Identifier: Apache-2.0 */
/* Which member of a group reads which unit where ranks have different files (`ckpt load --local`):
 * one that has the unit's file. The members then read as equally much as their files permit, and
 * where all have all files, nothing is chosen and the plan is that of any other load. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/vec.h"
#include "load/want/rank_lists.h"
#include "tensor/catalog.h"

/* The ranks that have each file of a job. Files that the same ranks have are in one set. */
struct ckpt_holders {
    uint32_t *set; /* per source of the catalogue: the number of its set; CKPT_NONE: all ranks have
                      it, or it is no file */
    uint32_t nsource;
    CKPT_VEC(ckpt_numbers) ranks; /* per set: the ranks, ascending */
};

/* Find them out for a job of nrank ranks. There are no sets if all ranks have all files. *ret is
 * zero-initialised, and released after a failure, too. NOMEM. */
int ckpt_holders_find(const struct ckpt_catalog *cat, uint32_t nrank, struct ckpt_holders *ret,
                      struct ckpt_err *err);
void ckpt_holders_release(struct ckpt_holders *h);

/* The number of a file's set. */
static inline uint32_t ckpt_holders_set(const struct ckpt_holders *h, uint32_t source)
{
    return source < h->nsource ? h->set[source] : CKPT_NONE;
}

/* A unit of a group. */
struct ckpt_held {
    uint32_t source; /* its file in the catalogue; UINT32_MAX: not known */
    uint32_t len;    /* bytes */
    uint32_t member; /* the result: index of the member in the group */
};

/* Choose a member for each of n units, which are in the order of the files: one that has the unit's
 * file. A unit whose file no member has may go to any: the rank that reads it asks one that has the
 * file, and so its bytes travel to each member once. Units of files that the same members have stay
 * together, so that each member reads what follows each other. All members come to the same
 * result. *ret_any is false, and nothing is chosen, if each file is at all members or at none.
 * NOMEM. */
int ckpt_holders_choose(const struct ckpt_holders *h, const struct ckpt_group *g,
                        struct ckpt_held *unit, uint32_t n, bool *ret_any, struct ckpt_err *err);
