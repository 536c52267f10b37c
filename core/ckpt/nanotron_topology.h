/* SPDX-License-Identifier: Apache-2.0 */
/* How many ranks of each kind a nanotron save was made by, as its files' names say. Saves of
 * different topology can lie in one directory: nothing but the metadata tells which is the newer.
 */
#ifndef CKPT_CKPT_NANOTRON_TOPOLOGY_H
#define CKPT_CKPT_NANOTRON_TOPOLOGY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "tensor/catalog.h"

struct ckpt_nt_shard;
struct ckpt_nt_shards;

struct ckpt_nt_topology {
    uint32_t pp, tp, ep; /* ep 0: none of its files names one */
};

/* Does a shard belong to a save of this topology? Files without an expert part go with any EP. */
bool ckpt_nt_topology_fits(const struct ckpt_nt_topology *t, const struct ckpt_nt_shard *s);

/* The topology that `meta` (checkpoint_metadata.json) and `config` (config.yaml; each may be NULL)
 * name, if the shards are of several; cat is told. All zero: no shard names one. CONFLICT if they
 * do not say which. */
int ckpt_nt_topology_choose(const struct ckpt_nt_shards *set, const json_t *meta,
                            const json_t *config, struct ckpt_catalog *cat,
                            struct ckpt_nt_topology *ret, struct ckpt_err *err);

#endif
