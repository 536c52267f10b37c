/* SPDX-License-Identifier: Apache-2.0 */
/* struct ckpt_load, which is behind include/ckptfs/load.h. In the order of a load's phases: load.c
 * and layout.c (declaring wants), agree.c (the agreement and the plan, with job.c, weigh.c and
 * policy.c), load.c again (start, waiting, end), reload.c (another run). */
#pragma once

#include <ckptfs/load.h>

#include "load/engine/engine.h"
#include "load/plan/divisions.h"
#include "load/plan/plan.h"
#include "load/want/want.h"
#include "run/checkpoint.h"

struct ckpt_load {
    struct ckpt_view *view;              /* a reference is held */
    struct ckpt_comm *comm;              /* borrowed */
    struct ckpt_load_options opt;        /* defaults filled in */
    struct ckpt_wants wants;             /* of this rank; entry i is want i */
    CKPT_VEC(struct ckpt_target) target; /* destination of each want */
    enum ckpt_readers readers;           /* as planned: not AUTO */
    struct ckpt_rates rates;             /* by which the plan was chosen */
    struct ckpt_engine_inputs inputs;    /* the plan, between planning and the start */
    struct ckpt_engine_options engine_opt;
    struct ckpt_engine_sizes sizes;
    uint64_t plan_ns;    /* duration of planning */
    uint64_t wants_hash; /* hash of the wants of all ranks; 0: they have not been exchanged */
    bool planned;        /* a plan has succeeded at least once */
    bool ready;          /* there is a plan that has not been started */
    bool started;        /* started since the last plan, or the start failed for good */
    bool exchanges;      /* some rank sends something to another */
    struct ckpt_device_division division[CKPT_DIVISIONS];
    struct ckpt_engine *engine; /* NULL: never started, or taken back by a reload */
};

/* COLLECTIVE. Agree on a plan; the result is the same on all ranks. The wants of all ranks are
 * exchanged unless inputs.job_wants is there already (reload). rc and *err are the result of what
 * this rank did before: if it is negative on any rank, all ranks fail. */
int ckpt_load_agree(struct ckpt_load *load, int rc, struct ckpt_err *err);
