/* SPDX-License-Identifier: Apache-2.0 */
/* For LD_PRELOAD: allocation number CKPTFS_FAIL_MALLOC (from 1, counted in the whole process, from
 * the start of main's libraries on) has no memory; without the variable, the number of all is
 * written to file CKPTFS_COUNT_MALLOC at the end. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
void *malloc(size_t n);
void *calloc(size_t n, size_t size);
void *realloc(void *p, size_t n);

static atomic_ulong count;
static unsigned long failing; /* 0: none */

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("CKPTFS_FAIL_MALLOC");

    failing = text ? strtoul(text, NULL, 10) : 0;
    atomic_store(&count, 0);
}

__attribute__((destructor)) static void end(void)
{
    const char *path = getenv("CKPTFS_COUNT_MALLOC");
    const unsigned long n = atomic_load(&count);
    FILE *out = path ? fopen(path, "w") : NULL;

    if (out) {
        (void)fprintf(out, "%lu\n", n);
        (void)fclose(out);
    }
}

static int fails(void)
{
    if (atomic_fetch_add(&count, 1) + 1 != failing)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }

void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }

void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
