/* SPDX-License-Identifier: Apache-2.0 */
/* A progress bar on stderr, where that is a terminal. */
#ifndef CKPT_FS_PROGRESS_H
#define CKPT_FS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct ckpt_progress {
    bool shown; /* stderr is a terminal and nobody asked for quiet */
    double begin;
    uint64_t already; /* bytes that were there before: not counted in the rate */
    uint64_t total;
};

void ckpt_progress_begin(struct ckpt_progress *p, uint64_t already, uint64_t total, bool quiet);

/* Redraw. name: what is being worked on. */
void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name);

/* Wipe the bar; seconds since the beginning. */
double ckpt_progress_end(const struct ckpt_progress *p);

#endif
