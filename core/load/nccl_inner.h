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

/* COLLECTIVE, of how->comm: a comm over TCP of the same ranks. */
int ckpt_nccl_tcp(const struct ckpt_nccl *how, struct ckpt_comm **ret, struct ckpt_err *err);

#endif
