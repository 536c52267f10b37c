/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers in environment variables. */
#include "comm/env.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/err.h"

/* Seconds. Ranks of a large job start minutes apart, where nodes pull images or load Python from a
 * network file system: half as long fails such jobs, and twice as long makes a job with a rank that
 * never starts hold its nodes for ten minutes. */
enum { RENDEZVOUS_S = 300, MOST_RENDEZVOUS_S = 86400 };

int ckpt_env_number(const char *name, uint32_t most, uint32_t *ret, struct ckpt_err *err)
{
    const char *text = getenv(name);
    char *end;
    unsigned long n = text ? strtoul(text, &end, 10) : 0;

    if (!text || *text < '0' || *text > '9' || *end || n > most)
        return ckpt_fail(err, CKPT_USAGE, "%s=%s: expected a number from 0 to %" PRIu32, name,
                         text ? text : "(unset)", most);
    *ret = (uint32_t)n;
    return 0;
}

int ckpt_comm_rendezvous_ms(uint32_t *ret, struct ckpt_err *err)
{
    uint32_t s = RENDEZVOUS_S;

    if (getenv("CKPTFS_MEET_TIMEOUT") &&
        ckpt_env_number("CKPTFS_MEET_TIMEOUT", MOST_RENDEZVOUS_S, &s, err) < 0)
        return -1;
    *ret = s * 1000;
    return 0;
}
