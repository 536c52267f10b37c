/* SPDX-License-Identifier: Apache-2.0 */
/* nanotron: one safetensors file for each parameter and tensor-parallel rank, as its save_weights
 * writes them (nanotron/serialize/weights.py, version 1.5):
 *
 *     latest.txt
 *     N/config.yaml, N/model_config.json, N/checkpoint_metadata.json
 *     N/model/MODULE/.../model_LEAF_pp-rank-P-of-PP_tp-rank-T-of-TP.safetensors
 *     N/model/MODULE/.../model_LEAF.safetensors               what every rank has the whole of */
#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "container/safetensors.h"
#include "format/writer.h"

enum { MOST_FILES = 1 << 24 };

struct state {
    const struct ckpt_writing *w;
    const char *version;
    uint32_t tp, pp;
};

/* ---- the metadata ---- */

/* "0,16,None|None,None,None": an interval of one dimension, all of the others. */
static void put_slices(struct ckpt_str *out, uint32_t rank, uint32_t dim,
                       const struct ckpt_interval *of)
{
    for (uint32_t d = 0; d < rank; d++) {
        ckpt_str_puts(out, d ? "|" : "");
        if (d == dim && of)
            ckpt_str_printf(out, "%" PRIu64 ",%" PRIu64 ",None", of->lo, of->lo + of->n);
        else
            ckpt_str_puts(out, "None,None,None");
    }
}

/* LOCAL#GLOBAL;...: a pair for each part that is divided on its own. */
static void put_pairs(struct ckpt_str *out, const struct ckpt_tensor *t, uint32_t rank,
                      uint32_t ranks)
{
    struct ckpt_interval local = {0};
    const bool single = t->cuts->n == 1;

    for (uint32_t i = 0; i < t->cuts->n; i++) {
        const struct ckpt_interval global = ckpt_cut_part(&t->cuts->cut[i], rank, ranks);
        local.n = global.n;
        ckpt_str_puts(out, i ? ";" : "");
        put_slices(out, t->rank, t->cuts->cut[i].dim, single ? NULL : &local);
        ckpt_str_putc(out, '#');
        put_slices(out, t->rank, t->cuts->cut[i].dim, &global);
        local.lo += local.n;
    }
}

/* A tuple as Python shows it: (64, 32), (64,). */
static void put_shape(struct ckpt_str *out, const struct ckpt_tensor *t)
{
    ckpt_str_putc(out, '(');
    for (uint32_t d = 0; d < t->rank; d++)
        ckpt_str_printf(out, "%s%" PRIu64, d ? ", " : "", t->dim[d]);
    ckpt_str_puts(out, t->rank == 1 ? ",)" : ")");
}

static void put_member(struct ckpt_str *out, const char *key, const char *value, bool first)
{
    ckpt_str_puts(out, first ? "" : ",");
    ckpt_st_put_string(out, key);
    ckpt_str_putc(out, ':');
    ckpt_st_put_string(out, value);
}

static void put_metadata(const struct state *s, const struct ckpt_tensor *t, uint32_t rank,
                         struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pairs = {0}, shape = {0};

    put_pairs(&pairs, t, rank, s->tp);
    put_shape(&shape, t);
    put_member(out, "local_global_slices_pairs", ckpt_str_get(&pairs), true);
    put_member(out, "unsharded_shape", ckpt_str_get(&shape), false);
    put_member(out, "version", s->version, false);
    out->failed |= pairs.failed || shape.failed;
}

/* ---- a file ---- */

static bool is_sharded(const struct ckpt_tensor *t)
{
    return ckpt_cut_dim(t, CKPT_CUT_OVER_TP) < t->rank;
}

/* Length, header and spaces, in one piece of memory. */
static int make_head(const struct state *s, const struct ckpt_tensor *t,
                     const struct ckpt_tensor *own, uint32_t rank, struct ckpt_segment *ret,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str head = {0};
    struct ckpt_tensor data = *own;

    data.name = "data";
    ckpt_str_puts(&head, "{\"__metadata__\":{");
    if (is_sharded(t))
        put_metadata(s, t, rank, &head);
    ckpt_str_putc(&head, '}');
    ckpt_st_header_part(&head, &data, own->dim, 0, ckpt_tensor_nbytes(own), false);
    ckpt_st_header_end(&head);
    *ret = ckpt_segment_mem(NULL, 0);
    ret->mem = ckpt_st_header_mem(&head, &s->w->files->arena, &ret->len);
    return ret->mem ? 0 : ckpt_nomem(err);
}

/* "5/model/decoder/0/pp_block/attn/o_proj/model_weight[_pp-rank-...].safetensors" */
static char *make_path(const struct state *s, const struct ckpt_tensor *t, uint32_t rank)
{
    const char *dot = strrchr(t->name, '.');
    const size_t len = dot ? (size_t)(dot - t->name) : 0;
    ckpt_cleanup(ckpt_freep) char *folder = strndup(t->name, len);
    const char *leaf = dot ? dot + 1 : t->name;

    for (char *p = folder; p && (p = strchr(p, '.'));)
        *p = '/';
    if (!folder)
        return NULL;
    if (!is_sharded(t))
        return ckpt_asprintf("%" PRIu64 "/model/%s/model_%s.safetensors", s->w->step, folder, leaf);
    return ckpt_asprintf("%" PRIu64 "/model/%s/model_%s_pp-rank-%" PRIu32 "-of-%" PRIu32
                         "_tp-rank-%" PRIu32 "-of-%" PRIu32 ".safetensors",
                         s->w->step, folder, leaf, t->cuts->stage, s->pp, rank, s->tp);
}

static int add_file(const struct state *s, const struct ckpt_tensor *t, uint32_t rank,
                    struct ckpt_err *err)
{
    struct ckpt_arena *arena = &s->w->files->arena;
    struct ckpt_tensor *own = ckpt_arena_alloc(arena, sizeof *own);
    struct ckpt_segment *seg = ckpt_arena_alloc(arena, 2 * sizeof *seg);
    ckpt_cleanup(ckpt_freep) char *path = make_path(s, t, rank);

    if (!own || !seg || !path)
        return ckpt_nomem(err);
    if (s->w->files->list.len == MOST_FILES)
        return ckpt_fail(err, CKPT_LIMIT, "the layout has more than %d files", MOST_FILES);
    if (ckpt_cut_tensor(s->w->cat, t, CKPT_CUT_OVER_TP, rank, s->tp, own, err) < 0 ||
        make_head(s, t, own, rank, &seg[0], err) < 0)
        return -1;
    const bool whole = !is_sharded(t) || s->tp == 1;
    seg[1] = ckpt_segment_tensor(whole ? t : own, 0, ckpt_tensor_nbytes(own));
    return ckpt_writing_add(s->w, path, seg, 2, err);
}

static int add_tensor(const struct state *s, const struct ckpt_tensor *t, struct ckpt_err *err)
{
    const uint32_t ranks = is_sharded(t) ? s->tp : 1;

    if (ckpt_cut_check(t, CKPT_CUT_OVER_TP, s->tp, "tp", err) < 0)
        return -1;
    for (uint32_t rank = 0; rank < ranks; rank++)
        if (add_file(s, t, rank, err) < 0)
            return -1;
    return 0;
}

/* ---- configuration files ---- */

/* A checkpoint of which no sample was consumed; without the newline at the end. */
static int add_metadata(const struct ckpt_writing *w, const char *folder, const char *version,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = json_pack(
        "{s:i, s:n, s:i, s:{s:i, s:i, s:[], s:n, s:I}, s:I, s:s}", "cp", 1, "custom_metas", "dp", 1,
        "metas", "consumed_tokens_total", 0, "consumed_train_samples", 0, "data_stages",
        "last_stage_idx", "last_train_step", (json_int_t)w->step, "tp",
        (json_int_t)ckpt_output_parts(w->output, CKPT_CUT_TP), "version", version);
    size_t len;

    if (!j)
        return ckpt_nomem(err);
    return ckpt_json_dump(j, CKPT_JSON_PYTHON, true, &text, &len, err) < 0
               ? -1
               : ckpt_writing_text(w, folder, "checkpoint_metadata.json", text, len - 1, err);
}

static json_t *training_config(const struct ckpt_writing *w)
{
    static const char *const unset[] = {"checkpoints", "data_stages",     "lighteval",
                                        "logging",     "metrics_logging", "optimizer",
                                        "profiler",    "s3_upload",       "tokens"};
    const json_t *std = json_object_get(w->config, "initializer_range");
    json_t *j = json_pack(
        "{s:{s:b, s:s, s:s, s:i, s:I}, s:{s:i, s:s, s:{s:f}, s:i, s:O},"
        " s:{s:i, s:i, s:I, s:s, s:b, s:I, s:b, s:s, s:b}, s:{s:n, s:s?, s:n}}",
        "general", "ignore_sanity_checks", 1, "project", "ckptfs", "run", "view", "seed", 42,
        "step", (json_int_t)w->step, "model", "ddp_bucket_cap_mb", 25, "dtype",
        ckpt_writing_dtype(w), "init_method", "std",
        json_is_number(std) ? json_number_value(std) : 0.02, "make_vocab_size_divisible_by", 1,
        "model_config", w->config, "parallelism", "dp", 1, "expert_parallel_size", 1, "pp",
        (json_int_t)ckpt_output_parts(w->output, CKPT_CUT_PP), "pp_engine", "1f1b",
        "recompute_layer", 0, "tp", (json_int_t)ckpt_output_parts(w->output, CKPT_CUT_TP),
        "tp_linear_async_communication", 0, "tp_mode", "REDUCE_SCATTER", "tp_recompute_allgather",
        1, "tokenizer", "tokenizer_max_length", "tokenizer_name_or_path",
        ckpt_json_str(w->about, "tokenizer"), "tokenizer_revision");

    for (size_t i = 0; i < sizeof unset / sizeof *unset; i++)
        ckpt_json_set(&j, unset[i], json_null());
    return j;
}

/* Add latest.txt, model_config.json, checkpoint_metadata.json and config.yaml. The last has what
 * nanotron needs in order to build the model and to load the weights: no data and no optimizer. */
static int add_configs(const struct ckpt_writing *w, const char *version, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("%" PRIu64 "/", w->step), *model = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *training = training_config(w);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    size_t len;

    if (training)
        ckpt_yaml_out(training, &text);
    if (!folder || !training || text.failed)
        return ckpt_nomem(err);
    return ckpt_writing_text(w, "", "latest.txt", folder, strlen(folder) - 1, err) < 0 ||
                   ckpt_json_dump(w->config, CKPT_JSON_LINE, false, &model, &len, err) < 0 ||
                   ckpt_writing_text(w, folder, "model_config.json", model, len, err) < 0 ||
                   add_metadata(w, folder, version, err) < 0
               ? -1
               : ckpt_writing_text(w, folder, "config.yaml", text.ptr, text.len, err);
}

/* ---- all of it ---- */

/* The version of the checkpoint that is read, if that is nanotron's of today's format. */
static const char *version_of(const struct ckpt_writing *w)
{
    const char *format = ckpt_json_str(w->about, "format"),
               *version = ckpt_json_str(w->about, "version");

    return format && version && strcmp(format, "nanotron") == 0 && strcmp(version, "1.4") == 0
               ? "1.4"
               : "1.5";
}

static int write_nanotron(const struct ckpt_writing *w, struct ckpt_err *err)
{
    const struct state s = {.w = w,
                            .version = version_of(w),
                            .tp = ckpt_output_parts(w->output, CKPT_CUT_TP),
                            .pp = ckpt_output_parts(w->output, CKPT_CUT_PP)};

    for (size_t i = 0; i < w->cat->tensors.len; i++)
        if (add_tensor(&s, &w->cat->tensors.ptr[i], err) < 0)
            return -1;
    return add_configs(w, s.version, err);
}

const struct ckpt_writer ckpt_writer_nanotron = {
    .name = "nanotron",
    .keys = 1u << CKPT_CUT_TP | 1u << CKPT_CUT_PP,
    .layout = "its files are those of tp and pp; every rank has all experts",
    .recipes = "nanotron",
    .also = "to_nanotron",
    .write = write_nanotron,
};
