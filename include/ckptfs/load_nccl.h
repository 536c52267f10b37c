/* SPDX-License-Identifier: Apache-2.0 */
/* Loads into GPU memory (link libckptfs_load_nccl too): destinations are on this rank's CUDA
 * device, NCCL carries what other ranks read. Needs NCCL 2.18 and CUDA 12.8 or later. */
#ifndef CKPTFS_LOAD_NCCL_H
#define CKPTFS_LOAD_NCCL_H

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <ckptfs/load.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ckpt_nccl {
    size_t size;         /* sizeof (struct ckpt_nccl): what the caller knows of */
    int device;          /* -1: the calling thread's current one. Where it is another, calls give
                            that back, and CUDA makes a context on both */
    cudaStream_t stream; /* the caller's, of the device's primary context: a load's writes come
                            after what is queued on it when the load starts. NULL: the default
                            stream */
    ncclComm_t comm;     /* the caller's, idle during this call: its ranks and devices are checked
                            against control's. It is never aborted. NULL: there is none */
};

/* COLLECTIVE. Turn a comm over host memory into one over device memory: `control` (from MPI, TCP,
 * threads or one process alone; taken with success) goes on to carry the small messages, and the
 * same ranks get a NCCL communicator of the load's own, whose id travels over control: one that
 * does not block, and that a failure aborts. control may be NULL if how->comm is given: then TCP is
 * used, its addresses travel over how->comm and how->stream. If ranks do not come, the call ends
 * after CKPTFS_MEET_TIMEOUT seconds (300), though how->comm may then wait for them still.
 *
 * Loads on it write to device memory (or host memory that the device reaches), by work of their own
 * streams that is over when ckpt_load_wait returns. options.host_bytes is pinned memory;
 * options.device_bytes does not count what NCCL takes for itself. While a load runs, launch no
 * exchanges of other communicators on its device: NCCL may wait for one in the other on some ranks
 * and the other way round on others. */
CKPT_PUBLIC int ckpt_comm_nccl(struct ckpt_comm *control, const struct ckpt_nccl *how,
                               struct ckpt_comm **ret, struct ckpt_err *err);

#ifdef __cplusplus
}
#endif

#endif
