/* SPDX-License-Identifier: Apache-2.0 */
/* The order of the state dict that a DCP was saved from.
 *
 * state_dict_metadata has the tensors of rank 0's plan first, then those that only rank 1 planned
 * to write, and so on: of replicated tensors each rank plans its share, so neighbours of a state
 * dict are torn apart. planner_data keeps every rank's own order, but is a ChainMap of all ranks'
 * keys (torch/distributed/checkpoint/default_planner.py): the last rank's stand first, and before
 * them nothing; then what the rank before has beyond them. Where all ranks have the same keys, that
 * is the order; stages of a pipeline stand in it backwards. */
#ifndef CKPT_CKPT_DCP_ORDER_H
#define CKPT_CKPT_DCP_ORDER_H

#include <stddef.h>
#include <stdint.h>

/* Write the numbers 0 .. n - 1 of the tensors, as state_dict_metadata counts them, into ret[n], in
 * the order of the ranks' state dicts, rank after rank. planned[nplanned]: the numbers in the order
 * of planner_data. If these are not all tensors, once each, ret is the order of the numbers.
 * -1: no memory. */
int ckpt_dcp_order(const uint32_t *planned, size_t nplanned, size_t n, uint32_t *ret);

#endif
