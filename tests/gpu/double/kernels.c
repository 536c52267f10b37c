/* SPDX-License-Identifier: Apache-2.0 */
/* The copy kernel, run over its whole grid on the bytes behind the device's addresses. Whatever a
 * GPU would fault on ends the program. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#include "device/copy_kernel.h"

/* One side of a copy: inside one allocation, aligned. */
static struct gpu_memory *side(uint64_t *at, const uint64_t *step, const struct ckpt_device_copy *c,
                               uint8_t size, int device)
{
    uint64_t span = (uint64_t)c->run * size, bits = *at;

    for (int k = 0; k < CKPT_COPY_AXES; k++) {
        span += (c->n[k] - 1) * step[k];
        bits |= c->n[k] > 1 ? step[k] : 0;
    }
    if (!size || size > 16 || size & (size - 1) || bits % size)
        gpu_die(CKPT_COPY_KERNEL ": elements of %u bytes at %#lx are not aligned", size,
                (unsigned long)*at);
    struct gpu_memory *m =
        gpu_memory_find((const void *)(uintptr_t)*at, span, true, CKPT_COPY_KERNEL);
    if (!m || m->apart || (m->where == GPU_DEVICE && m->device != device)) /* or pinned memory */
        gpu_die(CKPT_COPY_KERNEL ": device %d does not reach %#lx", device, (unsigned long)*at);
    *at = (uint64_t)(uintptr_t)gpu_memory_real(m, (const void *)(uintptr_t)*at);
    return m;
}

static void check_copy(const struct ckpt_device_copy *c, uint32_t first, uint32_t i)
{
    uint64_t total = c->run;

    for (int k = 0; k < CKPT_COPY_AXES; k++)
        total *= c->n[k];
    if (!c->total || total != c->total)
        gpu_die(CKPT_COPY_KERNEL ": copy %u says %u elements, its axes %lu", i, c->total,
                (unsigned long)total);
    if (c->first != first)
        gpu_die(CKPT_COPY_KERNEL ": copy %u begins at block %u, not %u", i, c->first, first);
}

static void run_copy_list(const unsigned char (*arg)[16], const struct gpu_grid *grid, int device)
{
    const struct ckpt_device_copy *list;
    uint32_t n, blocks = 0;
    double bytes = 0;

    memcpy(&list, arg[0], sizeof list);
    memcpy(&n, arg[1], sizeof n);
    struct gpu_memory *in = gpu_memory_find(list, n * sizeof *list, true, CKPT_COPY_KERNEL);
    if (!in)
        gpu_die(CKPT_COPY_KERNEL ": its list at %p is no memory of a device", (const void *)list);
    struct ckpt_device_copy *copy = malloc(n * sizeof *copy);
    struct gpu_memory **use = malloc((2 * (size_t)n + 1) * sizeof *use);
    if (!copy || !use)
        gpu_die("the host has no memory");
    memcpy(copy, gpu_memory_real(in, list), n * sizeof *copy);
    for (uint32_t i = 0; i < n; i++) {
        struct ckpt_device_copy *c = &copy[i];
        check_copy(c, blocks, i);
        bytes += (double)c->total * c->dst_size;
        blocks += (c->total + CKPT_COPY_BLOCK - 1) / CKPT_COPY_BLOCK;
        use[2 * i] = side(&c->src, c->step_src, c, c->src_size, device);
        use[2 * i + 1] = side(&c->dst, c->step_dst, c, c->dst_size, device);
    }
    if (grid->block[0] != blocks || grid->block[1] != 1 || grid->block[2] != 1 ||
        grid->thread[0] != CKPT_COPY_THREADS || grid->thread[1] != 1 || grid->thread[2] != 1)
        gpu_die(CKPT_COPY_KERNEL ": %u blocks of %u threads, the list needs %u of %d",
                grid->block[0], grid->thread[0], blocks, CKPT_COPY_THREADS);
    use[2 * n] = in;
    const double begin = gpu_clock_begin(use, 2 * n + 1);
    for (uint32_t b = 0; b < grid->block[0]; b++)
        for (uint32_t t = 0; t < grid->thread[0]; t++)
            ckpt_copy_thread(copy, n, b, t);
    gpu_clock_end(use, 2 * n + 1, begin + (gpu_links() ? bytes / gpu_links()->place_bytes_s : 0),
                  GPU_CLOCK_KERNEL);
    for (uint32_t i = 0; i <= 2 * n; i++)
        gpu_memory_leave(use[i]);
    free(use);
    free(copy);
}

const struct gpu_kernel *gpu_kernel_find(const char *name)
{
    static const struct gpu_kernel copy_list = {
        CKPT_COPY_KERNEL,
        {sizeof(const struct ckpt_device_copy *), sizeof(uint32_t)},
        run_copy_list};

    return strcmp(name, copy_list.name) == 0 ? &copy_list : NULL;
}
