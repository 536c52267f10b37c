/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a fuzz target over files and directories of inputs, without libFuzzer: any compiler, any
 * sanitizer. */
#include "fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

static unsigned long count;

/* libFuzzer's, for the mutators, which are not called here. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max)
{
    (void)data;
    (void)max;
    return size;
}

static void run_file(const char *path, size_t size)
{
    FILE *f = fopen(path, "rb");
    uint8_t *data = malloc(size + 1);

    MUST(f && data && fread(data, 1, size, f) == size);
    (void)fclose(f);
    uint8_t *exact = malloc(size); /* so that a read past its end is seen */
    if (size)
        memcpy(exact, data, size);
    free(data);
    (void)LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    count++;
}

static void run_path(const char *path)
{
    struct stat st;

    if (stat(path, &st) < 0)
        return;
    if (S_ISREG(st.st_mode)) {
        run_file(path, (size_t)st.st_size);
        return;
    }
    DIR *d = opendir(path);
    char child[4096];
    for (const struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.')
            continue;
        (void)snprintf(child, sizeof child, "%s/%s", path, e->d_name);
        run_path(child);
    }
    if (d)
        (void)closedir(d);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        run_path(argv[i]);
    (void)printf("%lu inputs\n", count);
    return count ? 0 : 1;
}
