/* SPDX-License-Identifier: Apache-2.0 */
/* The broadcast trees of a group in host memory: from which rank a member receives a slice, and to
 * which ranks it passes the slice on. plan.c makes them, window.c sends along them, model.c counts
 * the bytes. (Groups with communicators, and groups on devices, gather instead.)
 *
 * A slice enters each node once and is passed on inside the node. Between the nodes of a group
 * there are two binary trees, and slices of different readers use different ones, so that the load
 * is spread: most inner nodes of one tree are leaves of the other. The members of a node take
 * turns, by reader, as the node's head, which is the member that exchanges slices with other nodes.
 * A rank therefore has few neighbours, however large its group is. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "load/plan/groups.h"

struct ckpt_broadcast {
    uint32_t self;    /* this rank */
    uint32_t n;       /* number of members */
    uint32_t nnode;   /* number of nodes */
    uint32_t *member; /* the members' ranks, ordered by node, then by rank */
    uint32_t *place;  /* per index in the group: index in `member` */
    uint32_t *node;   /* node k has member[node[k]] .. member[node[k + 1] - 1] */
    uint32_t own;     /* index in `node` of this rank's node */
    bool star;        /* within a node, the head sends to all others; else a binary tree */
};

/* Make the trees of a group. node: per rank of the job, its node. star: the ranks of a node can
 * read each other's memory, so that all of them copy a slice from the head's memory. NOMEM. */
int ckpt_broadcast_init(struct ckpt_broadcast *r, const struct ckpt_group *group,
                        const uint32_t *node, bool star, struct ckpt_err *err);

/* Free what r owns, not r itself. */
void ckpt_broadcast_release(struct ckpt_broadcast *r);

/* The rank from which this rank receives the slices of a reader (an index in the group); this rank
 * itself if it is the reader. */
uint32_t ckpt_broadcast_from(const struct ckpt_broadcast *r, uint32_t reader);

/* List the ranks to which this rank sends the slices of a reader. Returns their number; ret has
 * room for ckpt_broadcast_most. */
uint32_t ckpt_broadcast_to(const struct ckpt_broadcast *r, uint32_t reader, uint32_t *ret);

/* An upper bound of the number that ckpt_broadcast_to returns. */
uint32_t ckpt_broadcast_most(const struct ckpt_broadcast *r);

/* Compute the bytes that each member sends, given the bytes that each member reads; both arrays are
 * indexed as the group. NOMEM. */
int ckpt_broadcast_sent(const struct ckpt_broadcast *r, const uint64_t *read, uint64_t *ret_sent,
                        struct ckpt_err *err);
