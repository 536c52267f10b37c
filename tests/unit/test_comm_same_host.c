/* SPDX-License-Identifier: Apache-2.0 */
/* Reading another process's memory: only this machine's, and only while its word stands. */
#include "test.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/same_host.h"

enum { LEN = 3 << 20 };

struct shared {
    atomic_ullong word;
    atomic_int step; /* 1: the child is ready, 2: it may go */
    unsigned char *data;
};

/* A child with data of its own at s->data; it lives until step 2. */
static pid_t start_child(struct shared *s)
{
    pid_t pid = fork();

    if (pid != 0)
        return pid;
    ckpt_same_host_permit((uint64_t)getppid());
    memset(s->data, 7, LEN);
    atomic_store(&s->step, 1);
    while (atomic_load(&s->step) < 2)
        (void)usleep(1000);
    _exit(0);
}

TEST(same_host, bytes_are_good_while_the_word_stands)
{
    struct shared *s =
        mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    unsigned char *got = malloc(LEN);
    struct ckpt_same_host of;
    int status;

    CHECK(s != MAP_FAILED && got);
    s->data = calloc(1, LEN);
    atomic_store(&s->word, 0x1234567890abcdef);
    pid_t pid = start_child(s);
    CHECK(pid > 0);
    while (atomic_load(&s->step) < 1)
        (void)usleep(1000);
    ckpt_same_host_self(&of, &s->word);
    of.pid = (uint64_t)pid;
    const uint64_t at = (uint64_t)(uintptr_t)s->data;
    if (!ckpt_same_host_reach(&of))
        print_message("another process's memory can't be read here\n");
    else {
        CHECK(ckpt_same_host_read(&of, got, LEN, at));
        for (size_t i = 0; i < LEN; i++)
            CHECK(got[i] == 7);
        CHECK(!ckpt_same_host_read(&of, got, LEN, 4096)); /* nothing is there */
    }
    struct ckpt_same_host other = of;
    other.node++;
    CHECK(!ckpt_same_host_reach(&other));
    other = of;
    other.word++; /* another process has got that number */
    CHECK(!ckpt_same_host_reach(&other) && !ckpt_same_host_read(&other, got, LEN, at));
    atomic_store(&s->word, 0);
    CHECK(!ckpt_same_host_reach(&of) && !ckpt_same_host_read(&of, got, LEN, at));
    atomic_store(&s->word, of.word);
    atomic_store(&s->step, 2);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!ckpt_same_host_read(&of, got, LEN, at)); /* it is gone */
    free(s->data);
    free(got);
    (void)munmap(s, sizeof *s);
}

/* A process that forks n others and waits for the end of a pipe; their numbers go to out. */
static pid_t start_family(unsigned n, const int ends[2], pid_t *out)
{
    pid_t pid = fork();
    const int end = ends[0];
    char byte;

    if (pid != 0)
        return pid;
    (void)close(ends[1]);
    for (unsigned i = 0; i < n; i++) {
        const pid_t child = fork();
        if (child == 0) {
            (void)!read(end, &byte, 1);
            _exit(0);
        }
        out[i] = child;
    }
    (void)!read(end, &byte, 1);
    while (wait(NULL) > 0)
        ;
    _exit(0);
}

TEST(same_host, ranks_of_a_launcher_have_it_as_their_ancestor)
{
    pid_t *child = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ends[2];

    CHECK(child != MAP_FAILED && pipe(ends) == 0);
    const pid_t pid = start_family(2, ends, child);
    while (!((volatile pid_t *)child)[1])
        (void)usleep(1000);
    const uint64_t self = (uint64_t)getpid(), launcher = (uint64_t)pid;
    const uint64_t a = (uint64_t)child[0], b = (uint64_t)child[1];
    const uint64_t siblings[] = {a, b}, mixed[] = {a, launcher}, cousins[] = {b, self, a};
    const uint64_t with_init[] = {a, 1}, unseen[] = {a, UINT64_C(1) << 40};
    CHECK(ckpt_same_host_ancestor(siblings, 2) == launcher);
    CHECK(ckpt_same_host_ancestor(mixed, 2) == launcher);
    CHECK(ckpt_same_host_ancestor(cousins, 3) == self);
    CHECK(ckpt_same_host_ancestor(&siblings[1], 1) == b);
    CHECK(ckpt_same_host_ancestor(with_init, 2) == 0);
    CHECK(ckpt_same_host_ancestor(unseen, 2) == 0);
    (void)close(ends[0]);
    (void)close(ends[1]);
    (void)waitpid(pid, NULL, 0);
    (void)munmap(child, 4096);
}

TESTS(T(same_host, bytes_are_good_while_the_word_stands),
      T(same_host, ranks_of_a_launcher_have_it_as_their_ancestor))
