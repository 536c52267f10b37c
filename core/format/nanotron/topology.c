/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing one of several saves in one directory, by the number of ranks of each kind in the names
 * of its files; only the metadata says which one is newer. */
#include "format/nanotron/shards.h"

enum { MOST_TOPOLOGIES = 16 };

/* The topology that the JSON and YAML files of the directory's last save record; 0 where they do
 * not. checkpoint_metadata.json has priority; PP and EP are only in config.yaml. */
static struct ckpt_nt_topology recorded(const json_t *meta, const json_t *config)
{
    const json_t *par = ckpt_json_at(config, "parallelism");
    struct ckpt_nt_topology t = {0};
    uint64_t v;

    if (ckpt_json_u64(meta, "tp", &v) || ckpt_json_u64(par, "tp", &v))
        t.tp = (uint32_t)v;
    if (ckpt_json_u64(par, "pp", &v))
        t.pp = (uint32_t)v;
    if (ckpt_json_u64(par, "expert_parallel_size", &v))
        t.ep = (uint32_t)v;
    return t;
}

/* Find all topologies in the names. Files without an expert rank are counted with those that have
 * one. */
static int find_topologies(const struct ckpt_nt_shards *set, struct ckpt_nt_topology *out,
                           size_t cap, size_t *ret_n, struct ckpt_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < set->shards.len; i++) {
        struct ckpt_nt_topology t = ckpt_nt_name_topology(&set->shards.ptr[i].name);
        size_t k = 0;
        if (!set->shards.ptr[i].name.sharded)
            continue;
        while (k < n && !ckpt_nt_topology_fits(&out[k], &t))
            k++;
        if (k == cap)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s/model' holds shards of more than %zu topologies",
                             ckpt_dir_path(set->dir), cap);
        if (k == n)
            out[n++] = t;
        else if (out[k].ep == 0)
            out[k].ep = t.ep;
    }
    *ret_n = n;
    return 0;
}

/* Find the topology that matches the recorded one; n: several match, or none. */
static size_t find_recorded(const struct ckpt_nt_topology *all, size_t n,
                            const struct ckpt_nt_topology *want)
{
    size_t at = n, hits = 0;

    for (size_t i = 0; i < n; i++)
        if (ckpt_nt_topology_fits(&all[i], want)) {
            at = i;
            hits++;
        }
    return hits == 1 ? at : n;
}

int ckpt_nt_topology_choose(const struct ckpt_nt_shards *set, const json_t *meta,
                            const json_t *config, struct ckpt_catalog *cat,
                            struct ckpt_nt_topology *ret, struct ckpt_err *err)
{
    const struct ckpt_nt_topology want = recorded(meta, config);
    struct ckpt_nt_topology all[MOST_TOPOLOGIES] = {0};
    size_t n = 0;

    if (find_topologies(set, all, MOST_TOPOLOGIES, &n, err) < 0)
        return -1;
    const size_t at = n > 1 ? find_recorded(all, n, &want) : 0;
    if (n > 1 && at == n)
        return ckpt_fail(
            err, CKPT_CONFLICT,
            "'%s/model' holds shards of %zu saves (TP %u PP %u, TP %u PP %u ...) and its "
            "metadata does not say which one to use: remove the stale files",
            ckpt_dir_path(set->dir), n, all[0].tp, all[0].pp, all[1].tp, all[1].pp);
    *ret = all[at];
    if (n > 1)
        ckpt_catalog_warn(
            cat,
            "shards of %zu saves lie in '%s/model': those of TP %u PP %u are used, as "
            "its metadata says",
            n, ckpt_dir_path(set->dir), ret->tp, ret->pp);
    return 0;
}
