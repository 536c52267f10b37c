/* SPDX-License-Identifier: Apache-2.0 */
/* The topology of a nanotron save: the number of ranks of each kind, from the names of its files.
 * One directory can contain saves of different topologies; only the metadata says which one is
 * newer. */
#ifndef CKPT_FORMAT_NANOTRON_TOPOLOGY_H
#define CKPT_FORMAT_NANOTRON_TOPOLOGY_H

#include "base/err.h"
#include "base/json.h"
#include "format/nanotron/shards.h"
#include "tensor/catalog.h"

/* Choose the topology that `meta` (checkpoint_metadata.json) and `config` (config.yaml; both may be
 * NULL) describe, with a warning in cat if the shards are of several topologies. All zero: no
 * shard's name has a topology. CONFLICT: meta and config do not say which one. */
int ckpt_nt_topology_choose(const struct ckpt_nt_shards *set, const json_t *meta,
                            const json_t *config, struct ckpt_catalog *cat,
                            struct ckpt_nt_topology *ret, struct ckpt_err *err);

#endif
