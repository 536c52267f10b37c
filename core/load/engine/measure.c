/* SPDX-License-Identifier: Apache-2.0 */
/* The memory that the slots of a plan need. */
#include "load/engine/measure.h"

#include "base/ckd.h"
#include "device/copies.h"

/* Add the number of copy descriptors for what this rank wants of a piece. */
static int count_copies(const struct ckpt_plan *plan, const struct ckpt_piece_plan *piece,
                        ckpt_parts *parts, uint64_t *copies, struct ckpt_err *err)
{
    for (uint32_t u = piece->lo; u < piece->hi; u++) {
        struct ckpt_box box;
        ckpt_plan_unit_box(plan, u, &box);
        parts->len = 0;
        if (ckpt_plan_wanted(plan, u, &box, parts, err) < 0)
            return -1;
        for (size_t i = 0; i < parts->len; i++)
            *copies += ckpt_copies_most(&parts->ptr[i].box);
    }
    return 0;
}

static int measure_reads(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                         ckpt_parts *parts, struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    for (size_t i = 0; i < plan->own.len; i++) {
        const struct ckpt_piece_plan *piece = &plan->pieces.ptr[plan->own.ptr[i]];
        uint64_t copies = 0;
        if (mode->device && plan->groups.ptr[piece->group].n == 1 &&
            count_copies(plan, piece, parts, &copies, err) < 0)
            return -1;
        ret->read = ckpt_max_u64(ret->read, piece->len + ckpt_piece_tail(mode));
        ret->units = ckpt_max_u64(ret->units, piece->hi - piece->lo);
        ret->read_copies = ckpt_max_u64(ret->read_copies, copies);
    }
    return 0;
}

static int measure_windows(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                           ckpt_parts *parts, struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    for (size_t w = 0; w < plan->windows.len; w++) {
        const struct ckpt_window *window = &plan->windows.ptr[w];
        uint64_t copies = 0, receive = 0;
        for (uint32_t i = window->lo; i < window->hi; i++) {
            const struct ckpt_piece_plan *piece = &plan->pieces.ptr[i];
            if (piece->reader != plan->groups.ptr[piece->group].self)
                receive += piece->len + ckpt_piece_tail(mode);
            if (mode->device && count_copies(plan, piece, parts, &copies, err) < 0)
                return -1;
        }
        ret->receive = ckpt_max_u64(ret->receive, receive);
        ret->window_copies = ckpt_max_u64(ret->window_copies, copies);
    }
    return 0;
}

int ckpt_engine_measure(const struct ckpt_plan *plan, const struct ckpt_engine_mode *mode,
                        struct ckpt_engine_sizes *ret, struct ckpt_err *err)
{
    ckpt_parts parts = {0};

    *ret = (struct ckpt_engine_sizes){0};
    int rc = measure_reads(plan, mode, &parts, ret, err);
    if (rc == 0)
        rc = measure_windows(plan, mode, &parts, ret, err);
    ckpt_vec_release(&parts);
    ret->read_host = ret->read + ret->units * sizeof(uint32_t);
    ret->window_host = ret->receive;
    if (mode->device) {
        const uint64_t one = sizeof(struct ckpt_device_copy);
        ret->read_host += ret->read_copies * one;
        ret->read_device = ret->read + ret->read_copies * one;
        ret->window_host = (mode->verify ? ret->receive : 0) + ret->window_copies * one;
        ret->window_device = ret->receive + ret->window_copies * one;
    }
    return rc;
}
