/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration files of nanotron. */
#include "format/nanotron/config.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/yaml_out.h"

static int add_text(const struct ckpt_writing *w, const char *name, const char *text, size_t len,
                    struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%" PRIu64 "/%s", w->step, name);

    return path ? ckpt_vfiles_add_text(w->files, path, text, len, w->model->mtime_ns, err)
                : ckpt_nomem(err);
}

static int add_latest(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = ckpt_asprintf("%" PRIu64, w->step);

    return text ? ckpt_vfiles_add_text(w->files, "latest.txt", text, strlen(text),
                                       w->model->mtime_ns, err)
                : ckpt_nomem(err);
}

static int add_model_config(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    return ckpt_json_dump(w->config, CKPT_JSON_LINE, false, &text, &len, err) < 0
               ? -1
               : add_text(w, "model_config.json", text, len, err);
}

/* A checkpoint of which no sample was consumed; without the newline at the end. */
static int add_metadata(const struct ckpt_writing *w, const char *version, struct ckpt_err *err)
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
               : add_text(w, "checkpoint_metadata.json", text, len - 1, err);
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

static int add_training_config(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = training_config(w);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    if (!j)
        return ckpt_nomem(err);
    ckpt_yaml_out(j, &text);
    return text.failed ? ckpt_nomem(err) : add_text(w, "config.yaml", text.ptr, text.len, err);
}

int ckpt_nanotron_configs(const struct ckpt_writing *w, const char *version, struct ckpt_err *err)
{
    return add_latest(w, err) < 0 || add_model_config(w, err) < 0 ||
                   add_metadata(w, version, err) < 0 || add_training_config(w, err) < 0
               ? -1
               : 0;
}
