/* SPDX-License-Identifier: Apache-2.0 */
/* The way of bytes through a group: what one member reads enters each node once and is passed on
 * inside. Between nodes it travels along one of two binary trees, in which few nodes have to send
 * twice in both; members of a node take turns as the one that talks to other nodes. So a rank has
 * few neighbours, however large the group is. */
#ifndef CKPT_LOAD_RELAY_H
#define CKPT_LOAD_RELAY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "load/groups.h"

struct ckpt_relay {
    uint32_t self;     /* a rank */
    uint32_t n, nnode; /* members; nodes */
    uint32_t *member;  /* ranks, by node, then by number */
    uint32_t *place;   /* of member i of the group: its index in `member` */
    uint32_t *node;    /* nodes: node k has member[node[k]] .. member[node[k + 1]] */
    uint32_t own;      /* the node of this rank */
    bool star;         /* within a node the first to have it serves all, not two others */
};

/* node: of each rank of the job. star: ranks of a node read each other's memory. */
int ckpt_relay_init(struct ckpt_relay *r, const struct ckpt_group *group, const uint32_t *node,
                    bool star, struct ckpt_err *err);
void ckpt_relay_release(struct ckpt_relay *r);

/* The rank that this one gets what member `reader` (an index in the group) reads from; its own
 * number if it is the reader. */
uint32_t ckpt_relay_from(const struct ckpt_relay *r, uint32_t reader);

/* The ranks that this one passes it on to: their number, at most ckpt_relay_most. */
uint32_t ckpt_relay_to(const struct ckpt_relay *r, uint32_t reader, uint32_t *ret);
uint32_t ckpt_relay_most(const struct ckpt_relay *r);

/* Bytes that each member sends, given those that each reads; both by index in the group. */
int ckpt_relay_sent(const struct ckpt_relay *r, const uint64_t *read, uint64_t *ret_sent,
                    struct ckpt_err *err);

#endif
