/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory is an address range that nobody may touch; its bytes are elsewhere. Pinned memory
 * is ordinary memory that is known. */
#include "memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGN = 512, GARBAGE = 0xdb };

/* Readers of the lock are not ordered among themselves: threads of streams may look things up. */
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct gpu_memory **all; /* by address; none overlap */
static size_t nall, capacity_all;
static size_t used[GPU_MOST_DEVICES];

/* How many begin at p or before. */
static size_t count_until(uintptr_t p)
{
    size_t lo = 0, hi = nall;

    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (all[mid]->at <= p)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static struct gpu_memory *find_locked(uintptr_t p, size_t len, const char *call)
{
    const size_t n = count_until(p);
    struct gpu_memory *m = n ? all[n - 1] : NULL;

    if (!m || p - m->at >= m->len)
        return NULL;
    if (len > m->len - (p - m->at))
        gpu_die("%s: %zu bytes at %#lx leave the %zu bytes at %#lx that they begin in", call, len,
                (unsigned long)p, m->len, (unsigned long)m->at);
    return m;
}

struct gpu_memory *gpu_memory_find(const void *p, size_t len, bool use, const char *call)
{
    (void)pthread_rwlock_rdlock(&lock);
    struct gpu_memory *m = find_locked((uintptr_t)p, len, call);
    if (m && use)
        (void)atomic_fetch_add_explicit(&m->users, 1, memory_order_relaxed);
    (void)pthread_rwlock_unlock(&lock);
    return m;
}

struct gpu_memory *gpu_memory_on(const void *p, size_t len, int device, const char *call)
{
    struct gpu_memory *m = gpu_memory_find(p, len, true, call);

    if (!m || m->where != GPU_DEVICE)
        gpu_die("%s: %p is not device memory", call, p);
    if (m->device != device)
        gpu_die("%s: %p lies on device %d, not %d", call, p, m->device, device);
    return m;
}

void gpu_memory_leave(struct gpu_memory *m)
{
    if (m)
        (void)atomic_fetch_sub_explicit(&m->users, 1, memory_order_relaxed);
}

void *gpu_memory_real(const struct gpu_memory *m, const void *p)
{
    return m->real + ((uintptr_t)p - m->at);
}

static void add(struct gpu_memory *m)
{
    (void)pthread_rwlock_wrlock(&lock);
    if (nall == capacity_all) {
        capacity_all = 2 * capacity_all + 64;
        if (!(all = realloc(all, capacity_all * sizeof *all)))
            gpu_die("the host has no memory");
    }
    const size_t i = count_until(m->at);
    memmove(all + i + 1, all + i, (nall++ - i) * sizeof *all);
    all[i] = m;
    (void)pthread_rwlock_unlock(&lock);
}

/* Out of the table; NULL: it begins no such memory. */
static struct gpu_memory *take(uintptr_t p, enum gpu_where where, bool registered, const char *call)
{
    struct gpu_memory *m = NULL;

    (void)pthread_rwlock_wrlock(&lock);
    const size_t i = count_until(p) - 1;
    if (i < nall && all[i]->at == p && all[i]->where == where && all[i]->registered == registered) {
        m = all[i];
        memmove(all + i, all + i + 1, (--nall - i) * sizeof *all);
        if (m->where == GPU_DEVICE)
            used[m->device] -= m->len;
    }
    (void)pthread_rwlock_unlock(&lock);
    if (m && atomic_load_explicit(&m->users, memory_order_relaxed))
        gpu_die("%s: queued work uses the memory at %#lx", call, (unsigned long)p);
    return m;
}

static size_t whole_pages(size_t n)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (n + page - 1) / page * page;
}

static size_t capacity(void) { return gpu_number("CKPTFS_GPU_MEMORY", (uint64_t)8 << 30); }

static bool reserve(int device, size_t len)
{
    (void)pthread_rwlock_wrlock(&lock);
    const bool fits = len <= capacity() && used[device] <= capacity() - len;
    if (fits)
        used[device] += len;
    (void)pthread_rwlock_unlock(&lock);
    return fits;
}

CUresult gpu_memory_device(void **ret, size_t len, int device)
{
    struct gpu_memory *m;
    void *real;

    if (!reserve(device, len))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!(m = calloc(1, sizeof *m)) || posix_memalign(&real, ALIGN, len) != 0)
        gpu_die("cuMemAlloc: the host has no %zu bytes", len);
    memset(real, GARBAGE, len);
    void *p =
        mmap(NULL, whole_pages(len), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        gpu_die("cuMemAlloc: no address range of %zu bytes", len);
    *m = (struct gpu_memory){
        .at = (uintptr_t)p, .len = len, .real = real, .where = GPU_DEVICE, .device = device};
    add(m);
    *ret = p;
    return CUDA_SUCCESS;
}

CUresult gpu_memory_pinned(void **ret, size_t len, int device, bool apart)
{
    struct gpu_memory *m = calloc(1, sizeof *m);
    void *real;

    if (!m || posix_memalign(&real, (size_t)sysconf(_SC_PAGESIZE), len) != 0)
        gpu_die("cuMemHostAlloc: the host has no %zu bytes", len);
    memset(real, GARBAGE, len);
    *m = (struct gpu_memory){.at = (uintptr_t)real,
                             .len = len,
                             .real = real,
                             .where = GPU_PINNED,
                             .apart = apart,
                             .device = device};
    add(m);
    *ret = real;
    return CUDA_SUCCESS;
}

CUresult gpu_memory_register(void *p, size_t len, int device)
{
    struct gpu_memory *m = calloc(1, sizeof *m);
    bool there = false;

    if (!m)
        gpu_die("cuMemHostRegister: the host has no memory");
    *m = (struct gpu_memory){.at = (uintptr_t)p,
                             .len = len,
                             .real = p,
                             .where = GPU_PINNED,
                             .registered = true,
                             .device = device};
    (void)pthread_rwlock_rdlock(&lock);
    const size_t n = count_until(m->at + len - 1);
    there = n && m->at < all[n - 1]->at + all[n - 1]->len;
    (void)pthread_rwlock_unlock(&lock);
    if (there) {
        free(m);
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    add(m);
    return CUDA_SUCCESS;
}

CUresult gpu_memory_free(void *p, enum gpu_where where, bool registered, const char *call)
{
    struct gpu_memory *m = take((uintptr_t)p, where, registered, call);

    if (!m)
        gpu_die("%s: %p was not allocated by its counterpart, or was freed", call, p);
    if (where == GPU_DEVICE)
        (void)munmap(p, whole_pages(m->len));
    if (!registered)
        free(m->real);
    free(m);
    return CUDA_SUCCESS;
}

void gpu_memory_info(int device, size_t *ret_free, size_t *ret_total)
{
    (void)pthread_rwlock_rdlock(&lock);
    *ret_total = capacity();
    *ret_free = capacity() - used[device];
    (void)pthread_rwlock_unlock(&lock);
}

size_t gpu_memory_leaks(void)
{
    for (size_t i = 0; i < nall; i++)
        (void)fprintf(stderr, "gpu double: leak: %zu bytes %s\n", all[i]->len,
                      all[i]->where == GPU_DEVICE ? "of device memory"
                      : all[i]->registered        ? "of registered memory"
                                                  : "of pinned memory");
    return nall;
}
