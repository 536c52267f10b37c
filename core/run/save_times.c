/* SPDX-License-Identifier: Apache-2.0 */
/* Judging a save by the times of its files. */
#include "run/save_times.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/str.h"

#define LEAST_GAP (60 * CKPT_SECOND_NS)
#define YOUNG (120 * CKPT_SECOND_NS) /* a writer that is still active makes no longer pause */
#define SLOWEST_COPY (1 << 20)       /* bytes per second */

static int by_end(const void *a, const void *b)
{
    const struct ckpt_written *x = a, *y = b;

    return (x->end_ns > y->end_ns) - (x->end_ns < y->end_ns);
}

/* The time at which writing of the file began: its creation, if that can be believed. If a second
 * save overwrites a file, it was created by the first save, before the marker. */
static int64_t begin_of(const struct ckpt_written *w, int64_t earliest)
{
    const int64_t took = w->end_ns - w->begin_ns;
    const bool plausible = w->begin_ns >= earliest && took >= 0 &&
                           (uint64_t)(took / CKPT_SECOND_NS) <= w->size / SLOWEST_COPY + 1;

    return w->begin_ns && plausible ? w->begin_ns : w->end_ns;
}

static int64_t longer(int64_t a, int64_t b) { return a > b ? a : b; }

enum ckpt_save_times ckpt_save_times(struct ckpt_written *w, size_t n, const int64_t *marker_ns)
{
    int64_t last;       /* the last point in time so far: a write, or the marker */
    int64_t widest = 0; /* the longest pause so far */
    int64_t first = 0;  /* the pause between the marker and the first shard, if it is the first */
    int64_t later = 0;  /* the longest pause after that one */
    bool after = !marker_ns;

    if (n < 2)
        return CKPT_TIMES_ONE;
    qsort(w, n, sizeof *w, by_end);
    last = w[0].end_ns;
    for (size_t i = 0; i < n; i++) {
        const bool passes = !after && *marker_ns <= w[i].end_ns;
        if (passes) {
            widest = longer(widest, i ? *marker_ns - last : 0);
            last = *marker_ns;
            after = true;
        }
        const int64_t gap = begin_of(&w[i], marker_ns ? *marker_ns : last) - last;
        if (i && after && gap > LEAST_GAP && gap / 4 > widest)
            return marker_ns && w[0].end_ns <= *marker_ns ? CKPT_TIMES_TWO : CKPT_TIMES_PAUSE;
        first = i == 0 && passes ? gap : first;
        later = i ? longer(later, gap) : 0;
        widest = longer(widest, gap);
        last = w[i].end_ns;
    }
    return first > LEAST_GAP && first / 4 > later ? CKPT_TIMES_PAUSE : CKPT_TIMES_ONE;
}

/* ---- what the times of a save say ---- */

/* "2024-05-01 10:00:00" */
struct date {
    char text[32];
};

static struct date date_of(int64_t ns)
{
    const time_t t = (time_t)(ns / CKPT_SECOND_NS);
    struct date d = {""};
    struct tm tm;

    if (gmtime_r(&t, &tm))
        (void)strftime(d.text, sizeof d.text, "%Y-%m-%d %H:%M:%S", &tm);
    return d;
}

/* The first and the last shard with their times, and the marker with its own; new. */
static char *times_text(const struct ckpt_save_span *s)
{
    ckpt_cleanup(ckpt_freep) char *end = s->marker
                                             ? ckpt_asprintf(" ('%s', which ends a save, at %s)",
                                                             s->marker, date_of(s->marker_ns).text)
                                             : strdup("");

    return end ? ckpt_asprintf("'%s' was written at %s, '%s' at %s UTC%s", s->oldest,
                               date_of(s->oldest_ns).text, s->newest, date_of(s->newest_ns).text,
                               end)
               : NULL;
}

int ckpt_save_times_report(const struct ckpt_save_span *s, enum ckpt_save_times say,
                           struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = times_text(s);

    if (!text)
        return ckpt_nomem(err);
    if (ckpt_wall_ns() - s->newest_ns < YOUNG)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' is being written: %s: wait until the save has ended, or open it "
                         "anyway with -o allow_mixed",
                         s->step, text);
    if (say == CKPT_TIMES_TWO)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' holds shards of two saves: %s: save or copy the step again, or, if "
                         "you know that it is one save, use -o allow_mixed",
                         s->step, text);
    ckpt_catalog_warn(cat, "'%s' was written with a long pause: %s; is it one save?", s->step,
                      text);
    return 0;
}

int64_t ckpt_wall_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * CKPT_SECOND_NS + t.tv_nsec;
}
