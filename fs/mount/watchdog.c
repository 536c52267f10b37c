/* SPDX-License-Identifier: Apache-2.0 */
/* Requests that run for too long. */
#include "mount/watchdog.h"

#include <errno.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"

enum {
    /* The library's own error, which names the file of the checkpoint, comes first. */
    GRACE_MS = 2000,

    /* A read may be of many reads of the checkpoint, such as all of a large tensor that is decoded.
     * While some of the run's return, it has so many times the timeout. */
    MANY = 4,
};

/* ---- what the log says ---- */

void ckptfs_storage_is_silent(struct ckptfs *fs, const struct ckptfs_lanes *of, const char *text)
{
    const uint64_t ms = ckpt_options_timeout_ms(fs->config->opt);

    if (ckptfs_silence_begins(&fs->refresh.silences, of->file, ckpt_now_ms() - ms))
        ckptfs_logf(fs->log, CKPT_ERROR, "reading %s%s%s", of->step_name, *of->step_name ? "/" : "",
                    text);
}

void ckptfs_storage_answers(struct ckptfs *fs, const struct ckptfs_lanes *of)
{
    uint64_t ms;

    if (ckptfs_silence_ends(&fs->refresh.silences, of->file, &ms))
        ckptfs_logf(fs->log, CKPT_WARNING, "%s%s%s can be read again, after %.0f s", of->step_name,
                    *of->step_name ? "/" : "", of->path, (double)ms / 1000);
}

/* ---- requests ---- */

/* Note whether the run has read anything since the last look. */
static void note_progress(struct ckptfs_watchdog *w, struct ckptfs *fs, uint64_t now)
{
    struct ckpt_run *run = atomic_load(&fs->refresh.run);
    struct ckpt_stats st = {.size = sizeof st};

    if (run)
        (void)ckpt_run_stats(run, &st, NULL);
    if (w->moved_ms == 0 || st.source_reads + st.source_bytes != w->read)
        w->moved_ms = now;
    w->read = st.source_reads + st.source_bytes;
}

void ckptfs_watchdog_look(struct ckptfs_watchdog *w, struct ckptfs *fs)
{
    const uint64_t now = ckpt_now_ms();
    const uint64_t limit = (uint64_t)ckpt_options_timeout_ms(fs->config->opt) + GRACE_MS;
    struct ckptfs_overdue o;
    char text[CKPT_ERR_TEXT];

    if (ckpt_has_prefix(fs->config->run, "s3://")) /* its helper gives requests up itself */
        return;
    note_progress(w, fs, now);
    const uint64_t least = now - w->moved_ms >= limit ? limit : MANY * limit;
    while (ckptfs_admission_overdue(&fs->admission, least, &o)) {
        (void)snprintf(text, sizeof text,
                       "%s: the storage has given no answer for %.0f s: does its server run?",
                       o.of.path, (double)(now - o.began_ms) / 1000);
        ckptfs_storage_is_silent(fs, &o.of, text);
        atomic_fetch_add(&fs->count.errors, 1);
        (void)fuse_reply_err(o.req, ETIMEDOUT);
    }
}

void ckptfs_watchdog_end(struct ckptfs *fs)
{
    struct ckptfs_overdue o;

    while (ckptfs_admission_any(&fs->admission, &o))
        (void)fuse_reply_err(o.req, EIO);
}
