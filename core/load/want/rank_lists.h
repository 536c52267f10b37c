/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of ranks for groups.c: the ranks that have one part of a placement, and the groups that are
 * unions of such lists. Each list is made once per plan, however many tensors are divided alike. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load.h>

#include "base/map.h"
#include "base/vec.h"
#include "load/want/job_wants.h"

/* A set of ranks that want the same bytes. */
struct ckpt_group {
    uint32_t n;     /* number of members */
    uint32_t self;  /* index of this rank in `rank` */
    uint32_t found; /* how many groups were found before it */
    uint32_t *rank; /* the members, ascending; owned */
};
typedef CKPT_VEC(struct ckpt_group) ckpt_groups;

struct ckpt_holders;

/* Which ranks share what they read: those that give the same number in options.share (ONCE), of
 * these only the ranks of one node (NODE), or none (EACH). All pointers are borrowed. */
struct ckpt_sharing {
    enum ckpt_readers readers; /* not AUTO */
    const uint32_t *node;      /* per rank: its node */
    const uint32_t *share;     /* per rank: its group of options.share; NULL: all are in one */
    const struct ckpt_holders
        *holders; /* who has which file (plan/holders.h); NULL: all have all */
};

/* Ranks with the same number share what they read. */
static inline uint64_t ckpt_sharing_number(const struct ckpt_sharing *s, uint32_t rank)
{
    const uint32_t share = s->share ? s->share[rank] : 0;

    return s->readers == CKPT_READERS_EACH   ? rank
           : s->readers == CKPT_READERS_NODE ? (uint64_t)share << 32 | s->node[rank]
                                             : share;
}

typedef CKPT_VEC(uint32_t) ckpt_numbers;

/* The ranks that have one part of a placement and share with this rank. class, spec and part are
 * the key in ckpt_rank_lists.part_map; spec is CKPT_NONE for wants that are not divided, which all
 * ranks of the class have. */
struct ckpt_part_ranks {
    uint32_t class, spec, part;
    ckpt_numbers rank; /* ascending */
};

/* A set of lists of numbers, with one value for each list. The map's keys point to the lists, which
 * the set owns. */
struct ckpt_known_lists {
    struct ckpt_map map;
    CKPT_VEC(uint32_t *) list;
};

/* Add a copy of a list and its value, unless the set has an equal list; *ret_new tells. -1: no
 * memory. */
int ckpt_lists_know(struct ckpt_known_lists *k, const uint32_t *list, size_t n, uint32_t value,
                    bool *ret_new);

/* Empty the set and free its memory. */
void ckpt_lists_forget(struct ckpt_known_lists *k);

struct ckpt_rank_lists {
    const struct ckpt_job_wants *job_wants;
    const struct ckpt_sharing *sharing;
    uint32_t self; /* the rank that plans */
    CKPT_VEC(struct ckpt_part_ranks *) parts;
    struct ckpt_map part_map;       /* class, spec and part -> index in parts */
    struct ckpt_map group_map;      /* list of ranks -> index in groups */
    struct ckpt_known_lists unions; /* list of indices in parts -> index in groups */
    ckpt_groups *groups;            /* the groups found so far; borrowed */
    struct ckpt_err *err;           /* receives the error of the functions below */
};

/* Free what m owns; the groups remain. */
void ckpt_rank_lists_release(struct ckpt_rank_lists *m);

/* The index in m->parts of the ranks that have a part of an entry of a class's table. CKPT_NONE and
 * *m->err: no memory. */
uint32_t ckpt_rank_lists_part(struct ckpt_rank_lists *m, uint32_t class, uint32_t entry,
                              uint32_t part);

/* The index of the group of all ranks in any of these parts; a group that is new is added to
 * m->groups. *part has indices in m->parts, ascending; duplicates are removed from it. CKPT_NONE
 * and *m->err: no memory. */
uint32_t ckpt_rank_lists_group(struct ckpt_rank_lists *m, ckpt_numbers *part);
