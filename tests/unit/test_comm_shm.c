/* SPDX-License-Identifier: Apache-2.0 */
/* Slabs: another process's buffers, mapped; only this machine's, and only the right one. */
#include "test.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/shm.h"

enum { LEN = 3 << 20, WORD = 4711 };

/* What a child that keeps shared memory tells, over a pipe. */
struct told {
    struct ckpt_shm_place place;
    uint64_t off[2]; /* of the bytes of two loads */
};

/* A child with buffers of LEN bytes of 7, then others of 8, until the pipe ends. */
static pid_t start_child(int out, const int end[2])
{
    struct ckpt_shm s;
    struct told t;
    char byte;
    pid_t pid = fork();

    if (pid != 0)
        return pid;
    (void)close(end[1]);
    ckpt_shm_init(&s, WORD);
    ckpt_shm_describe(&s, &t.place);
    for (int i = 0; i < 2; i++) {
        unsigned char *p = ckpt_shm_map(&s, LEN);
        if (!p)
            _exit(1);
        memset(p, 7 + i, LEN);
        (void)ckpt_shm_offset(&s, p + 1, &t.off[i]);
    }
    (void)!write(out, &t, sizeof t);
    (void)!read(end[0], &byte, 1);
    _exit(0);
}

TEST(shm, is_mapped_by_another_process)
{
    int told[2], end[2], status;
    struct ckpt_shm_view v;
    struct told t;

    CHECK(pipe(told) == 0 && pipe(end) == 0);
    const pid_t pid = start_child(told[1], end);
    CHECK(pid > 0 && read(told[0], &t, sizeof t) == (ssize_t)sizeof t);
    CHECK(ckpt_shm_reach(&t.place));
    CHECK(ckpt_shm_open(&v, &t.place));
    const unsigned char *old = ckpt_shm_at(&v, t.off[0], LEN - 1);
    CHECK(old && old[0] == 7 && old[LEN - 2] == 7);
    const unsigned char *new = ckpt_shm_at(&v, t.off[1], LEN - 1);
    CHECK(new &&new[0] == 8 && new[LEN - 2] == 8);
    CHECK(!ckpt_shm_at(&v, t.off[1], UINT64_MAX) && !ckpt_shm_at(&v, 1ull << 40, 1));

    struct ckpt_shm_place other = t.place;
    other.node++; /* another machine */
    CHECK(!ckpt_shm_reach(&other));
    other = t.place;
    other.word++; /* another process has got that number */
    CHECK(!ckpt_shm_reach(&other));
    other = t.place;
    other.fd = 0; /* it has none */
    CHECK(!ckpt_shm_reach(&other));

    (void)close(end[1]); /* it ends; what was mapped stays */
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(!ckpt_shm_reach(&t.place) && new[1] == 8);
    ckpt_shm_leave(&v);
    (void)close(told[0]), (void)close(told[1]), (void)close(end[0]);
}

TEST(shm, gives_memory_back)
{
    struct ckpt_shm s;
    uint64_t off, again;

    ckpt_shm_init(&s, WORD);
    CHECK(s.fd >= 0);
    unsigned char *p = ckpt_shm_map(&s, LEN), *q;
    CHECK(p && ckpt_shm_offset(&s, p, &off) && ckpt_shm_offset(&s, p + LEN - 1, &again));
    CHECK(again == off + LEN - 1 && !ckpt_shm_offset(&s, p + LEN, &again));
    memset(p, 1, LEN);
    ckpt_shm_unmap(p, LEN);
    CHECK((q = ckpt_shm_map(&s, LEN)) && q[0] == 0 && ckpt_shm_offset(&s, q, &again));
    CHECK(again >= off + LEN);
    ckpt_shm_unmap(q, LEN);
    ckpt_shm_close(&s);
    CHECK(!ckpt_shm_map(&s, LEN));
    ckpt_shm_unmap(NULL, LEN);
}

TESTS(T(shm, is_mapped_by_another_process), T(shm, gives_memory_back))
