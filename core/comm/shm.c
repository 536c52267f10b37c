/* SPDX-License-Identifier: Apache-2.0 */
/* Files without names, which processes of a machine map. */
#include "comm/shm.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/mem.h"

enum { PAGE = 1 << 16 }; /* a multiple of every machine's page */

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

/* ---- this process's ---- */

void ckpt_shm_init(struct ckpt_shm *s, uint64_t word)
{
    *s = (struct ckpt_shm){.fd = memfd_create("ckptfs", MFD_CLOEXEC), .word = word, .next = PAGE};
    if (s->fd >= 0 && (ftruncate(s->fd, PAGE) < 0 ||
                       pwrite(s->fd, &s->word, sizeof s->word, 0) != (ssize_t)sizeof s->word))
        ckpt_shm_close(s);
}

void ckpt_shm_close(struct ckpt_shm *s) { ckpt_closep(&s->fd); }

void ckpt_shm_describe(const struct ckpt_shm *s, struct ckpt_shm_place *ret)
{
    *ret = (struct ckpt_shm_place){ckpt_node_digest(), (uint64_t)getpid(),
                                   s->fd < 0 ? 0 : (uint64_t)s->fd, s->word};
}

void *ckpt_shm_map(struct ckpt_shm *s, uint64_t len)
{
    const uint64_t at = s->next, whole = (len + PAGE - 1) / PAGE * PAGE;

    if (s->fd < 0 || len == 0 || ftruncate(s->fd, (off_t)(at + whole)) < 0)
        return NULL;
    void *base = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, (off_t)at);
    if (base == MAP_FAILED)
        return NULL;
    s->next = at + whole;
    s->base = base;
    s->at = at;
    s->len = len;
    return base;
}

void ckpt_shm_unmap(void *ptr, uint64_t len)
{
    if (!ptr)
        return;
    (void)madvise(ptr, len, MADV_REMOVE);
    (void)munmap(ptr, len);
}

bool ckpt_shm_offset(const struct ckpt_shm *s, const void *ptr, uint64_t *ret)
{
    const uint64_t at = (uint64_t)((uintptr_t)ptr - (uintptr_t)s->base);

    *ret = s->at + at;
    return s->base && at < s->len;
}

/* ---- another's ---- */

const unsigned char *ckpt_shm_at(struct ckpt_shm_view *v, uint64_t off, uint64_t len)
{
    struct stat st;
    uint64_t end;

    if (ckd_add(&end, off, len))
        return NULL;
    if (end > v->len) { /* the owner has begun another load */
        if (v->fd < 0 || fstat(v->fd, &st) < 0 || end > (uint64_t)st.st_size)
            return NULL;
        void *base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, v->fd, 0);
        if (base == MAP_FAILED)
            return NULL;
        if (v->base)
            (void)munmap((void *)(uintptr_t)v->base, v->len);
        v->base = base;
        v->len = (uint64_t)st.st_size;
    }
    return v->base + off;
}

bool ckpt_shm_open(struct ckpt_shm_view *v, const struct ckpt_shm_place *of)
{
    char path[64];
    const unsigned char *word;

    *v = (struct ckpt_shm_view){.fd = -1};
    if (of->node != ckpt_node_digest() || of->fd == 0)
        return false;
    (void)snprintf(path, sizeof path, "/proc/%llu/fd/%llu", (unsigned long long)of->pid,
                   (unsigned long long)of->fd);
    v->fd = open(path, O_RDONLY | O_CLOEXEC);
    if ((word = ckpt_shm_at(v, 0, sizeof of->word)) &&
        memcmp(word, &of->word, sizeof of->word) == 0)
        return true;
    ckpt_shm_leave(v);
    return false;
}

void ckpt_shm_leave(struct ckpt_shm_view *v)
{
    if (v->base)
        (void)munmap((void *)(uintptr_t)v->base, v->len);
    ckpt_closep(&v->fd);
    *v = (struct ckpt_shm_view){.fd = -1};
}

bool ckpt_shm_reach(const struct ckpt_shm_place *of)
{
    struct ckpt_shm_view v;
    const bool good = ckpt_shm_open(&v, of);

    ckpt_shm_leave(&v);
    return good;
}
