/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of libckptfs_load_nccl share: errors and waiting. */
#ifndef CKPT_LOAD_NCCL_INNER_H
#define CKPT_LOAD_NCCL_INNER_H

#include <stdbool.h>
#include <stdint.h>

#include <ckptfs/load_nccl.h>

static inline bool ckpt_nccl_good(ncclResult_t rc)
{
    return rc == ncclSuccess || rc == ncclInProgress;
}

/* Always -1. comm may be NULL. */
int ckpt_nccl_failed(ncclComm_t comm, ncclResult_t rc, const char *what, struct ckpt_err *err);

/* ckpt_comm_rendezvous_ms. If that fails, which ckpt_comm_nccl reports after the ranks have met,
 * 300 s.
 */
uint32_t ckpt_nccl_rendezvous_ms(void);

/* Until `comm` is done with what it was told, or the clock says `until` (ckpt_now_ms). control may
 * be NULL. 1: another rank has failed. */
int ckpt_nccl_settle(ncclComm_t comm, struct ckpt_comm *control, uint64_t until, const char *what,
                     struct ckpt_err *err);

/* USAGE if the ranks of the caller's communicator are not those of `control`, or it is of another
 * device. */
int ckpt_nccl_check(ncclComm_t comm, const struct ckpt_comm *control, int number,
                    struct ckpt_err *err);

/* May it be split? busy: it still is, as ckpt_nccl_split said. */
int ckpt_nccl_idle(ncclComm_t comm, bool busy, struct ckpt_err *err);

/* COLLECTIVE, of `from`, the caller's communicator: make one of the same ranks that shares nothing
 * with it and does not block, on the device `at`, which the caller has entered. Not longer than
 * ckpt_nccl_rendezvous_ms. 1: another rank has failed. *ret may be set after a failure, too.
 * *ret_busy: `from` is still being split, and must not be used any more. */
struct ckpt_cuda;
int ckpt_nccl_split(struct ckpt_cuda *at, ncclComm_t from, struct ckpt_comm *control,
                    ncclComm_t *ret, bool *ret_busy, struct ckpt_err *err);

/* COLLECTIVE, of how->comm: a comm over TCP of the same ranks. */
int ckpt_nccl_tcp(const struct ckpt_nccl *how, struct ckpt_comm **ret, struct ckpt_err *err);

#endif
