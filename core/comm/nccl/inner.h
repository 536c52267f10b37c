/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the NCCL transport (libckptfs_load_nccl) share: errors, waiting, and
 * communicators made from the caller's. */
#ifndef CKPT_COMM_NCCL_INNER_H
#define CKPT_COMM_NCCL_INNER_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load_nccl.h>

static inline bool ckpt_nccl_good(ncclResult_t rc)
{
    return rc == ncclSuccess || rc == ncclInProgress;
}

/* Fill *err from an NCCL result, and from the communicator's last error if comm is not NULL. Always
 * returns -1. */
int ckpt_nccl_failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err);

/* ckpt_comm_rendezvous_ms, or 300 s if that fails: ckpt_comm_nccl reports that failure later, when
 * the ranks have met. */
uint32_t ckpt_nccl_rendezvous_ms(void);

/* Wait until the non-blocking communicator `comm` has finished its last operation, or until the
 * deadline (ckpt_now_ms). control: the comm to watch meanwhile, or NULL. 1: another rank has
 * failed. */
int ckpt_nccl_settle(ncclComm_t comm, struct ckpt_comm *control, uint64_t until, const char *what,
                     struct ckpt_err *err);

/* USAGE: the caller's communicator does not have the ranks of `control` in the same order, or
 * belongs to another device than `number`. */
int ckpt_nccl_check(ncclComm_t comm, const struct ckpt_comm *control, int number,
                    struct ckpt_err *err);

/* Is the communicator idle, so that it can be split? busy: an earlier ckpt_nccl_split still works
 * on it.
 */
int ckpt_nccl_idle(ncclComm_t comm, bool busy, struct ckpt_err *err);

/* COLLECTIVE among the ranks of `from`, the caller's communicator: make a non-blocking communicator
 * of the same ranks, which shares no resources with it, on the device `at`, which the calling
 * thread has entered. Takes at most ckpt_nccl_rendezvous_ms. 1: another rank has failed. *ret may
 * be set after a failure, too. *ret_busy: `from` is still being split, and must not be used any
 * more. */
struct ckpt_cuda;
int ckpt_nccl_split(struct ckpt_cuda *at, ncclComm_t from, struct ckpt_comm *control,
                    ncclComm_t *ret, bool *ret_busy, struct ckpt_err *err);

#endif
