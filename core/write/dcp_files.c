/* SPDX-License-Identifier: Apache-2.0 */
/* `.metadata` and `__R_0.distcp`. */
#include "write/dcp_files.h"

#include <string.h>

#include "base/ckd.h"
#include "base/str.h"
#include "container/torch_out.h"
#include "view/text.h"
#include "write/dcp_metadata_out.h"
#include "write/rows.h"

/* One rank's file. Its text is what stands around the tensors' bytes: the head and the tail of each
 * archive. */
struct file {
    const struct ckpt_dcp_metadata *all;
    const struct ckpt_dcp_part *part;
    size_t n;
    struct ckpt_text text;
};

struct state {
    const struct ckpt_writing *w;
    struct ckpt_arena *arena;
    const char *folder;
    struct ckpt_dcp_part *part;
    struct ckpt_dcp_metadata *metadata;
};

static struct ckpt_rows rows_of(const struct ckpt_dcp_metadata *m, const struct ckpt_dcp_part *p)
{
    struct ckpt_rows rows;

    (void)ckpt_rows_of(&m->cat->tensors.ptr[p->tensor], p->rank, m->ranks, &rows);
    return rows;
}

static void put_archive(const struct ckpt_rows *rows, struct ckpt_str *head, struct ckpt_str *tail)
{
    uint64_t dim[CKPT_MAX_RANK], off[CKPT_MAX_RANK];
    const struct ckpt_torch_out t = {.dtype = (enum ckpt_dtype)rows->tensor->dtype,
                                     .dim = dim,
                                     .rank = rows->tensor->rank,
                                     .nbytes = rows->len};

    ckpt_rows_dim(rows, dim, off);
    ckpt_torch_out(&t, head, tail);
}

/* The heads are the even entries. */
static void put_around(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct file *f = ctx;
    const struct ckpt_rows rows = rows_of(f->all, &f->part[i / 2]);

    put_archive(&rows, i % 2 ? NULL : out, i % 2 ? out : NULL);
}

/* ---- a file ---- */

/* Two segments a part, what stands before a tensor's bytes (with the tail of the archive before)
 * and the bytes; then the last tail. */
static int put_segments(const struct file *f, struct ckpt_segment *seg, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str head = {0};
    uint64_t text = 0, off = 0; /* where the next segment begins in the text, and in the file */

    for (size_t i = 0; i < f->n; i++) {
        const struct ckpt_rows rows = rows_of(f->all, &f->part[i]);
        ckpt_str_clear(&head);
        put_archive(&rows, &head, NULL);
        const uint64_t len = f->part[i].off + head.len - off;
        seg[2 * i] = (struct ckpt_segment){
            .off = off, .len = len, .kind = CKPT_SEGMENT_TEXT, .from = text, .text = &f->text};
        text += len;
        off += len;
        seg[2 * i + 1] = (struct ckpt_segment){.off = off,
                                               .len = rows.len,
                                               .kind = CKPT_SEGMENT_TENSOR,
                                               .from = rows.from,
                                               .tensor = rows.tensor};
        off += rows.len;
    }
    seg[2 * f->n] = (struct ckpt_segment){.off = off,
                                          .len = f->text.len - text,
                                          .kind = CKPT_SEGMENT_TEXT,
                                          .from = text,
                                          .text = &f->text};
    return head.failed ? ckpt_nomem(err) : 0;
}

static void set_places(struct state *s, const struct file *f, const struct ckpt_segment *seg)
{
    const struct ckpt_vfiles *files = s->w->files;
    const struct ckpt_vnode *node = files->list.ptr[files->list.len - 1].node;

    for (size_t i = 0; i < f->n; i++) {
        const struct ckpt_rows rows = rows_of(f->all, &f->part[i]);
        if (ckpt_rows_whole(&rows))
            s->w->place[f->part[i].tensor] =
                (struct ckpt_vplace){.file = node, .off = seg[2 * i + 1].off};
    }
}

static int add_file(struct state *s, uint32_t rank, const struct ckpt_dcp_part *part, size_t n,
                    struct ckpt_err *err)
{
    struct file *f = ckpt_arena_alloc(s->arena, sizeof *f);
    struct ckpt_segment *seg = ckpt_arena_alloc(s->arena, (2 * n + 1) * sizeof *seg);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s__%u_0.distcp", s->folder, rank);
    int64_t mtime = INT64_MIN;

    if (!f || !seg || !path)
        return ckpt_nomem(err);
    *f = (struct file){.all = s->metadata, .part = part, .n = n};
    if (ckpt_text_init(&f->text, put_around, f, 2 * n, s->arena, err) < 0 ||
        put_segments(f, seg, err) < 0)
        return -1;
    for (size_t i = 0; i < n; i++)
        mtime = ckpt_vfiles_mtime(s->w->cat, &s->w->cat->tensors.ptr[part[i].tensor], mtime);
    if (ckpt_vfiles_add_segments(s->w->files, path, seg, n ? 2 * n + 1 : 0,
                                 mtime == INT64_MIN ? s->w->model->mtime_ns : mtime, err) < 0)
        return -1;
    set_places(s, f, seg);
    return 0;
}

/* ---- all of it ---- */

/* The parts of one rank, from s->part[at] on; how many. */
static int plan_rank(struct state *s, uint32_t rank, size_t at, size_t *ret_n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str around = {0};
    struct ckpt_dcp_metadata *m = s->metadata;
    uint64_t off = 0;

    *ret_n = 0;
    for (size_t i = 0; i < m->cat->tensors.len; i++) {
        struct ckpt_rows rows;
        if (!ckpt_rows_of(&m->cat->tensors.ptr[i], rank, m->ranks, &rows))
            continue;
        ckpt_str_clear(&around);
        put_archive(&rows, &around, &around);
        const uint64_t len = around.len + rows.len;
        s->part[at + (*ret_n)++] = (struct ckpt_dcp_part){(uint32_t)i, rank, off, len};
        if (ckd_add(&off, off, len) || off > INT64_MAX)
            return ckpt_fail(err, CKPT_LIMIT, "the file of rank %u would have 2^63 bytes or more",
                             rank);
    }
    return around.failed ? ckpt_nomem(err) : 0;
}

static int plan(struct state *s, struct ckpt_err *err)
{
    struct ckpt_dcp_metadata *m = s->metadata;
    size_t n;

    for (uint32_t r = 0; r < m->ranks; r++) {
        if (plan_rank(s, r, m->npart, &n, err) < 0 ||
            add_file(s, r, &s->part[m->npart], n, err) < 0)
            return -1;
        m->npart += n;
    }
    return 0;
}

static int add_metadata(struct state *s, struct ckpt_err *err)
{
    struct ckpt_text *text = ckpt_arena_alloc(s->arena, sizeof *text);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s.metadata", s->folder);

    if (!text || !path)
        return ckpt_nomem(err);
    if (ckpt_dcp_metadata_text(s->metadata, s->arena, text, err) < 0)
        return -1;
    return ckpt_vfiles_add_segment(
        s->w->files, path,
        (struct ckpt_segment){.len = text->len, .kind = CKPT_SEGMENT_TEXT, .text = text},
        s->w->model->mtime_ns, err);
}

int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err)
{
    struct state s = {.w = w, .arena = &w->files->arena, .folder = folder};
    const uint32_t ranks = ckpt_output_parts(w->output, CKPT_CUT_RANKS);
    size_t most;

    if (ckpt_rows_count(w->cat, ranks, &most, err) < 0)
        return -1;
    s.metadata = ckpt_arena_alloc(s.arena, sizeof *s.metadata);
    s.part = ckpt_arena_alloc(s.arena, (most + 1) * sizeof *s.part);
    if (!s.metadata || !s.part)
        return ckpt_nomem(err);
    *s.metadata = (struct ckpt_dcp_metadata){.cat = w->cat, .ranks = ranks, .part = s.part};
    return plan(&s, err) < 0 ? -1 : add_metadata(&s, err);
}
