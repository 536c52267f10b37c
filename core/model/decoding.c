/* SPDX-License-Identifier: Apache-2.0 */
/* Compressed parts of a checkpoint cost time or room, which is said here: a part that holds
 * something of several tensors (MaxText's scanned layers) is decompressed again for each of them,
 * unless memory keeps it or a temporary file does. */
#include "model/opening.h"

#include <inttypes.h>

#include "base/ckd.h"
#include "base/map.h"
#include "container/decoded.h"

/* A compressed source, and the tensors that have pieces in it. */
struct part {
    const struct ckpt_source *source;
    const struct ckpt_tensor *last; /* of the view, that was counted */
    uint64_t ntensor;
};

struct counting {
    struct ckpt_map by_source;
    CKPT_VEC(struct part) parts;
};

static void counting_release(struct counting *c)
{
    ckpt_map_release(&c->by_source);
    ckpt_vec_release(&c->parts);
}

/* `s` lies in a catalogue, where the map's key stays. */
static int count_source(struct counting *c, struct ckpt_source *const *s,
                        const struct ckpt_tensor *of, struct ckpt_err *err)
{
    uint32_t at;
    bool is_new;

    if (ckpt_map_put(&c->by_source, (const char *)s, sizeof *s, (uint32_t)c->parts.len, &at,
                     &is_new) < 0 ||
        (is_new && ckpt_vec_push(&c->parts, ((struct part){.source = *s})) < 0))
        return ckpt_nomem(err);
    struct part *p = &c->parts.ptr[at];
    if (p->last != of)
        p->ntensor++;
    p->last = of;
    return 0;
}

/* Count the sources of `t` for the view's tensor `of`, which is t or computed from it. */
static int count_tensor(struct counting *c, const struct ckpt_tensor *t,
                        const struct ckpt_tensor *of, struct ckpt_err *err)
{
    for (size_t i = 0; i < t->npiece; i++) {
        struct ckpt_source *const *s = &t->cat->sources.ptr[t->piece[i].source];
        if ((*s)->ops->stored && count_source(c, s, of, err) < 0)
            return -1;
    }
    for (uint32_t i = 0; t->value && i < t->value->narg; i++)
        if (count_tensor(c, t->value->arg[i], of, err) < 0)
            return -1;
    return 0;
}

static uint64_t mib(uint64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

int ckpt_opening_tell_decoding(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(counting_release) struct counting c = {0};
    struct ckpt_spill *spill = o->shared->spill;
    uint64_t all = 0, again = 0, nagain = 0, most = 0, largest = 0, size = 0;

    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        size += ckpt_tensor_nbytes(t);
        if (count_tensor(&c, t, t, err) < 0)
            return -1;
    }
    for (size_t i = 0; i < c.parts.len; i++) {
        const struct part *p = &c.parts.ptr[i];
        all += p->source->size;
        largest = ckpt_max_u64(largest, p->source->size);
        if (p->ntensor < 2)
            continue;
        nagain++;
        again += p->source->size;
        most = ckpt_max_u64(most, p->ntensor);
    }
    if (spill)
        ckpt_spill_leave(spill, size);
    if (spill && all > CKPT_DECODED_BUDGET)
        ckpt_catalog_note(o->cat,
                          "%zu chunks are compressed: each is decompressed once, into a temporary "
                          "file in '%s' (of %" PRIu64 " MiB if all are read)",
                          c.parts.len, ckpt_spill_folder(spill), mib(all));
    else if (!spill && again > CKPT_DECODED_BUDGET)
        ckpt_catalog_warn(
            o->cat,
            "%" PRIu64 " compressed chunks hold parts of up to %" PRIu64
            " tensors each, and may be decompressed again for each of them, as memory "
            "keeps %d of their %" PRIu64 " MiB: with cache_dir=DIR a temporary file "
            "in DIR keeps all (ckpt export has one beside DEST)",
            nagain, most, CKPT_DECODED_BUDGET >> 20, mib(again));
    else if (!spill && largest > CKPT_DECODED_BUDGET)
        ckpt_catalog_warn(o->cat,
                          "compressed chunks have up to %" PRIu64
                          " MiB when they are decompressed, and memory has up to two of them while "
                          "they are read: with cache_dir=DIR a temporary file in DIR has them",
                          mib(largest));
    return 0;
}
