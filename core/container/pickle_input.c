/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a pickle, in a window that moves along. */
#include "container/pickle_machine.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/crc32.h"

int ckpt_pm_fail_end(struct ckpt_pickle_machine *m)
{
    return ckpt_fail(m->err, CKPT_FORMAT, "the pickle is truncated");
}

int ckpt_pm_refill(struct ckpt_pickle_machine *m, size_t n)
{
    size_t have = (size_t)(m->stop - m->at);

    if (n > ckpt_pm_left(m))
        return ckpt_pm_fail_end(m);
    if (n > m->buf_cap) {
        unsigned char *buf = malloc(n + CKPT_PM_WINDOW);
        if (!buf)
            return ckpt_nomem(m->err);
        memcpy(buf, m->at, have);
        free(m->buf);
        m->buf = buf;
        m->buf_cap = n + CKPT_PM_WINDOW;
    } else if (have) {
        memmove(m->buf, m->at, have);
    }
    size_t more = (size_t)ckpt_min_u64(m->buf_cap - have, m->end - m->pos);
    m->at = m->buf;
    m->stop = m->buf + have;
    (void)ckpt_source_soon(m->source, m->pos, ckpt_min_u64(m->end - m->pos, CKPT_PM_AHEAD));
    if (ckpt_source_pread(m->source, m->buf + have, more, m->pos, m->err) < 0)
        return -1;
    if (m->crc)
        *m->crc = ckpt_crc32(*m->crc, m->stop, more);
    m->stop += more;
    m->pos += more;
    return 0;
}

int ckpt_pm_take_counted(struct ckpt_pickle_machine *m, unsigned n, const char **ret,
                         size_t *ret_len)
{
    if (ckpt_pm_need(m, n) < 0)
        return -1;
    uint64_t len = ckpt_pm_take_le(m, n);
    if (len > ckpt_pm_left(m))
        return ckpt_pm_fail_end(m);
    if (len > CKPT_PICKLE_MAX_STRING)
        return ckpt_fail(m->err, CKPT_LIMIT,
                         "a string has %" PRIu64 " bytes; at most %d are supported", len,
                         CKPT_PICKLE_MAX_STRING);
    if (ckpt_pm_need(m, (size_t)len) < 0)
        return -1;
    *ret = (const char *)m->at;
    *ret_len = (size_t)len;
    m->at += len;
    return 0;
}
