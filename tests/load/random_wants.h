/* SPDX-License-Identifier: Apache-2.0 */
/* Wants by chance, of every tensor of a view: boxes, parts of meshes, casts. */
#ifndef CKPT_TESTS_LOAD_RANDOM_WANTS_H
#define CKPT_TESTS_LOAD_RANDOM_WANTS_H

#include <ckptfs/load.h>

/* For rank `number` of `ranks`; all ranks use the same seed. */
int random_wants(struct ckpt_load *load, struct ckpt_view *view, uint32_t ranks, uint32_t number,
                 uint64_t seed, struct ckpt_err *err);

#endif
