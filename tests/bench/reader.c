/* SPDX-License-Identifier: Apache-2.0 */
/* Reads files in one of several ways and prints bytes and seconds: the benchmark's measuring end.
 *
 * usage: bench_reader seq|p4|mmap FILE...     the files' own page cache is dropped first
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 1 << 20, READERS = 4 };

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct file {
    int fd;
    uint64_t size;
};

static struct file open_cold(const char *path)
{
    struct file f = {.fd = open(path, O_RDONLY)};
    struct stat st;

    if (f.fd < 0 || fstat(f.fd, &st) < 0)
        die(path);
    f.size = (uint64_t)st.st_size;
    (void)posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED);
    return f;
}

static void read_range(int fd, uint64_t lo, uint64_t hi, char *buf)
{
    while (lo < hi) {
        ssize_t n = pread(fd, buf, hi - lo < CHUNK ? hi - lo : CHUNK, (off_t)lo);
        if (n <= 0)
            die("pread");
        lo += (uint64_t)n;
    }
}

static void read_seq(struct file f)
{
    char *buf = malloc(CHUNK);
    read_range(f.fd, 0, f.size, buf);
    free(buf);
}

struct quarter {
    struct file f;
    unsigned i;
};

static void *read_quarter(void *arg)
{
    const struct quarter *q = arg;
    char *buf = malloc(CHUNK);
    uint64_t part = (q->f.size / READERS) & ~(uint64_t)(CHUNK - 1);

    read_range(q->f.fd, q->i * part, q->i + 1 == READERS ? q->f.size : (q->i + 1) * part, buf);
    free(buf);
    return NULL;
}

static void read_p4(struct file f)
{
    pthread_t thread[READERS];
    struct quarter q[READERS];

    for (unsigned i = 0; i < READERS; i++) {
        q[i] = (struct quarter){f, i};
        if (pthread_create(&thread[i], NULL, read_quarter, &q[i]))
            die("pthread_create");
    }
    for (unsigned i = 0; i < READERS; i++)
        (void)pthread_join(thread[i], NULL);
}

/* Copied out in big steps, as a framework copies tensors from a map. */
static void read_mmap(struct file f)
{
    enum { STEP = 16 << 20 };
    char *map = mmap(NULL, f.size, PROT_READ, MAP_SHARED, f.fd, 0), *buf = malloc(STEP);

    if (map == MAP_FAILED)
        die("mmap");
    for (uint64_t at = 0; at < f.size; at += STEP)
        memcpy(buf, map + at, f.size - at < STEP ? f.size - at : STEP);
    __asm__ volatile("" ::"r"(buf) : "memory");
    free(buf);
    (void)munmap(map, f.size);
}

int main(int argc, char **argv)
{
    uint64_t total = 0;
    double t0;

    if (argc < 3) {
        fprintf(stderr, "usage: %s seq|p4|mmap FILE...\n", argv[0]);
        return 2;
    }
    t0 = now();
    for (int i = 2; i < argc; i++) {
        struct file f = open_cold(argv[i]);
        if (i == 2)
            t0 = now();
        if (strcmp(argv[1], "seq") == 0)
            read_seq(f);
        else if (strcmp(argv[1], "p4") == 0)
            read_p4(f);
        else
            read_mmap(f);
        total += f.size;
        (void)close(f.fd);
    }
    printf("%llu %.6f\n", (unsigned long long)total, now() - t0);
    return 0;
}
