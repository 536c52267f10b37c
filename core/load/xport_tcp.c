/* SPDX-License-Identifier: Apache-2.0 */
/* TCP. */
#include "base/err.h"
#include "load/comm.h"

int ckpt_comm_tcp_env(struct ckpt_comm **ret, struct ckpt_err *err)
{
    (void)ret;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "the tcp transport is not there yet");
}
