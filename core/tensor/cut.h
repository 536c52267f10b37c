/* SPDX-License-Identifier: Apache-2.0 */
/* How a training framework divides a tensor over the ranks of a job. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum ckpt_cut_way {
    CKPT_CUT_NOT, /* every rank has the whole part */
    CKPT_CUT_OVER_TP,
    CKPT_CUT_OVER_EP,
    CKPT_CUT_OVER_ETP, /* the ranks that divide an expert */
};

/* Elements lo..lo+n of a dimension: rank t of T has the t-th of T equal parts. */
struct ckpt_cut {
    uint64_t lo, n;
    uint64_t groups;  /* equal groups (such as heads) that stay whole; 0: none */
    const char *what; /* name of the groups, for messages */
    uint8_t dim, way;
    bool shared; /* several ranks may have the same group */
};

/* A tensor's place in a job. Of each dimension that is divided, all parts are there, in order. */
struct ckpt_cuts {
    uint32_t stage; /* of the pipeline */
    uint32_t n;     /* 0: no dimension is divided */
    const struct ckpt_cut *cut;
};
