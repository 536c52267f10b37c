/* SPDX-License-Identifier: Apache-2.0 */
/* `.metadata` and `__R_0.distcp`. */
#include "format/dcp/out.h"

#include "base/ckd.h"
#include "base/str.h"
#include "container/torch_out.h"

/* One rank's file. Its text is what stands around the tensors' bytes, an entry for each archive. */
struct file {
    const struct ckpt_dcp_state *state;
    size_t first, n; /* parts */
    struct ckpt_text text;
};

struct out {
    const struct ckpt_writing *w;
    struct ckpt_arena *arena;
    const char *folder;
    struct ckpt_dcp_state *state;
};

static struct ckpt_dcp_data data_of(const struct ckpt_dcp_state *s, size_t i)
{
    struct ckpt_dcp_data d;

    (void)s->chunk(s->ctx, s->part[i].key, s->part[i].index, &d);
    return d;
}

/* Append the archive of part i. Returns how many of these bytes go before the tensor's. */
static size_t put_archive(const struct ckpt_dcp_state *s, size_t i, struct ckpt_str *out)
{
    const struct ckpt_dcp_data d = data_of(s, i);
    const size_t before = out->len;
    struct ckpt_dcp_key key;
    size_t at;

    s->key(s->ctx, s->part[i].key, &key);
    if (key.is_object) {
        if (key.object.ptr)
            ckpt_str_append(out, key.object.ptr, key.object.len);
        else
            ckpt_torch_out_none(out);
        return out->len - before;
    }
    const struct ckpt_torch_out t = {
        .dtype = key.dtype, .dim = d.dim, .rank = key.rank, .nbytes = d.len};
    ckpt_torch_out(&t, out, &at);
    return at;
}

static void put_around(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct file *f = ctx;

    (void)put_archive(f->state, f->first + i, out);
}

/* ---- a file ---- */

/* Two segments a part, what stands before a tensor's bytes (with the tail of the archive before)
 * and the bytes; then the last tail. */
static int put_segments(const struct file *f, struct ckpt_segment *seg, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str around = {0};
    uint64_t text = 0, off = 0; /* where the next segment begins in the text, and in the file */

    for (size_t i = 0; i < f->n; i++) {
        const struct ckpt_dcp_data d = data_of(f->state, f->first + i);
        ckpt_str_clear(&around);
        const size_t at = put_archive(f->state, f->first + i, &around);
        const uint64_t len = f->state->part[f->first + i].off + at - off;
        seg[2 * i] = ckpt_segment_text(&f->text, text, len);
        seg[2 * i + 1] =
            d.tensor ? ckpt_segment_tensor(d.tensor, d.from, d.len) : ckpt_segment_mem("", 0);
        text += len;
        off += len + seg[2 * i + 1].len;
    }
    seg[2 * f->n] = ckpt_segment_text(&f->text, text, f->text.len - text);
    return around.failed ? ckpt_nomem(err) : 0;
}

static int add_file(struct out *o, uint32_t rank, size_t first, size_t n, struct ckpt_err *err)
{
    struct file *f = ckpt_arena_alloc(o->arena, sizeof *f);
    struct ckpt_segment *seg = ckpt_arena_alloc(o->arena, (2 * n + 1) * sizeof *seg);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s__%u_0.distcp", o->folder, rank);

    if (!f || !seg || !path)
        return ckpt_nomem(err);
    *f = (struct file){.state = o->state, .first = first, .n = n};
    return ckpt_text_init(&f->text, put_around, f, n, CKPT_TEXT_ARCHIVES, o->arena, err) < 0 ||
                   put_segments(f, seg, err) < 0
               ? -1
               : ckpt_writing_add(o->w, path, seg, n ? 2 * n + 1 : 0, err);
}

/* ---- all of it ---- */

/* Place the parts of one rank, from part `at` on; *ret_n: how many. */
static int plan_rank(struct out *o, uint32_t rank, size_t at, size_t *ret_n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str around = {0};
    uint64_t off = 0;

    for (*ret_n = 0; at < o->state->npart && o->state->part[at].rank == rank; at++, (*ret_n)++) {
        const struct ckpt_dcp_data d = data_of(o->state, at);
        ckpt_str_clear(&around);
        (void)put_archive(o->state, at, &around);
        const uint64_t len = around.len + d.len;
        o->state->part[at].off = off;
        o->state->part[at].len = len;
        if (ckd_add(&off, off, len) || off > INT64_MAX)
            return ckpt_fail(err, CKPT_LIMIT, "the file of rank %u would have 2^63 bytes or more",
                             rank);
    }
    return around.failed ? ckpt_nomem(err) : 0;
}

static int add_metadata(struct out *o, struct ckpt_err *err)
{
    struct ckpt_text *text = ckpt_arena_alloc(o->arena, sizeof *text);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s.metadata", o->folder);

    if (!text || !path)
        return ckpt_nomem(err);
    if (ckpt_dcp_metadata_text(o->state, o->arena, text, err) < 0)
        return -1;
    return ckpt_vfiles_add_segment(o->w->files, path, ckpt_segment_text(text, 0, text->len),
                                   o->w->model->mtime_ns, err);
}

int ckpt_dcp_out(const struct ckpt_writing *w, const char *folder, struct ckpt_dcp_state *s,
                 uint32_t ranks, bool empty, struct ckpt_err *err)
{
    struct out o = {.w = w, .arena = &w->files->arena, .folder = folder, .state = s};
    size_t at = 0, n;

    for (uint32_t r = 0; r < ranks; r++, at += n)
        if (plan_rank(&o, r, at, &n, err) < 0 || ((n || empty) && add_file(&o, r, at, n, err) < 0))
            return -1;
    return add_metadata(&o, err);
}
