/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of ranks along which control messages travel. Rank 0 is its root, and the children of
 * rank r are the CKPT_TREE_FAN ranks from r * CKPT_TREE_FAN + 1 on. This is arithmetic, and nothing
 * else: every rank computes the same tree from the number of ranks. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* The most children of a rank. A round takes as many hops up and down as the tree has levels: 2 for
 * 1,024 ranks, 3 for 32,768. Half as many children make one level more of each; twice as
 * many make no level less, and every parent then serves 64 connections in each round. */
enum { CKPT_TREE_FAN = 32 };

/* The parent of a rank that is not 0. */
static inline uint32_t ckpt_tree_parent(uint32_t rank) { return (rank - 1) / CKPT_TREE_FAN; }

/* The k-th child of a rank, from 0 on. It need not exist: see ckpt_tree_children. */
static inline uint32_t ckpt_tree_child(uint32_t rank, uint32_t k)
{
    return rank * CKPT_TREE_FAN + 1 + k;
}

/* The number of a rank's children in a job of `size` ranks. */
static inline uint32_t ckpt_tree_children(uint32_t rank, uint32_t size)
{
    const uint64_t first = (uint64_t)rank * CKPT_TREE_FAN + 1;
    const uint64_t n = first < size ? size - first : 0;

    return n < CKPT_TREE_FAN ? (uint32_t)n : CKPT_TREE_FAN;
}

/* The i-th neighbour of a rank: its parent (unless it is rank 0), then its children. False: it has
 * no more than i neighbours. */
static inline bool ckpt_tree_neighbour(uint32_t rank, uint32_t size, uint32_t i, uint32_t *ret)
{
    const uint32_t above = rank > 0;

    *ret = i < above ? ckpt_tree_parent(rank) : ckpt_tree_child(rank, i - above);
    return i < above + ckpt_tree_children(rank, size);
}
