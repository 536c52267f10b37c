/* SPDX-License-Identifier: Apache-2.0 */
/* Loads into GPU memory. Link libckptfs_load_nccl in addition to libckptfs_load. Destinations are
 * in the memory of this rank's CUDA device, and NCCL transfers the bytes that other ranks have
 * read. Needs NCCL 2.18 or later and a driver of CUDA 12.0 or later (525). The library uses CUDA's
 * driver (libcuda.so.1), which it looks up when a comm is made, and the devices' primary contexts,
 * as the CUDA runtime does: programs of CUDA 12 and of CUDA 13 use the same build. */
#ifndef CKPTFS_LOAD_NCCL_H
#define CKPTFS_LOAD_NCCL_H

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <ckptfs/load.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ckpt_nccl {
    size_t size; /* sizeof(struct ckpt_nccl), so that later versions can add members */
    int device;  /* number of the CUDA device; -1: the device of the calling thread's current
                    context, and device 0 if the thread has none. Each call restores the current
                    context before it returns; none is created on any other device */
    cudaStream_t stream; /* a stream of the device's primary context. A load writes only after the
                            work that is queued on it when the load starts. NULL: the default
                            stream. Borrowed until ckpt_comm_free, or until there is another one
                            (ckpt_comm_nccl_stream) */
    /* Where the loader gets device memory for windows and ckpt_comm_alloc, for example from a
     * caching allocator; both NULL: CUDA's driver. alloc returns memory of the device, aligned to
     * 256 bytes, which work that is queued on `stream` (as above) from now on may use; NULL: there
     * is none, and what asked for it fails (NOMEM). The loader makes its own streams wait for
     * `stream` before they use it. dealloc gets it back once nothing uses it any more. Both are
     * called by any thread, the device being current, and must not call this library. If work of a
     * load that failed never ends on the device, its memory is never given back. */
    void *(*alloc)(void *user, size_t len, cudaStream_t stream);
    void (*dealloc)(void *user, void *mem);
    void *user;
};

/* COLLECTIVE. Turn a comm over host memory into one over device memory. `control` is a comm over
 * MPI, TCP, threads or one process; on success the new comm owns it and uses it for small messages.
 * The first load that sends something between ranks creates a NCCL communicator that only loads
 * use, and later loads keep it: a non-blocking one, whose unique id is sent over `control`. Ranks
 * that want the same bytes exchange them over communicators split from it, at most four on each
 * rank for one load; up to 16 are kept for loads with the same groups. They share resources
 * (splitShare) and use at most 8 CTAs, so that their memory is bounded. A load that fails aborts
 * all of them, and the next load creates others; communicators of the caller's are never split or
 * aborted. If ranks are missing, the call fails after CKPTFS_MEET_TIMEOUT seconds (default: 300).
 *
 * Loads write to device memory (or to host memory that the device can access) by work on streams of
 * their own, which has finished when ckpt_load_wait returns 0. options.host_bytes is pinned memory:
 * one block, made by the first load on the NUMA node of the device and kept for the next one; pages
 * are rounded up, which is up to 8 KiB more for each chunk that is read ahead.
 * options.device_bytes does not include the memory that NCCL allocates. While a load runs, launch
 * no operations of other communicators on its device: NCCL can deadlock if ranks launch the
 * operations of two communicators in different orders. ckpt_load_pause makes room for them: when it
 * returns, all operations of the load have ended on this rank, and those after ckpt_load_resume
 * come after what is queued on `stream` then. */
CKPT_PUBLIC int ckpt_comm_nccl(struct ckpt_comm *control, const struct ckpt_nccl *how,
                               struct ckpt_comm **ret, struct ckpt_err *err);

/* Choose the caller's stream (ckpt_nccl.stream) anew, for loads that are planned, and for a load
 * that is resumed, after this. Not while a load runs, unless that is paused. USAGE: the comm has no
 * devices, or the stream is of another device; the former stream then stays. */
CKPT_PUBLIC int ckpt_comm_nccl_stream(struct ckpt_comm *comm, cudaStream_t stream,
                                      struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
