/* SPDX-License-Identifier: Apache-2.0 */
/* Sharded safetensors, as torch's HuggingFaceStorageWriter saves with save_distributed:
 *
 *     shard-RRRRR-model-IIIII-of-NNNNN.safetensors
 *
 * R counts ranks, I the files into which a model directory would be split, both from 1. Each file's
 * metadata say where its parts begin in their tensors; nothing states a whole tensor's shape. The
 * model's other files lie beside them. */

#include "base/sort.h"
#include "base/str.h"
#include "container/safetensors.h"
#include "format/dcp/out.h"
#include "format/writer.h"
#include "view/shards.h"
#include "view/text.h"

enum { LEADING = CKPT_ST_LEADING };

struct part {
    struct ckpt_rows rows;
    uint32_t tensor; /* in the catalogue */
    uint64_t off;    /* after the header */
};

struct file {
    const struct part *plan; /* in the catalogue's order, as torch plans them */
    struct part *part;       /* in the order in which they are stored */
    size_t n;
    struct ckpt_st_head head;
};

struct state {
    const struct ckpt_writing *w;
    struct ckpt_shards shards;
    uint32_t ranks;
    struct ckpt_arena *arena;
    struct part *part; /* of the file that is being made */
};

/* ---- the header ---- */

/* An entry of json.dumps(DCP_SHARDING_INFO), which itself stands in a JSON string. */
static void put_offsets(const struct part *p, bool first, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str info = {0}, quoted = {0};
    uint64_t dim[CKPT_MAX_RANK], off[CKPT_MAX_RANK];

    ckpt_rows_dim(&p->rows, dim, off);
    ckpt_str_puts(&info, first ? "" : ", ");
    ckpt_json_put_string(&info, p->rows.tensor->name);
    ckpt_str_puts(&info, ": {\"saved_offsets\": [");
    for (uint32_t d = 0; d < p->rows.tensor->rank; d++) {
        ckpt_str_puts(&info, d ? ", " : "");
        ckpt_str_put_u64(&info, off[d]);
    }
    ckpt_str_puts(&info, "]}");
    ckpt_st_put_string(&quoted, ckpt_str_get(&info));
    if (info.failed || quoted.failed)
        out->failed = true;
    else
        ckpt_str_append(out, quoted.ptr + 1, quoted.len - 2); /* without the quotes */
}

/* The metadata's beginning, where each part begins, the metadata's end, each part, the end. */
static void put_header(const void *ctx, size_t i, struct ckpt_str *out)
{
    const struct file *f = ctx;
    const size_t n = f->n;

    if (i == 0) {
        ckpt_str_puts(out, "{\"__metadata__\":{\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{");
    } else if (i <= n) {
        put_offsets(&f->plan[i - 1], i == 1, out);
    } else if (i == n + 1) {
        ckpt_str_puts(out, "}\",\"format\":\"pt\"}");
    } else if (i < 2 * n + 2) {
        const struct part *p = &f->part[i - n - 2];
        uint64_t dim[CKPT_MAX_RANK], off[CKPT_MAX_RANK];
        ckpt_rows_dim(&p->rows, dim, off);
        ckpt_st_header_part(out, p->rows.tensor, dim, p->off, p->rows.len, false);
    } else {
        ckpt_st_header_end(out);
    }
}

/* ---- a file ---- */

static int part_cmp(const void *a, const void *b)
{
    return ckpt_st_cmp(((const struct part *)a)->rows.tensor,
                       ((const struct part *)b)->rows.tensor);
}

static int name_cmp(const void *a, const void *b)
{
    return ckpt_u64_cmp(((const struct part *)a)->tensor, ((const struct part *)b)->tensor);
}

static int put_file(struct state *s, struct file *f, const char *path, struct ckpt_err *err)
{
    struct ckpt_segment *seg = ckpt_arena_alloc(s->arena, (f->n + LEADING) * sizeof *seg);
    uint64_t len;

    if (!seg)
        return ckpt_nomem(err);
    if (ckpt_text_init(&f->head.text, put_header, f, 2 * f->n + 3, CKPT_TEXT_SHORT, s->arena, err) <
        0)
        return -1;
    if (f->head.text.len > CKPT_ST_MAX_HEADER)
        return ckpt_fail(err, CKPT_LIMIT,
                         "%s: the header would have more than the %d bytes that the safetensors "
                         "library reads; more ranks or a smaller max_shard_size make it shorter",
                         path, CKPT_ST_MAX_HEADER);
    ckpt_st_head_segments(&f->head, seg, &len);
    for (size_t i = 0; i < f->n; i++) {
        const struct ckpt_rows *r = &f->part[i].rows;
        seg[LEADING + i] = ckpt_segment_tensor(r->tensor, r->from, r->len);
    }
    return ckpt_writing_add(s->w, path, seg, f->n + LEADING, err);
}

/* The file `file` of rank `rank`, of parts[0..n); there is none without parts. */
static int make_file(struct state *s, uint32_t rank, size_t file, const struct part *parts,
                     size_t n, struct ckpt_err *err)
{
    struct file *f = ckpt_arena_alloc(s->arena, sizeof *f);
    struct part *plan = ckpt_arena_dup(s->arena, parts, n * sizeof *plan),
                *part = ckpt_arena_dup(s->arena, parts, n * sizeof *part);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf(
        "shard-%05u-model-%05zu-of-%05zu.safetensors", rank + 1, file + 1, s->shards.nfile);
    uint64_t off = 0;

    if (!f || !plan || !part || !path)
        return ckpt_nomem(err);
    qsort(part, n, sizeof *part, part_cmp);
    for (size_t i = 0; i < n; i++) {
        part[i].off = off;
        off += part[i].rows.len;
    }
    *f = (struct file){.plan = plan, .part = part, .n = n};
    return put_file(s, f, path, err);
}

/* ---- a rank ---- */

static int file_cmp(const void *a, const void *b, void *arg)
{
    const struct ckpt_shards *shards = arg;
    const uint32_t x = shards->file[((const struct part *)a)->tensor],
                   y = shards->file[((const struct part *)b)->tensor];

    return x != y ? ckpt_u64_cmp(x, y) : name_cmp(a, b);
}

static int write_rank(struct state *s, uint32_t rank, struct ckpt_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < s->w->cat->tensors.len; i++)
        if (ckpt_rows_of(&s->w->cat->tensors.ptr[i], rank, s->ranks, &s->part[n].rows))
            s->part[n++].tensor = (uint32_t)i;
    qsort_r(s->part, n, sizeof *s->part, file_cmp, &s->shards);
    for (size_t i = 0, end; i < n; i = end) {
        const uint32_t file = s->shards.file[s->part[i].tensor];
        for (end = i + 1; end < n && s->shards.file[s->part[end].tensor] == file;)
            end++;
        if (make_file(s, rank, file, &s->part[i], end - i, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- all of it ---- */

static void state_release(struct state *s)
{
    ckpt_shards_release(&s->shards);
    free(s->part);
}

static int write_dcp_hf(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(state_release) struct state s = {
        .w = w, .ranks = ckpt_output_parts(w->output, CKPT_CUT_RANKS), .arena = &w->files->arena};
    const struct ckpt_catalog *cat = w->cat;
    size_t nparts;

    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_st_check_name(cat->tensors.ptr[i].name, err) < 0)
            return -1;
    if (ckpt_rows_count(cat, s.ranks, &nparts, err) < 0 ||
        ckpt_shards_choose(cat, w->model->weight_map, w->model->max_shard_size, w->model->sort,
                           NULL, &s.shards, err) < 0)
        return -1;
    if (!(s.part = calloc(cat->tensors.len + 1, sizeof *s.part)))
        return ckpt_nomem(err);
    for (uint32_t r = 0; r < s.ranks; r++)
        if (write_rank(&s, r, err) < 0)
            return -1;
    return ckpt_vfiles_add_model(w->files, w->model, err);
}

const struct ckpt_writer ckpt_writer_dcp_hf = {
    .name = "dcp_hf",
    .keys = 1u << CKPT_CUT_RANKS | CKPT_WRITES_SIZE,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .write = write_dcp_hf,
};
