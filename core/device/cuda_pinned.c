/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned host memory, on the node of the machine that is nearest to the device. */
#include <stdlib.h>
#include <sys/mman.h>

#include "base/err.h"
#include "device/cuda.h"
#include "device/numa.h"

enum { MOST_WASTE = 1 << 20, ID = 64 };

#define DEVICES "/sys/bus/pci/devices"

static int node_of(const struct ckpt_cuda *c)
{
    char id[ID] = "";
    CUdevice device = 0;

    if (c->call.device_get(&device, c->number) != CUDA_SUCCESS ||
        c->call.pci_bus_id(id, sizeof id, device) != CUDA_SUCCESS)
        return -1;
    return ckpt_numa_node(DEVICES, id);
}

static void forget(const struct ckpt_cuda *c, struct ckpt_pinned *p)
{
    (void)c->call.host_unregister(p->ptr);
    (void)munmap(p->ptr, p->len);
    free(p);
}

/* Map memory on the device's NUMA node, and pin it. Memory that the driver allocates could come
 * from any node. A forked child does not inherit the mapping, because it would share pages that the
 * device writes to. */
static int make(const struct ckpt_cuda *c, size_t len, struct ckpt_pinned **ret,
                struct ckpt_err *err)
{
    struct ckpt_pinned *p = calloc(1, sizeof *p);
    void *mem = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (!p || mem == MAP_FAILED) {
        free(p);
        if (mem != MAP_FAILED)
            (void)munmap(mem, len);
        return ckpt_nomem(err);
    }
    (void)madvise(mem, len, MADV_DONTFORK);
    (void)madvise(mem, len, MADV_HUGEPAGE);
    ckpt_numa_prefer(mem, len, node_of(c));
    CUresult rc = c->call.host_register(mem, len, CU_MEMHOSTREGISTER_PORTABLE);
    *p = (struct ckpt_pinned){.ptr = mem, .len = len, .taken = true};
    if (rc == CUDA_SUCCESS) {
        *ret = p;
        return 0;
    }
    (void)munmap(mem, len);
    free(p);
    return ckpt_cuda_failed(c, rc, "pinning host memory", err);
}

/* Take an unused buffer that is large enough; not a much larger one, because a load must not hold
 * more than its host_bytes. NULL: there is none. */
static struct ckpt_pinned *take_kept(struct ckpt_cuda *c, size_t len)
{
    struct ckpt_pinned *p;

    (void)pthread_mutex_lock(&c->lock);
    for (p = c->pinned; p; p = p->next)
        if (!p->taken && p->len >= len && p->len - len <= len + MOST_WASTE)
            break;
    if (p)
        p->taken = true;
    (void)pthread_mutex_unlock(&c->lock);
    return p;
}

/* Free the unused buffers. The caller has entered the device. Returns their size. */
static uint64_t free_idle(struct ckpt_cuda *c)
{
    struct ckpt_pinned *idle = NULL;
    uint64_t bytes = 0;

    (void)pthread_mutex_lock(&c->lock);
    for (struct ckpt_pinned **at = &c->pinned; *at;) {
        struct ckpt_pinned *p = *at;
        if (p->taken) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        p->next = idle;
        idle = p;
    }
    (void)pthread_mutex_unlock(&c->lock);
    for (struct ckpt_pinned *p; (p = idle);) {
        idle = p->next;
        bytes += p->len;
        forget(c, p);
    }
    return bytes;
}

/* Pinning takes about half a second per gigabyte, so a load reuses the buffer of the last one. */
int ckpt_cuda_pin(struct ckpt_device *d, size_t len, void **ret, struct ckpt_err *err)
{
    struct ckpt_cuda *c = (struct ckpt_cuda *)d;
    struct ckpt_pinned *p = take_kept(c, len);
    struct ckpt_cuda_scope scope;

    if (p) {
        *ret = p->ptr;
        return 0;
    }
    if (ckpt_cuda_enter(c, &scope, err) < 0)
        return -1;
    (void)free_idle(c);
    int rc = make(c, len, &p, err);
    ckpt_cuda_leave(c, &scope);
    if (rc < 0)
        return -1;
    (void)pthread_mutex_lock(&c->lock);
    p->next = c->pinned;
    c->pinned = p;
    (void)pthread_mutex_unlock(&c->lock);
    *ret = p->ptr;
    return 0;
}

uint64_t ckpt_cuda_unpin(struct ckpt_device *d, void *ptr)
{
    struct ckpt_cuda *c = (struct ckpt_cuda *)d;
    struct ckpt_cuda_scope scope;

    if (!ptr) {
        if (ckpt_cuda_enter(c, &scope, NULL) < 0)
            return 0;
        const uint64_t bytes = free_idle(c);
        ckpt_cuda_leave(c, &scope);
        return bytes;
    }
    (void)pthread_mutex_lock(&c->lock);
    for (struct ckpt_pinned *p = c->pinned; p; p = p->next)
        if (p->ptr == ptr)
            p->taken = false;
    (void)pthread_mutex_unlock(&c->lock);
    return 0;
}

void ckpt_cuda_unpin_all(struct ckpt_cuda *c)
{
    for (struct ckpt_pinned *p; (p = c->pinned);) {
        c->pinned = p->next;
        forget(c, p);
    }
}
