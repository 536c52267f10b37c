/* SPDX-License-Identifier: Apache-2.0 */
/* One line, redrawn in place: bar, bytes, rate, time left, name. */
#include "tool/progress.h"

#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "out.h"

enum { BAR_CELLS = 24, PLAIN_COLUMNS = 80 };

void ckpt_progress_begin(struct ckpt_progress *p, uint64_t already, uint64_t total, bool quiet)
{
    *p = (struct ckpt_progress){.shown = !quiet && isatty(STDERR_FILENO),
                                .begin = ckpt_now_ns(),
                                .already = already,
                                .total = total};
}

static int columns(void)
{
    struct winsize size;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col ? size.ws_col
                                                                       : PLAIN_COLUMNS;
}

/* Write a time as "1:02:03" or "2:03". */
static void put_time(char *buf, size_t len, double s)
{
    unsigned long t = s > 0 && s < 1e8 ? (unsigned long)s : 0;

    if (t >= 3600)
        (void)snprintf(buf, len, "%lu:%02lu:%02lu", t / 3600, t / 60 % 60, t % 60);
    else
        (void)snprintf(buf, len, "%lu:%02lu", t / 60, t % 60);
}

void ckpt_progress_draw(const struct ckpt_progress *p, uint64_t done, const char *name)
{
    char bar[BAR_CELLS + 1], line[512], left[32] = "-", have[CKPT_OUT_SIZE], all[CKPT_OUT_SIZE],
                                        rate_text[CKPT_OUT_SIZE];
    double part = p->total ? (double)done / (double)p->total : 1,
           spent = (double)(ckpt_now_ns() - p->begin) * 1e-9;
    double rate = spent > 0 ? (double)(done - p->already) / spent : 0;
    int full = (int)(part * BAR_CELLS);

    if (!p->shown)
        return;
    for (int i = 0; i < BAR_CELLS; i++)
        bar[i] = i < full ? '#' : '.';
    bar[BAR_CELLS] = '\0';
    if (rate > 0)
        put_time(left, sizeof left, (double)(p->total - done) / rate);
    (void)snprintf(line, sizeof line, "[%s] %3d%%  %s of %s  %s/s  ETA %s  %s", bar,
                   (int)(part * 100), ckpt_out_size(done, have), ckpt_out_size(p->total, all),
                   ckpt_out_size((uint64_t)rate, rate_text), left, name);
    (void)fprintf(stderr, "\r%.*s\033[K", columns() - 1, line);
    (void)fflush(stderr);
}

void ckpt_progress_end(const struct ckpt_progress *p)
{
    if (p->shown)
        (void)fputs("\r\033[K", stderr);
}
