/* SPDX-License-Identifier: Apache-2.0 */
/* The order of the state dict that a DCP was saved from.
 *
 * state_dict_metadata has the tensors of rank 0's plan first, then those that only rank 1 planned
 * to write, and so on: of replicated tensors each rank plans its share, so neighbours in a state
 * dict are separated. planner_data keeps every rank's own order, but is a ChainMap of all ranks'
 * keys (torch/distributed/checkpoint/default_planner.py): it begins with all keys of the last rank,
 * which are followed by those keys of the rank before that it did not have, and so on. If all ranks
 * have the same keys, this is the order of the state dict; stages of a pipeline are in reverse
 * order. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Sort the n tensors in the order of the ranks' state dicts, rank after rank: their numbers, as
 * state_dict_metadata counts them, are written into ret[n]. planned[nplanned] are the numbers in
 * the order of planner_data. If these are not all tensors, once each, ret is 0 .. n - 1. -1: out of
 * memory. */
int ckpt_dcp_order(const uint32_t *planned, size_t nplanned, size_t n, uint32_t *ret);
