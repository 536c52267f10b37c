/* SPDX-License-Identifier: Apache-2.0 */
/* Which member of a group reads which unit where ranks have different files (`ckpt load --local`):
 * each member reads an equal span of the group's stream, and units are put into the spans of
 * members that have their files. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "load/want/rank_lists.h"
#include "tensor/catalog.h"

/* A unit of a group. */
struct ckpt_held {
    uint32_t source; /* its file in the catalogue; UINT32_MAX: not known */
    uint32_t len;    /* bytes */
    uint32_t member; /* the result: index of the member in the group */
};

/* Choose a member for each of n units, which are in the order of the files. A unit whose file no
 * member has, or for which there is no room in the spans of those that do, goes where there is
 * room: the rank that reads it asks one that has the file. All members come to the same result.
 * *ret_any is false, and nothing is chosen, if all ranks have all of these files. NOMEM. */
int ckpt_holders_choose(const struct ckpt_catalog *cat, uint32_t nrank, const struct ckpt_group *g,
                        struct ckpt_held *unit, uint32_t n, bool *ret_any, struct ckpt_err *err);
