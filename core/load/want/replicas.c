/* SPDX-License-Identifier: Apache-2.0 */
/* Finds replica groups: ranks of a class that have the same part of each placement. */
#include "load/want/replicas.h"

#include <stdlib.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/sort.h"

void ckpt_replicas_release(struct ckpt_replicas *r)
{
    free(r->of);
    free(r->rank);
    free(r->count);
    *r = (struct ckpt_replicas){0};
}

struct key {
    uint32_t class, rank;
    XXH128_hash_t parts;
};

static void make_key(const struct ckpt_job_wants *job_wants, uint32_t rank, XXH3_state_t *state,
                     struct key *ret)
{
    const struct ckpt_wants *w = &job_wants->table[job_wants->class_of[rank]];

    (void)XXH3_128bits_reset(state);
    for (size_t s = 0; s < w->specs.len; s++) {
        const uint32_t part = ckpt_spec_part(w, &w->specs.ptr[s], rank);
        (void)XXH3_128bits_update(state, &part, sizeof part);
    }
    *ret = (struct key){job_wants->class_of[rank], rank, XXH3_128bits_digest(state)};
}

static int same_cmp(const struct key *a, const struct key *b)
{
    const int c = ckpt_u64_cmp(a->class, b->class);

    return c ? c : XXH128_cmp(&a->parts, &b->parts);
}

static int key_cmp(const void *pa, const void *pb)
{
    const struct key *a = pa, *b = pb;
    const int c = same_cmp(a, b);

    return c ? c : ckpt_u64_cmp(a->rank, b->rank);
}

/* leader[r] becomes the first rank that wants the same as rank r. */
static int find_leaders(const struct ckpt_job_wants *job_wants, uint32_t *leader,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct key *key = malloc((job_wants->nrank + 1) * sizeof *key);
    XXH3_state_t *state = XXH3_createState();

    if (!key || !state) {
        (void)XXH3_freeState(state);
        return ckpt_nomem(err);
    }
    for (uint32_t r = 0; r < job_wants->nrank; r++)
        make_key(job_wants, r, state, &key[r]);
    (void)XXH3_freeState(state);
    qsort(key, job_wants->nrank, sizeof *key, key_cmp);
    for (uint32_t i = 0; i < job_wants->nrank; i++)
        leader[key[i].rank] =
            i > 0 && same_cmp(&key[i - 1], &key[i]) == 0 ? leader[key[i - 1].rank] : key[i].rank;
    return 0;
}

int ckpt_replicas_init(struct ckpt_replicas *r, const struct ckpt_job_wants *job_wants,
                       struct ckpt_err *err)
{
    const uint32_t n = job_wants->nrank;
    ckpt_cleanup(ckpt_freep) uint32_t *leader = malloc((n + 1) * sizeof *leader);

    *r = (struct ckpt_replicas){.of = malloc((n + 1) * sizeof *r->of),
                                .rank = malloc((n + 1) * sizeof *r->rank),
                                .count = calloc(n + 1, sizeof *r->count)};
    if (!leader || !r->of || !r->rank || !r->count || find_leaders(job_wants, leader, err) < 0) {
        ckpt_replicas_release(r);
        return ckpt_nomem(err);
    }
    for (uint32_t k = 0; k < n; k++) {
        if (leader[k] == k)
            r->rank[r->n++] = k;
        r->of[k] = leader[k] == k ? r->n - 1 : r->of[leader[k]];
        r->count[r->of[k]]++;
    }
    return 0;
}
