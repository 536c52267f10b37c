/* SPDX-License-Identifier: Apache-2.0 */
/* Misuse and ordered faults.
 *
 * CKPTFS_GPU_FAULT is a list, by commas, of CALL[:rank=R][:after=N][:times=T][:delay=MS]:WHAT. To
 * the rank's calls (without a rank: to each rank's) after the Nth, all or T of them, WHAT happens:
 * error (the call fails), async (what it began fails later), hang (what it began never ends), kill
 * (the process dies), slow (the call takes MS). The rank is CKPTFS_GPU_RANK, or what mpirun or
 * torchrun say. */
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "double.h"

enum { MOST_FAULTS = 8, LINE = 512, LEAKED = 97 };

struct fault {
    char call[64], what[16];
    long rank; /* -1: each */
    unsigned after, times, delay;
    atomic_uint calls;
};

static struct fault faults[MOST_FAULTS];
static size_t nfaults;
static long own_rank;
static atomic_bool beyond_repair;

void gpu_die(const char *format, ...)
{
    char line[LINE];
    va_list list;

    va_start(list, format);
    (void)vsnprintf(line, sizeof line, format, list);
    va_end(list);
    (void)fprintf(stderr, "gpu double: rank %ld: %s\n", own_rank, line);
    abort();
}

uint64_t gpu_number(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);

    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static long number_of(const char *word, const char *key, long otherwise)
{
    const size_t n = strlen(key);

    return strncmp(word, key, n) == 0 ? strtol(word + n, NULL, 10) : otherwise;
}

static void parse(char *text)
{
    struct fault *f = &faults[nfaults];
    char *at, *word = strtok_r(text, ":", &at);

    if (!word || nfaults == MOST_FAULTS)
        gpu_die("CKPTFS_GPU_FAULT: nothing, or too much");
    (void)snprintf(f->call, sizeof f->call, "%s", word);
    f->rank = -1;
    f->times = UINT_MAX;
    while ((word = strtok_r(NULL, ":", &at))) {
        f->rank = number_of(word, "rank=", f->rank);
        f->after = (unsigned)number_of(word, "after=", f->after);
        f->times = (unsigned)number_of(word, "times=", f->times);
        f->delay = (unsigned)number_of(word, "delay=", f->delay);
        if (!strchr(word, '='))
            (void)snprintf(f->what, sizeof f->what, "%s", word);
    }
    nfaults++;
}

static __attribute__((constructor)) void read_environment(void)
{
    static const char *const ranks[] = {"CKPTFS_GPU_RANK", "OMPI_COMM_WORLD_RANK", "RANK"};
    const char *text = getenv("CKPTFS_GPU_FAULT");

    for (size_t i = sizeof ranks / sizeof *ranks; i-- > 0;)
        own_rank = (long)gpu_number(ranks[i], (uint64_t)own_rank);
    if (!text || !*text)
        return;
    char *copy = strdup(text), *at;
    for (char *one = strtok_r(copy, ",", &at); one; one = strtok_r(NULL, ",", &at))
        parse(one);
    free(copy);
}

static enum gpu_fault happen(const struct fault *f)
{
    if (strcmp(f->what, "kill") == 0)
        (void)kill(getpid(), SIGKILL);
    if (strcmp(f->what, "slow") == 0) {
        (void)usleep(f->delay * 1000);
        return GPU_WELL;
    }
    if (strcmp(f->what, "error") == 0)
        return GPU_ERROR;
    atomic_store(&beyond_repair, true);
    if (strcmp(f->what, "async") == 0)
        return GPU_ASYNC;
    if (strcmp(f->what, "hang") == 0)
        return GPU_HANG;
    gpu_die("CKPTFS_GPU_FAULT: '%s' is nothing that can happen", f->what);
}

enum gpu_fault gpu_fault(const char *call)
{
    const char *version = strstr(call, "_v"); /* cuMemAlloc_v2 is ordered as cuMemAlloc */
    const size_t n = version ? (size_t)(version - call) : strlen(call);
    enum gpu_fault worst = GPU_WELL;

    for (size_t i = 0; i < nfaults; i++) {
        struct fault *f = &faults[i];
        if (strncmp(f->call, call, n) != 0 || f->call[n] || (f->rank >= 0 && f->rank != own_rank))
            continue;
        const unsigned nth = atomic_fetch_add(&f->calls, 1);
        if (nth >= f->after && nth - f->after < f->times && worst == GPU_WELL)
            worst = happen(f);
    }
    return worst;
}

bool gpu_leaks_matter(void) { return !atomic_load(&beyond_repair); }

void gpu_report_leaks(int status, size_t leaks)
{
    if (!leaks)
        return;
    (void)fprintf(stderr, "gpu double: rank %ld: %zu leaks\n", own_rank, leaks);
    (void)fflush(NULL);
    if (status == 0)
        _exit(LEAKED);
}
