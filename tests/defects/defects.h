/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of named lies: each must give one clear error, soon and without much memory. */
#ifndef CKPT_TESTS_DEFECTS_DEFECTS_H
#define CKPT_TESTS_DEFECTS_DEFECTS_H

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "base/err.h"
#include "sanitized.h"

enum { MOST_SECONDS = SANITIZED ? 120 : 20 };

struct judge {
    const char *filter; /* only cases whose names contain it; NULL: all */
    int failed, run;
};

static inline bool wanted(const struct judge *j, const char *name)
{
    return !j->filter || strstr(name, j->filter);
}

/* `file` must be named by the error, besides `needle`; code CKPT_OK: it must be accepted. */
static inline void judge(struct judge *j, const char *name, int result, const struct ckpt_err *err,
                         enum ckpt_code code, const char *file, const char *needle, clock_t begin)
{
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    const char *why = NULL;

    j->run++;
    if (code == CKPT_OK)
        why = result < 0 ? "must be accepted" : NULL;
    else if (result == 0)
        why = "must be refused";
    else if (err->code != code)
        why = "another code is expected";
    else if (file && !strstr(err->text, file))
        why = "does not name the file";
    else if (!strstr(err->text, needle))
        why = "does not say what is expected";
    if (!why && seconds > MOST_SECONDS)
        why = "took too long";
    if (!why)
        return;
    j->failed++;
    (void)fprintf(stderr, "%s: %s\n    wanted: %s '%s'\n    got:    %s '%s' (%.1f s)\n", name, why,
                  ckpt_code_name(code), needle ? needle : "", ckpt_code_name(err->code), err->text,
                  seconds);
}

static inline int verdict(const struct judge *j)
{
    struct rusage use;

    (void)getrusage(RUSAGE_SELF, &use);
    (void)printf("%d cases, %d failed, %ld MiB at most\n", j->run, j->failed, use.ru_maxrss / 1024);
    return j->failed || j->run == 0;
}

#endif
