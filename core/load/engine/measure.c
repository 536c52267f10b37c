/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that the slots of a plan need. */
#include "load/engine/measure.h"

#include <stdlib.h>

#include "base/ckd.h"
#include "base/err.h"
#include "base/mem.h"
#include "device/copies.h"

/* The number of copy descriptors for what this rank wants of a unit. */
static int count_copies(const struct ckpt_plan *plan, uint32_t unit, ckpt_overlaps *overlaps,
                        uint64_t *ret, struct ckpt_err *err)
{
    struct ckpt_box box;

    ckpt_plan_unit_box(plan, unit, &box);
    overlaps->len = 0;
    if (ckpt_plan_wanted(plan, unit, &box, overlaps, err) < 0)
        return -1;
    *ret = 0;
    for (size_t i = 0; i < overlaps->len; i++)
        *ret += ckpt_copies_most(&overlaps->ptr[i].box);
    return 0;
}

/* Add a unit's copies to those of the windows in which it travels. Slices may cut a unit, and
 * chunks of this rank alone are windows. */
static int add_unit(const struct ckpt_plan *plan, const struct ckpt_stream *s, uint32_t unit,
                    ckpt_overlaps *overlaps, uint64_t *window, struct ckpt_err *err)
{
    const struct ckpt_unit *u = &plan->units.ptr[unit];
    const uint32_t group = plan->regions.ptr[u->region].group;
    uint64_t copies, begin, end;

    if (count_copies(plan, unit, overlaps, &copies, err) < 0)
        return -1;
    ckpt_plan_span(plan, group, ckpt_plan_reader(plan, group, u->at), &begin, &end);
    /* a unit that reaches beyond the span goes on in the first window: spans are whole slices then
     */
    const uint64_t first = (u->at - begin) / s->slice;
    const uint64_t last = (u->at - begin + u->len - 1) / s->slice;
    if (first != last)
        copies *= CKPT_UNIT_BOXES(ckpt_plan_unit_tensor(plan, unit)->rank);
    for (uint64_t q = first; q <= last; q++)
        window[q % s->nwindow] += copies;
    return 0;
}

/* An upper bound of the copies of one window of a group. */
static int count_group(const struct ckpt_plan *plan, const struct ckpt_stream *s,
                       ckpt_overlaps *overlaps, uint64_t *most, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) uint64_t *window = calloc((size_t)s->nwindow + 1, sizeof *window);

    if (!window)
        return ckpt_nomem(err);
    for (uint32_t u = s->lo; u < s->hi; u++)
        if (add_unit(plan, s, u, overlaps, window, err) < 0)
            return -1;
    for (uint32_t k = 0; k < s->nwindow; k++)
        *most = ckpt_max_u64(*most, window[k]);
    return 0;
}

static int count_chunk(const struct ckpt_plan *plan, const struct ckpt_chunk *chunk,
                       ckpt_overlaps *overlaps, uint64_t *most, struct ckpt_err *err)
{
    const uint64_t end = chunk->lo + chunk->len;
    uint64_t sum = 0, copies;

    for (uint32_t u = ckpt_plan_unit_at(plan, chunk->group, chunk->lo);
         u < plan->stream[chunk->group].hi && plan->units.ptr[u].at < end; u++) {
        if (count_copies(plan, u, overlaps, &copies, err) < 0)
            return -1;
        sum += copies;
    }
    *most = ckpt_max_u64(*most, sum);
    return 0;
}

static int count_windows(const struct ckpt_plan *plan, ckpt_overlaps *overlaps, uint64_t *most,
                         struct ckpt_err *err)
{
    for (size_t g = 0; g < plan->groups.len; g++)
        if (plan->stream[g].nstep && count_group(plan, &plan->stream[g], overlaps, most, err) < 0)
            return -1;
    for (size_t i = 0; i < plan->chunks.len; i++)
        if (plan->stream[plan->chunks.ptr[i].group].nstep == 0 &&
            count_chunk(plan, &plan->chunks.ptr[i], overlaps, most, err) < 0)
            return -1;
    return 0;
}

int ckpt_engine_measure(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    const uint64_t one = sizeof(struct ckpt_device_copy);
    ckpt_cleanup(ckpt_vec_cleanup) ckpt_overlaps overlaps = {0};

    *ret = (struct ckpt_engine_sizes){0};
    for (size_t i = 0; i < plan->chunks.len; i++) {
        const struct ckpt_chunk *chunk = &plan->chunks.ptr[i];
        ret->read = ckpt_max_u64(ret->read, chunk->len + ckpt_chunk_tail(mode));
        if (mode->device && plan->stream[chunk->group].nstep == 0)
            ret->receive = ckpt_max_u64(ret->receive, chunk->len);
    }
    for (size_t g = 0; g < plan->groups.len; g++)
        if (plan->stream[g].nstep)
            ret->receive = ckpt_max_u64(ret->receive, ckpt_slice_stride(&plan->stream[g], mode) *
                                                          (uint64_t)plan->groups.ptr[g].n);
    ret->window_host = ret->receive;
    if (mode->device) {
        if (count_windows(plan, &overlaps, &ret->copies, err) < 0)
            return -1;
        ret->fetch = mode->verify || mode->hosts ? ret->receive : 0;
        ret->window_host = ret->fetch + ret->copies * one;
        ret->window_device = ret->receive + ret->copies * one;
    }
    return 0;
}
