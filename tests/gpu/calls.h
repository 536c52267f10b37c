/* SPDX-License-Identifier: Apache-2.0 */
/* What programs on devices share: calls that must not fail, and the id of a communicator. */
#ifndef CKPT_TESTS_GPU_CALLS_H
#define CKPT_TESTS_GPU_CALLS_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <ckptfs/load_nccl.h>

_Noreturn static inline void die(const char *what, const char *why)
{
    (void)fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    exit(2);
}

static inline void cuda(cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        die(what, cudaGetErrorString(e));
}

static inline void nccl(ncclResult_t e, const char *what)
{
    if (e != ncclSuccess)
        die(what, ncclGetErrorString(e));
}

/* The id passes through a file: the first rank makes both, the others wait for it. */
static inline void pass_id(const char *path, bool first, uint32_t most_ms, ncclUniqueId *id)
{
    char part[4096];
    FILE *f;

    (void)snprintf(part, sizeof part, "%s.part", path);
    if (first) {
        nccl(ncclGetUniqueId(id), "an id");
        if (!(f = fopen(part, "w")) || fwrite(id, sizeof *id, 1, f) != 1 || fclose(f) != 0 ||
            rename(part, path) != 0)
            die(path, "can't be written");
        return;
    }
    for (uint32_t ms = 0; !(f = fopen(path, "r")); ms++) {
        if (ms > most_ms)
            die(path, "nobody wrote it");
        (void)usleep(1000);
    }
    if (fread(id, sizeof *id, 1, f) != 1 || fclose(f) != 0)
        die(path, "can't be read");
}

#endif
