/* SPDX-License-Identifier: Apache-2.0 */
/* A test double of CUDA's driver and of NCCL, as far as the loader calls them: what the two
 * libraries share.
 *
 * Host memory underneath; streams are threads; ranks are processes or threads that talk over
 * sockets, or threads of one process that meet in memory (CKPTFS_GPU_THREADS=1). It is as
 * asynchronous as the real thing and less forgiving: whatever is wrong or would be a race ends the
 * program with one line. Streams and events order what the real ones order and nothing else, so
 * that TSan sees a race on a device's memory where a wait is missing.
 *
 * Environment: CKPTFS_GPU_COUNT (devices; 8), CUDA_VISIBLE_DEVICES, CKPTFS_GPU_MEMORY (bytes of a
 * device; 8 GiB), CKPTFS_GPU_JITTER_US (each piece of work waits up to this long), CKPTFS_GPU_FAULT
 * (see fault.c), CKPTFS_GPU_CONTEXTS (a process that ends with contexts on more devices has leaked
 * them), CKPTFS_GPU_NCCL (the version that NCCL says it is),
 * CKPTFS_GPU_DRIVER (the version of CUDA that the driver says; 12000, the oldest that is promised),
 * CKPTFS_GPU_LINKS (a file of what takes how long: a clock is simulated, and told at the end),
 * CKPTFS_GPU_NODE (so many ranks are on a node; without it, all), CKPTFS_GPU_REMOTE (1: that a peer
 * is gone is an error, as over a network; else a hang, as within a node). */
#ifndef CKPT_GPU_DOUBLE_H
#define CKPT_GPU_DOUBLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#include <cuda.h>

/* ---- fault.c ---- */

/* Misuse: say so and abort. */
_Noreturn void gpu_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum gpu_fault {
    GPU_WELL,
    GPU_ERROR, /* the call fails */
    GPU_ASYNC, /* what it started fails later */
    GPU_HANG,  /* what it started never ends */
};

/* What shall happen to this call? It may not return. */
enum gpu_fault gpu_fault(const char *call);

uint64_t gpu_number(const char *variable, uint64_t otherwise);

/* ---- memory.c ---- */

enum gpu_where { GPU_DEVICE, GPU_PINNED, GPU_NOWHERE };

/* An allocation, or registered host memory. */
struct gpu_memory {
    uintptr_t at; /* as the program knows it */
    size_t len;
    unsigned char *real; /* where the bytes are */
    enum gpu_where where;
    bool registered;
    bool apart; /* the device has another address for it */
    int device;
    atomic_int users;     /* queued work */
    _Atomic double until; /* simulated time: the end of its last use */
};

/* What [p, p+len) lies in, or NULL. Dies if it begins in one and ends beyond. `use` counts the
 * caller in. */
struct gpu_memory *gpu_memory_find(const void *p, size_t len, bool use, const char *call);
void gpu_memory_leave(struct gpu_memory *m);
void *gpu_memory_real(const struct gpu_memory *m, const void *p);

/* As gpu_memory_find with use, but device memory of this device only. */
struct gpu_memory *gpu_memory_on(const void *p, size_t len, int device, const char *call);

/* ---- stream.c ---- */

/* A piece of a stream's work. run is called once, in the stream's thread, and frees it. */
struct gpu_work {
    void (*run)(struct gpu_work *work);
};

/* through: by the one who closed it. */
void gpu_stream_push(CUstream stream, struct gpu_work *work, bool through, const char *call);
int gpu_stream_device(CUstream stream, const char *call);

/* Until it is opened again, nothing else may be put on the stream: a launch is in progress, or over
 * but nobody has asked. */
void gpu_stream_close(CUstream stream, const char *call);
void gpu_stream_open(CUstream stream);

/* Until all streams of the device are idle, or it is lost: freeing memory waits so. */
void gpu_device_wait(int device);

/* A device is lost: every call fails from now on, and no work has an effect. */
void gpu_lose(CUresult error);
CUresult gpu_lost(void);

/* Which of the machine's devices this process calls `device`. */
int gpu_device_identity(int device);

/* What is still there when the program ends is a leak, but for programs that fail anyway, and after
 * a fault from which nothing comes back. */
bool gpu_leaks_matter(void);
void gpu_report_leaks(int status, size_t leaks);

/* ---- clock.c ---- */

/* What takes how long, from the file CKPTFS_GPU_LINKS: JSON with a number for each member. */
struct gpu_links {
    double call_s, link_hop_s, net_hop_s;          /* a ring: the call, a hop in a node, across */
    double tree_call_s, tree_hop_s, tree_member_s; /* the logarithmic algorithm */
    double tree_share;                             /* of net_bytes_s, that it reaches */
    double link_bytes_s, net_bytes_s;              /* bytes a second of a rank, each way */
    double upload_bytes_s, place_bytes_s;          /* copies: from or to the host; by a kernel */
};

/* NULL: there is no such file, and nothing takes time. */
const struct gpu_links *gpu_links(void);

/* The simulated time of the stream whose thread this is. */
extern _Thread_local double gpu_now;

/* It is at least t. */
void gpu_clock_reach(double t);

/* When work that uses this memory (NULL: none) can begin; and that it has ended. What is told when
 * the program ends is the last end of a kernel or an exchange. */
enum gpu_clock_work { GPU_CLOCK_COPY, GPU_CLOCK_KERNEL, GPU_CLOCK_EXCHANGE };
double gpu_clock_begin(struct gpu_memory *const *use, size_t n);
void gpu_clock_end(struct gpu_memory *const *use, size_t n, double end, enum gpu_clock_work work);

#pragma GCC visibility pop

#endif
