/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers' variables, and the text of --part. */
#include "tool/export/part.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/str.h"
#include "base/take.h"

enum { MOST_PARTS = 1 << 20 };

/* Slurm's variables count inside of a step only: a batch script has SLURM_NTASKS and SLURM_PROCID,
 * too, and runs once. RANK and WORLD_SIZE are not asked: shells of training jobs export them. */
static const struct launcher {
    const char *count, *index;
} launchers[] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                 {"PMI_SIZE", "PMI_RANK"},
                 {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};

static int of_text(const char *given, struct ckpt_part *ret, struct ckpt_err *err)
{
    const char *at = given;
    uint64_t index, count;

    if (!ckpt_take_u64(&at, &index) || !ckpt_take_text(&at, "/") || !ckpt_take_u64(&at, &count) ||
        *at || index < 1 || index > count || count > MOST_PARTS)
        return ckpt_fail(err, CKPT_USAGE,
                         "option part: '%s' is not I/N with I from 1 to N, and N of at most %d",
                         given, MOST_PARTS);
    *ret = (struct ckpt_part){.index = (uint32_t)index - 1, .count = (uint32_t)count};
    return 0;
}

static int of_launcher(const struct launcher *l, struct ckpt_part *ret, struct ckpt_err *err)
{
    const char *n = getenv(l->count), *i = getenv(l->index);
    unsigned long long count = 0, index = 0;

    if (!n || !ckpt_parse_u64(n, strlen(n), &count) || count < 1 || count > MOST_PARTS || !i ||
        !ckpt_parse_u64(i, strlen(i), &index) || index >= count)
        return ckpt_fail(
            err, CKPT_USAGE,
            "the environment has %s=%s and %s=%s, which is no rank of a launcher: with "
            "--alone this process writes everything, with --part I/N its part",
            l->count, n ? n : "", l->index, i ? i : "(not set)");
    *ret = (struct ckpt_part){(uint32_t)index, (uint32_t)count, count > 1 ? l->count : NULL};
    return 0;
}

int ckpt_part_find(const char *given, bool alone, struct ckpt_part *ret, struct ckpt_err *err)
{
    if (given && alone)
        return ckpt_fail(err, CKPT_USAGE, "--part and --alone: leave one out");
    if (given)
        return of_text(given, ret, err);
    *ret = (struct ckpt_part){.count = 1};
    for (size_t k = 0; !alone && k < sizeof launchers / sizeof *launchers; k++)
        if (getenv(launchers[k].count))
            return of_launcher(&launchers[k], ret, err);
    return 0;
}
