/* SPDX-License-Identifier: Apache-2.0 */
/* ckpt load: load this rank's part of a model under a layout into memory. ckpt plan: what a load by
 * a job of a given size would do; no tensor data is read. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "base/mem.h"
#include "common.h"
#include "out.h"
#include "summary.h"
#include "tool.h"

enum { ALIGN = 256, CHUNK = 8 << 20, AGREE_MS = 300 * 1000 };

/* The memory of all wants: one allocation on the host, or on the device. */
struct memory {
    struct ckpt_comm *comm;
    unsigned char *ptr;
    size_t len;
    size_t *off; /* per want: its offset */
};

CKPT_CLEANUP_BY(ckpt_load_free, struct ckpt_load)

static void memory_release(struct memory *m)
{
    ckpt_comm_dealloc(m->comm, m->ptr);
    free(m->off);
}

static int memory_init(struct memory *m, struct ckpt_load *load, struct ckpt_err *err)
{
    const size_t n = ckpt_load_wants(load);
    void *ptr;

    if (!(m->off = malloc((n + 1) * sizeof *m->off)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        struct ckpt_want_info info = {.size = sizeof info};
        (void)ckpt_load_want_info(load, i, &info, NULL);
        m->off[i] = m->len;
        m->len += (info.nbytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    m->len += ALIGN;
    if (ckpt_comm_alloc(m->comm, m->len, &ptr, err) < 0)
        return -1;
    m->ptr = ptr;
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_dest dest = {.size = sizeof dest, .ptr = m->ptr + m->off[i]};
        if (ckpt_load_set_dest(load, i, &dest, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- --verify ---- */

/* Compare what has arrived for a want with the view: as many rows of its box at a time as fit into
 * a chunk are read once more. */
static int check_want(struct ckpt_view *view, size_t tensor, const struct ckpt_want_info *want,
                      const unsigned char *got, struct ckpt_err *err)
{
    const uint64_t rows = want->rank ? want->n[0] : 1, row = want->nbytes / rows;
    const uint64_t step = row < CHUNK ? CHUNK / row : 1;
    ckpt_cleanup(ckpt_freep) unsigned char *chunk = malloc((rows < step ? rows : step) * row);
    uint64_t lo[CKPT_LOAD_RANK], n[CKPT_LOAD_RANK];

    if (!chunk)
        return ckpt_nomem(err);
    memcpy(lo, want->lo, sizeof lo);
    memcpy(n, want->n, sizeof n);
    for (uint64_t i = 0; i < rows; i += n[0]) {
        lo[0] = want->lo[0] + i;
        n[0] = rows - i < step ? rows - i : step;
        if (ckpt_view_box_pread(view, tensor, lo, n, chunk, err) < 0)
            return -1;
        if (memcmp(got + i * row, chunk, n[0] * row) == 0)
            continue;
        uint64_t at = 0;
        while (got[i * row + at] == chunk[at])
            at++;
        return ckpt_fail(err, CKPT_CONFLICT,
                         "tensor '%s': byte %" PRIu64 " of the loaded data differs from the view",
                         want->tensor, i * row + at);
    }
    return 0;
}

static int check_all(struct ckpt_load *load, struct ckpt_view *view, const struct memory *m,
                     struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_load_wants(load); i++) {
        struct ckpt_want_info want = {.size = sizeof want};
        size_t tensor;
        (void)ckpt_load_want_info(load, i, &want, NULL);
        if (want.nbytes == 0)
            continue;
        ckpt_cleanup(ckpt_freep) unsigned char *got = malloc(want.nbytes);
        if (!got)
            return ckpt_nomem(err);
        if (!ckpt_view_find_tensor(view, want.tensor, &tensor))
            return ckpt_fail(err, CKPT_MISSING, "there is no tensor '%s'", want.tensor);
        if (ckpt_comm_fetch(m->comm, got, m->ptr + m->off[i], want.nbytes, err) < 0 ||
            check_want(view, tensor, &want, got, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- the report ---- */

static int print(const struct ckpt_tool *t, const char *step, const struct ckpt_load *load,
                 const struct ckpt_comm *comm, struct ckpt_err *err)
{
    struct ckpt_load_stats job = {.size = sizeof job};

    (void)ckpt_load_stats(load, NULL, &job, NULL);
    if (ckpt_comm_rank(comm) != 0)
        return 0;
    if (!t->json) {
        char size[4][CKPT_OUT_SIZE];
        (void)printf(
            "%u rank%s over %s, readers %s: %s for all ranks, %s of the checkpoint, %s read in "
            "%" PRIu64 " reads, %s sent, %.3f s (plan %.3f s)%s\n",
            ckpt_comm_size(comm), ckpt_comm_size(comm) == 1 ? "" : "s", ckpt_comm_transport(comm),
            ckpt_load_readers(load), ckpt_out_size(job.needed_bytes, size[0]),
            ckpt_out_size(job.unique_bytes, size[1]), ckpt_out_size(job.read_bytes, size[2]),
            job.reads, ckpt_out_size(job.sent_bytes, size[3]), job.wall_s, job.plan_s,
            t->verify ? ", verified" : "");
        return 0;
    }
    struct ckpt_rates r;
    ckpt_load_rates(load, &r);
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:o, s:i, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, "
        "s:f, "
        "s:{s:f, "
        "s:f, "
        "s:f}, s:{s:f, s:f, s:f, s:f, s:f, s:f}, s:b}",
        "step", ckptfs_json_text(step), "ranks", (int)ckpt_comm_size(comm), "transport",
        ckpt_comm_transport(comm), "readers", ckpt_load_readers(load), "needed_bytes",
        (json_int_t)job.needed_bytes, "unique_bytes", (json_int_t)job.unique_bytes, "read_bytes",
        (json_int_t)job.read_bytes, "sent_bytes", (json_int_t)job.sent_bytes, "received_bytes",
        (json_int_t)job.received_bytes, "asked_bytes", (json_int_t)job.asked_bytes, "reads",
        (json_int_t)job.reads, "buffer_bytes", (json_int_t)job.buffer_bytes, "device_bytes",
        (json_int_t)job.device_bytes, "wall_s", job.wall_s, "plan_s", job.plan_s, "first_s",
        job.first_s, "setup_s", job.setup_s, "exchange_rate", job.exchange_rate, "busy_s", "read",
        job.read_s, "place", job.place_s, "exchange", job.send_s, "rates", "node_storage",
        r.node_storage, "shared_storage", r.shared_storage, "page_cache", r.page_cache, "copy",
        r.copy, "local_link", r.local_link, "network", r.network, "verified", (int)t->verify);
    ckptfs_json_bucket(j);
    ckpt_cleanup(ckpt_freep) char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
    if (!text)
        return ckpt_nomem(err);
    (void)printf("%s\n", text);
    return 0;
}

static uint32_t agree_ms(const struct ckpt_tool *t)
{
    return t->load.exchange_timeout_ms ? t->load.exchange_timeout_ms : AGREE_MS;
}

static int load_view(const struct ckpt_tool *t, struct ckpt_comm *comm, const char *step,
                     struct ckpt_view *view, struct ckpt_load *load, struct memory *m,
                     struct ckpt_err *err)
{
    int rc = ckpt_load_want_layout(load, t->layout, err);

    if (rc < 0 && err->code == CKPT_USAGE)
        return -1; /* the error is the same on every rank */
    if (ckpt_comm_agree(comm, rc, agree_ms(t), err) < 0 || ckpt_load_plan(load, err) < 0)
        return -1;
    rc = memory_init(m, load, err);
    if (ckpt_comm_agree(comm, rc, agree_ms(t), err) < 0 || ckpt_load_start(load, err) < 0 ||
        ckpt_load_wait(load, UINT32_MAX, err) != 0)
        return -1;
    if (t->verify) {
        rc = check_all(load, view, m, err);
        if (ckpt_comm_agree(comm, rc, UINT32_MAX / 4, err) < 0)
            return -1;
    }
    return print(t, step, load, comm, err);
}

/* Can another step be better? Storage that fails, or does not answer, may do so again, for ever. */
static bool is_of_content(enum ckpt_code code)
{
    return code == CKPT_FORMAT || code == CKPT_UNSUPPORTED || code == CKPT_MISSING ||
           code == CKPT_CONFLICT;
}

/* Rank 0 could not open the latest step: fail with an error that suggests another one, if there is
 * one. */
static int fail_open(const struct ckpt_tool *t, const struct ckpt_comm *comm, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    struct ckpt_err why = {0};

    if (ckpt_comm_rank(comm) != 0 || t->step || !is_of_content(err->code) ||
        ckpt_tool_open(t, &view, &why) == 0 || why.code != err->code)
        return -1;
    *err = why;
    return ckpt_comm_size(comm) > 1 ? ckpt_err_in(err, "rank 0") : -1;
}

int ckpt_cmd_load(const struct ckpt_tool *t, struct ckpt_comm *comm, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *step = NULL;
    ckpt_cleanup(memory_release) struct memory memory = {.comm = comm};
    ckpt_cleanup(ckpt_load_freep) struct ckpt_load *load = NULL;

    const int rc = (t->local ? ckpt_load_open_local : ckpt_load_open)(
        comm, t->run, t->opt, t->step, agree_ms(t), NULL, &step, &view, err);
    if (rc < 0)
        return t->local ? -1 : fail_open(t, comm, err);
    return ckpt_load_new(view, comm, &t->load, &load, err) < 0
               ? -1
               : load_view(t, comm, step, view, load, &memory, err);
}

int ckpt_cmd_plan(const struct ckpt_tool *t, struct ckpt_err *err)
{
    const uint32_t per_node = t->ranks_per_node ? t->ranks_per_node : 8;
    ckpt_cleanup(ckpt_view_releasep) struct ckpt_view *view = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;

    const int rc = t->local ? ckpt_load_open_nodes(t->run, t->node_files, t->layout, t->ranks,
                                                   per_node, t->opt, t->step, &view, err)
                            : ckpt_tool_open(t, &view, err);
    if (rc < 0 || ckpt_load_model(view, t->layout, t->ranks, per_node, t->share_ranks, t->transport,
                                  &t->load, &text, err) < 0)
        return -1;
    ckpt_cleanup(ckpt_json_decrefp) json_t *plan = NULL;
    if (ckpt_out_parse(text, &plan, err) < 0)
        return -1;
    if (t->json)
        return ckpt_out_json(plan, err);
    ckpt_summary_of_plan(plan, t->ranks == 0);
    return 0;
}
