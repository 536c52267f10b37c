/* SPDX-License-Identifier: Apache-2.0 */
/* Everything that is left of an export when the spans of this process are written. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "common.h"
#include "out.h"
#include "tool/export/export.h"

/* Journals are looked at again after FIRST_POLL_MS, then less and less often, down to once in
 * LAST_POLL_MS and POLL_PART_MS more for each part: all of them look at the journals of all. */
enum { FIRST_POLL_MS = 20, LAST_POLL_MS = 1000, POLL_PART_MS = 20 };

static int take(void *ctx, const json_t *line, struct ckpt_err *err)
{
    return ckpt_done_take(&((struct exporting *)ctx)->done, line, err);
}

int ckpt_rest_refresh(struct exporting *x, struct ckpt_err *err)
{
    return ckpt_job_refresh(&x->job, take, x, err);
}

/* ---- what lacks ---- */

/* This much lacks of one part. */
struct lack {
    size_t files;
    uint64_t units, bytes;
};

static bool is_of_part(const struct exporting *x, const struct ckpt_process *p, uint32_t part)
{
    return p->is_known && p->part == part + 1 && p->parts == x->part.count &&
           (!x->job.self || strcmp(p->name, x->job.self) != 0);
}

/* Find a process of this part: one that lives or, if there is none, one that has lived since this
 * process began. NULL: there is none either. */
static const struct ckpt_process *find_writer(const struct exporting *x, uint32_t part,
                                              bool *ret_lives)
{
    const struct ckpt_process *ended = NULL, *me = NULL;

    for (size_t i = 0; i < x->job.all.len; i++)
        if (x->job.self && strcmp(x->job.all.ptr[i].name, x->job.self) == 0)
            me = &x->job.all.ptr[i];
    *ret_lives = false;
    for (size_t i = 0; i < x->job.all.len; i++) {
        const struct ckpt_process *p = &x->job.all.ptr[i];
        if (!is_of_part(x, p, part))
            continue;
        *ret_lives = p->lives;
        if (*ret_lives)
            return p;
        if (p->has_lived || (me && p->beat_ns >= me->begin_ns))
            ended = p;
    }
    return ended;
}

/* Find what lacks of each part; NULL: no memory. The caller frees it. */
static struct lack *find_lacks(const struct exporting *x)
{
    struct lack *lack = calloc(x->part.count, sizeof *lack);
    size_t *last = calloc(x->part.count, sizeof *last); /* the file counted last, plus 1 */
    uint64_t from, to;

    for (size_t u = 0; lack && last && u < x->spans.n; u++) {
        const size_t item = ckpt_spans_place(&x->spans, x->items, u, &from, &to);
        const uint32_t part = x->spans.owner[u];
        if (ckpt_done_has(&x->done, item, u))
            continue;
        lack[part].units++;
        lack[part].bytes += to - from;
        lack[part].files += last[part] != item + 1;
        last[part] = item + 1;
    }
    if (!last)
        free(ckpt_steal(&lack));
    free(last);
    return lack;
}

/* "being written (host node7, process 123)" and the like. */
static json_t *state_of(const struct exporting *x, uint32_t part)
{
    bool lives;
    const struct ckpt_process *p = find_writer(x, part, &lives);

    if (!p)
        return json_string("not being written");
    ckpt_cleanup(ckpt_freep) char *text =
        ckpt_asprintf("%s (host %s, process %" PRId64 ")", lives ? "being written" : "has ended",
                      p->host, p->pid);
    return text ? ckptfs_json_text(text) : NULL;
}

json_t *ckpt_rest_lacking(struct exporting *x)
{
    struct lack *lack = find_lacks(x);
    json_t *list = lack ? json_array() : NULL;

    for (uint32_t p = 0; lack && p < x->part.count; p++)
        if (lack[p].units)
            ckpt_json_append(&list, json_pack("{s:I, s:I, s:I, s:o}", "part", (json_int_t)p + 1,
                                              "files", (json_int_t)lack[p].files, "bytes",
                                              (json_int_t)lack[p].bytes, "state", state_of(x, p)));
    free(lack);
    return list;
}

/* ---- waiting ---- */

static int fail_part(const struct exporting *x, uint32_t part, const struct lack *lack,
                     const struct ckpt_process *ended, struct ckpt_err *err)
{
    char size[CKPT_OUT_SIZE];
    ckpt_cleanup(ckpt_freep) char *who = ended ? ckpt_process_text(ended) : NULL;

    if (ended)
        return ckpt_fail(err, CKPT_PEER,
                         "%s: %s has ended, and %zu of its files lack, %s: run the same command "
                         "again, with any number of processes",
                         x->dest, who ? who : "a part", lack->files,
                         ckpt_out_size(lack->bytes, size));
    return ckpt_fail(err, CKPT_TIMEOUT,
                     "%s: part %" PRIu32 "/%" PRIu32 " has not begun within %" PRIu64
                     " s: %s=%" PRIu32 " in the environment made this process part %" PRIu32
                     "/%" PRIu32 "; if no others were started, --alone writes everything",
                     x->dest, part + 1, x->part.count, x->job.limits.launch_ms / 1000,
                     x->part.launcher, x->part.count, x->part.index + 1, x->part.count);
}

/* Is it any use to wait for the parts that lack? */
static int check_parts(const struct exporting *x, uint64_t waited_ms, struct ckpt_err *err)
{
    struct lack *lack = find_lacks(x);
    int rc = 0;

    if (!lack)
        return ckpt_nomem(err);
    for (uint32_t p = 0; rc == 0 && p < x->part.count; p++) {
        bool lives = true;
        const struct ckpt_process *writer = lack[p].units ? find_writer(x, p, &lives) : NULL;
        if (lives || (!writer && waited_ms < x->job.limits.launch_ms))
            continue;
        rc = fail_part(x, p, &lack[p], writer, err);
    }
    free(lack);
    return rc;
}

static bool is_whole(const struct exporting *x)
{
    for (size_t i = 0; i < x->items->n; i++)
        if (!x->done.file[i].whole)
            return false;
    return true;
}

/* Every file is whole by the journals. Look at the files once more, and at the checkpoint: then all
 * that was read of it, by whatever process, is of one save. */
static int name(struct exporting *x, bool *ret_named, struct ckpt_err *err)
{
    int64_t ignored;

    for (size_t i = 0; i < x->items->n; i++)
        if (!ckpt_dest_has(x, i, &ignored) && !ckpt_job_is_named(&x->job))
            return ckpt_fail(
                err, CKPT_CONFLICT,
                "%s/%s/%s was written, and is not there any more, or has another size: "
                "run the same command again",
                x->job.path, ckpt_job_files, x->items->item[i].path);
    return ckpt_view_verify_unchanged(x->view, err) < 0 ? -1 : ckpt_dest_name(x, ret_named, err);
}

/* This process has written all of its part: the journals must say so. */
static int check_own(const struct exporting *x, struct ckpt_err *err)
{
    uint64_t from, to;

    for (size_t u = 0; u < x->spans.n; u++) {
        const size_t item = ckpt_spans_place(&x->spans, x->items, u, &from, &to);
        if (x->spans.owner[u] == x->part.index && !ckpt_done_has(&x->done, item, u))
            return ckpt_fail(err, CKPT_IO,
                             "%s: bytes %" PRIu64 " to %" PRIu64
                             " of %s are written, but no journal in %s says so: the storage has "
                             "lost a line; run the same command again",
                             x->dest, from, to, x->items->item[item].path, x->job.path);
    }
    return 0;
}

/* One look at the job: *ret_done: there is no reason to look again. */
static int look(struct exporting *x, uint64_t waited_ms, bool *ret_done, bool *ret_whole,
                bool *ret_named, struct ckpt_err *err)
{
    bool did;

    *ret_done = true;
    if (ckpt_rest_refresh(x, err) < 0)
        return -1;
    *ret_whole = is_whole(x);
    if (*ret_whole)
        return name(x, ret_named, err);
    if (check_own(x, err) < 0 || ckpt_readback(x, &did, err) < 0)
        return -1;
    *ret_done = !did && !x->part.launcher;
    return did || *ret_done ? 0 : check_parts(x, waited_ms, err);
}

int ckpt_rest_finish(struct exporting *x, bool *ret_whole, bool *ret_named, struct ckpt_err *err)
{
    const uint64_t begin = ckpt_now_ms(),
                   most = LAST_POLL_MS + (uint64_t)POLL_PART_MS * x->part.count;
    uint64_t pause = FIRST_POLL_MS;

    *ret_whole = *ret_named = false;
    for (;;) {
        struct ckpt_err why = {0};
        bool done;
        const int rc = look(x, ckpt_now_ms() - begin, &done, ret_whole, ret_named, &why);
        if (!*ret_whole && ckpt_job_is_named(&x->job)) { /* whatever has failed: it has gone */
            *ret_whole = true;
            return ckpt_dest_name(x, ret_named, err); /* which looks whether DEST is there */
        }
        if (rc < 0)
            return ckpt_err_move(err, &why);
        if (done)
            return 0;
        ckpt_pause_ms(pause);
        pause = pause * 2 < most ? pause * 2 : most;
    }
}
