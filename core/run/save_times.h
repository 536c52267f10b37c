/* SPDX-License-Identifier: Apache-2.0 */
/* Judging a save by clock times, where nothing else is known about it.
 *
 * When a step is seen for the first time, nobody has recorded what its files were before. If a save
 * was interrupted, or is in progress over an older one, shards of two saves lie side by side, and
 * only their times tell: one save writes its files in one go and then its marker, and between two
 * saves there is a pause. Times are weak evidence. A copy has its files in any order and speed, a
 * late rank or a slow night makes a pause within one save, and the clocks of nodes differ. So the
 * times alone refuse a step in two cases: the pause lies after the marker, with shards older than
 * the marker (two saves), or it has just begun (a writer may still be active). Any other long pause
 * is a warning. What is seen again later is judged by identities instead (run/save.h). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "tensor/catalog.h"

struct ckpt_save_file;

#define CKPT_SECOND_NS INT64_C(1000000000)

struct ckpt_written {
    int64_t begin_ns, end_ns; /* time of creation (0: not known) and of the last write */
    uint64_t size;
    const struct ckpt_save_file *file;
};

enum ckpt_save_times {
    CKPT_TIMES_ONE,
    CKPT_TIMES_PAUSE, /* nothing was written for a long time: by itself that proves nothing (a late
                         rank, a slow night), but a recent pause may be that of a save in progress
                       */
    CKPT_TIMES_TWO,   /* there is such a pause after the marker, and shards are older than it */
};

/* Find out what the times of n shards say about their saves. `w` is sorted by end_ns here. A copy
 * has its files in any order and speed, so what counts is a pause in which nothing was written:
 * after the marker (NULL: there is none; then anywhere), longer than a minute and than four times
 * every earlier pause (the pause between the marker and the first of all shards: than every other).
 * A file that was created after the marker (without a marker: after the file before the pause)
 * counts as being written since its creation, unless the rate would be absurdly low, because a
 * large file in a copy takes its time. */
enum ckpt_save_times ckpt_save_times(struct ckpt_written *w, size_t n, const int64_t *marker_ns);

/* The shards of a save that were written first and last: their paths in the step, and their times.
 */
struct ckpt_save_span {
    const char *step; /* path of the step's folder, for messages */
    const char *oldest, *newest;
    int64_t oldest_ns, newest_ns;
    const char *marker; /* the file that ends a save; NULL: the format has none */
    int64_t marker_ns;
};

/* Act on what the times say, which is not CKPT_TIMES_ONE. CONFLICT: the save has shards of two
 * saves, or is being written. A pause that proves nothing is a warning of cat. */
int ckpt_save_times_report(const struct ckpt_save_span *s, enum ckpt_save_times say,
                           struct ckpt_catalog *cat, struct ckpt_err *err);

/* The time of day, in the nanoseconds of files' times. */
int64_t ckpt_wall_ns(void);
