/* SPDX-License-Identifier: Apache-2.0 */
/* Reading another process's memory, and the permission for it. */
#include "comm/same_host.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <xxhash.h>

uint64_t ckpt_node_digest(void)
{
    struct utsname u;
    char boot[64] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    const char *given = getenv("CKPTFS_NODE");

    if (f) {
        (void)!fread(boot, 1, sizeof boot - 1, f);
        (void)fclose(f);
    }
    if (given)
        return XXH3_64bits(given, strlen(given));
    if (uname(&u) < 0)
        u.nodename[0] = '\0';
    return XXH3_64bits_withSeed(u.nodename, strlen(u.nodename), XXH3_64bits(boot, strlen(boot)));
}

void ckpt_same_host_self(struct ckpt_same_host *ret, const atomic_ullong *word)
{
    *ret = (struct ckpt_same_host){
        .node = ckpt_node_digest(),
        .pid = (uint64_t)getpid(),
        .at = (uint64_t)(uintptr_t)word,
        .word = atomic_load(word),
    };
}

/* ---- permission ---- */

bool ckpt_same_host_restricted(void)
{
    FILE *f = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
    int scope = '0';

    if (f) {
        scope = fgetc(f);
        (void)fclose(f);
    }
    return scope == '1';
}

/* The parent of a process; 0: it is not visible. */
static uint64_t parent_of(uint64_t pid)
{
    char path[64], text[512];
    unsigned long long parent = 0;
    FILE *f;

    (void)snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    if (!(f = fopen(path, "re")))
        return 0;
    const size_t n = fread(text, 1, sizeof text - 1, f);
    (void)fclose(f);
    text[n] = '\0';
    /* "pid (name) state parent": the name may have any bytes */
    const char *end = strrchr(text, ')');
    return end && sscanf(end, ") %*c %llu", &parent) == 1 ? parent : 0;
}

/* Is `of` the process pid, or an ancestor of it? */
static bool is_ancestor(uint64_t of, uint64_t pid)
{
    while (pid != of && pid > 1)
        pid = parent_of(pid);
    return pid == of;
}

uint64_t ckpt_same_host_ancestor(const uint64_t *pid, size_t n)
{
    uint64_t at = n ? pid[0] : 0;

    for (size_t i = 1; i < n && at > 1; i++)
        while (at > 1 && !is_ancestor(at, pid[i]))
            at = parent_of(at);
    return at > 1 ? at : 0;
}

/* PR_SET_PTRACER is an attribute of the process, which all its comms share. */
static struct {
    pthread_mutex_t lock;
    unsigned count;
    uint64_t ancestor;
} permitted = {.lock = PTHREAD_MUTEX_INITIALIZER};

void ckpt_same_host_permit(uint64_t ancestor)
{
    (void)pthread_mutex_lock(&permitted.lock);
    const uint64_t both[2] = {ancestor, permitted.ancestor};
    permitted.ancestor = permitted.count++ ? ckpt_same_host_ancestor(both, 2) : ancestor;
    (void)prctl(PR_SET_PTRACER, (unsigned long)permitted.ancestor, 0, 0, 0);
    (void)pthread_mutex_unlock(&permitted.lock);
}

void ckpt_same_host_forbid(void)
{
    (void)pthread_mutex_lock(&permitted.lock);
    if (--permitted.count == 0)
        (void)prctl(PR_SET_PTRACER, 0, 0, 0, 0);
    (void)pthread_mutex_unlock(&permitted.lock);
}

/* ---- reading ---- */

static bool read_all(uint64_t pid, unsigned char *buf, size_t len, uint64_t at)
{
    while (len > 0) {
        const struct iovec here = {buf, len}, there = {(void *)(uintptr_t)at, len};
        ssize_t got = process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
        if (got <= 0)
            return false;
        buf += got;
        at += (uint64_t)got;
        len -= (size_t)got;
    }
    return true;
}

/* Does the process still have its word? */
static bool is_valid(const struct ckpt_same_host *of)
{
    uint64_t word = 0;

    return read_all(of->pid, (unsigned char *)&word, sizeof word, of->at) && word == of->word;
}

bool ckpt_same_host_reach(const struct ckpt_same_host *of)
{
    return of->node == ckpt_node_digest() && of->word != 0 && is_valid(of);
}

bool ckpt_same_host_read(const struct ckpt_same_host *of, void *buf, size_t len, uint64_t at)
{
    return read_all(of->pid, buf, len, at) && is_valid(of);
}
