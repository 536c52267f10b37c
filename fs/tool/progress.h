/* SPDX-License-Identifier: Apache-2.0 */
/* A progress bar on stderr, drawn if that is a terminal. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct ckpt_progress {
    bool shown;       /* stderr is a terminal, and --quiet was not given */
    uint64_t begin;   /* by ckpt_now_ns */
    uint64_t already; /* bytes that were done before this run, which the rate does not count */
    uint64_t total;
};

/* Begin a bar of `total` bytes; `already` and `quiet` are as in the struct. */
void ckpt_progress_begin(struct ckpt_progress *p, uint64_t already, uint64_t total, bool quiet);

/* Redraw the bar. `name` is the item in progress. */
void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name);

/* Erase the bar. */
void ckpt_progress_end(const struct ckpt_progress *p);
