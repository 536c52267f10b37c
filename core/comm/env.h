/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers that launchers and users put into the environment, and that all transports obey. */
#pragma once

#include <stdint.h>

#include <ckptfs/err.h>

/* The number in the environment variable `name`, 0 to `most`. USAGE: the variable is not set, or
 * holds something else. */
int ckpt_env_number(const char *name, uint32_t most, uint32_t *ret, struct ckpt_err *err);

/* How long ranks wait for each other at the rendezvous: CKPTFS_MEET_TIMEOUT, or 300 s. USAGE: the
 * variable is no number of seconds. For transports in libraries of their own, too. */
CKPT_PUBLIC int ckpt_comm_rendezvous_ms(uint32_t *ret, struct ckpt_err *err);
