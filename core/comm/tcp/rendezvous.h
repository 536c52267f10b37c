/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a job find each other over TCP, by what their launcher says. */
#pragma once

#include <ckptfs/load.h>

/* ckpt_comm_from_env for a job whose launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
 * (torchrun). */
int ckpt_comm_tcp_env(ckpt_comm_log *log, void *ctx, struct ckpt_comm **ret, struct ckpt_err *err);
