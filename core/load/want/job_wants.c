/* SPDX-License-Identifier: Apache-2.0 */
/* Builds the index of the wants of all ranks by tensor. */
#include "load/want/job_wants.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/map.h"
#include "base/mem.h"
#include "tensor/value.h"

void ckpt_job_wants_skip_none(struct ckpt_job_wants *r)
{
    free(ckpt_steal(&r->skip));
    r->nskip = 0;
}

void ckpt_job_wants_release(struct ckpt_job_wants *r)
{
    free(r->skip);
    for (uint32_t c = 0; c < r->nclass; c++)
        ckpt_wants_release(&r->table[c]);
    free(r->table);
    free(r->class_of);
    free(r->class_first);
    free(r->class_rank);
    free(r->next);
    free(r->first);
    free(r->use);
    ckpt_catalog_free(r->cast);
    memset(r, 0, sizeof *r);
}

/* List the ranks of each class, by counting. */
static void list_classes(struct ckpt_job_wants *r)
{
    for (uint32_t k = 0; k < r->nrank; k++)
        r->class_first[r->class_of[k] + 1]++;
    for (uint32_t c = 0; c < r->nclass; c++)
        r->class_first[c + 1] += r->class_first[c];
    for (uint32_t k = r->nrank;
         k-- > 0;) /* class_first[c + 1] walks back to where class c begins */
        r->class_rank[--r->class_first[r->class_of[k] + 1]] = k;
    for (uint32_t c = 0; c < r->nclass; c++)
        r->class_first[c] = r->class_first[c + 1];
    r->class_first[r->nclass] = r->nrank;
}

/* The class that owns the form of a class's table. */
static uint32_t owner_of(const struct ckpt_job_wants *r, uint32_t class)
{
    const struct ckpt_wants *form = r->table[class].form;

    return form ? (uint32_t)(form - r->table) : class;
}

int ckpt_job_wants_init(struct ckpt_job_wants *r, const struct ckpt_catalog *cat, uint32_t nrank,
                        uint32_t *class_of, struct ckpt_wants *table, uint32_t nclass,
                        struct ckpt_err *err)
{
    const size_t ntensor = cat->tensors.len;
    uint64_t total = 0, *next;

    *r = (struct ckpt_job_wants){
        .cat = cat, .nrank = nrank, .nclass = nclass, .class_of = class_of, .table = table};
    for (uint32_t c = 0; c < nclass; c++)
        total += table[c].form ? 0 : table[c].entries.len;
    r->first = calloc(ntensor + 2, sizeof *r->first);
    r->use = calloc(total + 1, sizeof *r->use);
    r->class_first = calloc((size_t)nclass + 1, sizeof *r->class_first);
    r->class_rank = malloc(((size_t)nrank + 1) * sizeof *r->class_rank);
    r->next = malloc(((size_t)nclass + 1) * sizeof *r->next);
    if (!r->first || !r->use || !r->class_first || !r->class_rank || !r->next) {
        ckpt_job_wants_release(r);
        return ckpt_nomem(err);
    }
    list_classes(r);
    memset(r->next, 0xff, nclass * sizeof *r->next); /* CKPT_NONE */
    for (uint32_t c = nclass; c-- > 0;)              /* link those of a form, ascending */
        if (table[c].form) {
            r->next[c] = r->next[owner_of(r, c)];
            r->next[owner_of(r, c)] = c;
        }
    next = r->first + 1; /* next[t]: first a count, then the beginning of tensor t's uses, at last
                            their end, which is first[t + 1] */
    for (uint32_t c = 0; c < nclass; c++)
        for (size_t e = 0; !table[c].form && e < table[c].entries.len; e++)
            next[table[c].entries.ptr[e].tensor]++;
    for (size_t t = 0, at = 0; t < ntensor; t++) {
        uint64_t n = next[t];
        next[t] = at;
        at += n;
    }
    for (uint32_t c = 0; c < nclass; c++)
        for (size_t e = 0; !table[c].form && e < table[c].entries.len; e++)
            r->use[next[table[c].entries.ptr[e].tensor]++] = (struct ckpt_use){c, (uint32_t)e};
    return 0;
}

uint64_t ckpt_job_wants_memory(const struct ckpt_job_wants *r)
{
    const size_t ntensor = r->cat->tensors.len;
    uint64_t bytes = sizeof *r + (ntensor + 2 + r->nrank) * sizeof *r->first +
                     r->first[ntensor] * sizeof *r->use + r->nclass * 2 * sizeof *r->next;

    for (uint32_t c = 0; c < r->nclass; c++)
        bytes += ckpt_wants_memory(&r->table[c]);
    return bytes;
}

/* The first use of a tensor by this class or a later one. */
static uint64_t first_use(const struct ckpt_job_wants *r, uint32_t tensor, uint32_t class)
{
    uint64_t a = r->first[tensor], b = r->first[tensor + 1];

    while (a < b) {
        const uint64_t mid = a + (b - a) / 2;
        if (r->use[mid].class < class)
            a = mid + 1;
        else
            b = mid;
    }
    return a;
}

uint64_t ckpt_job_wants_uses(const struct ckpt_job_wants *r, uint32_t tensor, uint32_t class,
                             uint64_t *ret_lo)
{
    *ret_lo = first_use(r, tensor, owner_of(r, class));
    return first_use(r, tensor, owner_of(r, class) + 1);
}

/* ---- replicas: ranks of a class that have the same part of each placement ---- */

int ckpt_replicas_find(const struct ckpt_job_wants *r, struct ckpt_replicas *ret,
                       struct ckpt_err *err)
{
    const size_t n = r->nrank;
    ckpt_cleanup(ckpt_freep) uint64_t(*key)[2] = malloc((n + 1) * sizeof *key);
    XXH3_state_t *state = XXH3_createState();

    *ret = (struct ckpt_replicas){.of = malloc((n + 1) * sizeof *ret->of),
                                  .rank = malloc((n + 1) * sizeof *ret->rank)};
    bool good = key && state && ret->of && ret->rank;
    for (uint32_t k = 0; k < n && good; k++) {
        const struct ckpt_wants *w = &r->table[r->class_of[k]];
        (void)XXH3_128bits_reset_withSeed(state, r->class_of[k]);
        for (size_t s = 0; s < w->specs.len; s++) {
            const uint32_t part = ckpt_spec_part(w, &w->specs.ptr[s], k);
            (void)XXH3_128bits_update(state, &part, sizeof part);
        }
        const XXH128_hash_t hash = XXH3_128bits_digest(state);
        memcpy(key[k], &hash, sizeof hash);
    }
    (void)XXH3_freeState(state);
    good = good && ckpt_map_number((const uint64_t(*)[2])key, (uint32_t)n, ret->of, ret->rank,
                                   &ret->n) == 0;
    return good ? 0 : ckpt_nomem(err);
}

/* ---- dtypes ---- */

/* The dtype of all destinations of tensor t; CKPT_NDTYPE: they have several. */
static enum ckpt_dtype wanted_dtype(const struct ckpt_job_wants *r, uint32_t t,
                                    enum ckpt_dtype viewed)
{
    enum ckpt_dtype wanted = viewed;

    for (uint64_t u = r->first[t]; u < r->first[t + 1]; u++) {
        const uint32_t d = r->table[r->use[u].class].entries.ptr[r->use[u].entry].dtype;
        const enum ckpt_dtype dtype = d == CKPT_NONE ? viewed : (enum ckpt_dtype)d;
        if (u > r->first[t] && dtype != wanted)
            return CKPT_NDTYPE;
        wanted = dtype;
    }
    return wanted;
}

/* Placing casts what is stored in one pass; what is computed is best made in the wanted dtype. */
static enum ckpt_dtype read_dtype(const struct ckpt_job_wants *r, const struct ckpt_tensor *t,
                                  uint32_t index, bool travels)
{
    const enum ckpt_dtype wanted = wanted_dtype(r, index, t->dtype);
    const enum ckpt_dtype stored = ckpt_value_unrounded(t);

    if (!ckpt_dtype_is_castable(t->dtype) || !ckpt_dtype_is_castable(stored))
        return t->dtype;
    if (!travels && (!t->value || t->value->ops->elements))
        return stored;
    return wanted != CKPT_NDTYPE && ckpt_dtype_is_castable(wanted) &&
                   ckpt_dtype_size(wanted) <= ckpt_dtype_size(stored)
               ? wanted
               : stored;
}

int ckpt_job_wants_cast(struct ckpt_job_wants *r, const struct ckpt_catalog *cat, bool travels,
                        struct ckpt_err *err)
{
    ckpt_catalog_free(ckpt_steal(&r->cast));
    r->cat = cat;
    for (uint32_t i = 0; i < cat->tensors.len; i++) {
        const enum ckpt_dtype dtype = read_dtype(r, &cat->tensors.ptr[i], i, travels);
        if (dtype == cat->tensors.ptr[i].dtype)
            continue;
        if ((!r->cast && ckpt_catalog_alias(cat, &r->cast, err) < 0) ||
            ckpt_value_cast(r->cast, i, dtype, err) < 0) {
            ckpt_catalog_free(ckpt_steal(&r->cast));
            return -1;
        }
    }
    if (r->cast)
        r->cat = r->cast;
    return 0;
}
