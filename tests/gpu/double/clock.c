/* SPDX-License-Identifier: Apache-2.0 */
/* Simulated time. Each stream has a clock, which work that takes time moves forward, and an event
 * carries the time of the stream that it was recorded on to those that wait for it. Device memory
 * has the time of its last use, because a program reuses memory only after it has seen that use
 * end: so the time depends on what streams do in which order, and not on when a thread looked. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

#include "double.h"

enum { MOST_TEXT = 8192 };

_Thread_local double gpu_now;

static struct gpu_links links; /* all 0: nothing takes time */
static bool known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double latest; /* end of an exchange or a kernel */
static uint64_t exchanges;

static double figure(const char *text, const char *key)
{
    char quoted[64];

    (void)snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(text, quoted);
    if (!at)
        gpu_die("CKPTFS_GPU_LINKS: the file has no number %s", quoted);
    return strtod(at + strlen(quoted), NULL);
}

static void tell(int status, void *ctx)
{
    (void)status;
    (void)ctx;
    (void)fprintf(stderr, "gpu double: simulated %.9f s, %lu exchanges\n", latest,
                  (unsigned long)exchanges);
}

static __attribute__((constructor)) void read_links(void)
{
    const char *path = getenv("CKPTFS_GPU_LINKS");
    char text[MOST_TEXT];

    if (!path || !*path)
        return;
    FILE *f = fopen(path, "re");
    if (!f)
        gpu_die("CKPTFS_GPU_LINKS: can't open '%s'", path);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    (void)fclose(f);
    links = (struct gpu_links){
        .call_s = figure(text, "call_s"),
        .link_hop_s = figure(text, "link_hop_s"),
        .net_hop_s = figure(text, "net_hop_s"),
        .tree_call_s = figure(text, "tree_call_s"),
        .tree_hop_s = figure(text, "tree_hop_s"),
        .tree_member_s = figure(text, "tree_member_s"),
        .tree_share = figure(text, "tree_share"),
        .link_bytes_s = figure(text, "link_bytes_s"),
        .net_bytes_s = figure(text, "net_bytes_s"),
        .upload_bytes_s = figure(text, "upload_bytes_s"),
        .place_bytes_s = figure(text, "place_bytes_s"),
    };
    known = true;
    (void)on_exit(tell, NULL);
}

const struct gpu_links *gpu_links(void) { return known ? &links : NULL; }

static double later(double a, double b) { return a > b ? a : b; }

void gpu_clock_reach(double t) { gpu_now = later(gpu_now, t); }

double gpu_clock_begin(struct gpu_memory *const *use, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (use[i] && use[i]->where == GPU_DEVICE)
            gpu_clock_reach(atomic_load_explicit(&use[i]->until, memory_order_relaxed));
    return gpu_now;
}

void gpu_clock_end(struct gpu_memory *const *use, size_t n, double end, enum gpu_clock_work work)
{
    gpu_clock_reach(end);
    for (size_t i = 0; i < n; i++)
        if (use[i])
            atomic_store_explicit(&use[i]->until, gpu_now, memory_order_relaxed);
    if (work == GPU_CLOCK_COPY || !known)
        return;
    (void)pthread_mutex_lock(&lock);
    latest = later(latest, gpu_now);
    exchanges += work == GPU_CLOCK_EXCHANGE;
    (void)pthread_mutex_unlock(&lock);
}
