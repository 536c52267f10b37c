/* SPDX-License-Identifier: Apache-2.0 */
/* How long a DCP's .metadata takes to read, and how much memory: bench_metadata FILE. */
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "format/dcp/metadata.h"

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    struct ckpt_dcp_metadata m = {0};
    struct ckpt_fdpool *pool = NULL;
    struct ckpt_source *s = NULL;
    struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};
    struct rusage use;
    double start = now();

    if (argc != 2)
        return 2;
    if (ckpt_fdpool_new(0, &pool, &err) < 0 ||
        ckpt_dir_open(argv[1], CKPT_LINKS_BENEATH, &dir, &err) < 0 ||
        ckpt_source_file_new(dir, ".metadata", pool, &s, &err) < 0 ||
        ckpt_dcp_metadata_add(&m, s, false, &err) < 0 || ckpt_dcp_metadata_finish(&m, &err) < 0) {
        (void)fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    double end = now();
    (void)getrusage(RUSAGE_SELF, &use);
    (void)printf("%zu tensors, %zu chunks, %.3f s, %ld MiB\n", m.tensors.len, m.chunks.len,
                 end - start, use.ru_maxrss / 1024);
    ckpt_dcp_metadata_release(&m);
    ckpt_source_unref(s);
    ckpt_dir_unref(dir);
    ckpt_fdpool_unref(pool);
    return 0;
}
