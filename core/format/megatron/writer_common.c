/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments, tracker, metadata.json. */
#include "format/megatron/writer_plan.h"

#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "container/torch_out.h"

char *ckpt_mg_folder(const struct ckpt_writing *w)
{
    return w->step ? ckpt_asprintf("iter_%07" PRIu64 "/", w->step) : strdup("release/");
}

/* Leave out the arguments that are objects in the checkpoint that is read (enumerations): only
 * their class is known, not their value. */
static void drop_objects(json_t *args, struct ckpt_catalog *cat)
{
    const char *key;
    json_t *value;
    void *next;

    json_object_foreach_safe(args, next, key, value)
    {
        const char *text = json_string_value(value);
        if (text && (ckpt_has_prefix(text, "megatron.") || ckpt_has_prefix(text, "signal."))) {
            ckpt_catalog_warn(
                cat, "the argument '%s' is left out: it is %s, which only Megatron can make", key,
                text);
            (void)json_object_del(args, key);
        }
    }
}

/* The arguments of the model, which a recipe made, and those of the layout. */
static json_t *arguments(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                         const char *format)
{
    json_t *args = json_deep_copy(w->config);
    const char *dtype = ckpt_writing_dtype(w);
    ckpt_cleanup(ckpt_freep) char *params = ckpt_asprintf("torch.%s", dtype);

    drop_objects(args, w->cat);
    ckpt_json_set(&args, "params_dtype", params ? json_string(params) : NULL);
    ckpt_json_set(&args, "bf16", json_boolean(strcmp(dtype, "bfloat16") == 0));
    ckpt_json_set(&args, "fp16", json_boolean(strcmp(dtype, "float16") == 0));
    ckpt_json_set(&args, "tensor_model_parallel_size", json_integer(g->tp));
    ckpt_json_set(&args, "pipeline_model_parallel_size", json_integer(g->pp));
    ckpt_json_set(&args, "virtual_pipeline_model_parallel_size",
                  g->vpp > 1 ? json_integer(g->vpp) : json_null());
    ckpt_json_set(&args, "num_layers_per_virtual_pipeline_stage",
                  g->vpp > 1 ? json_integer((json_int_t)(g->layers / g->pp / g->vpp))
                             : json_null());
    ckpt_json_set(&args, "overlap_p2p_comm", json_boolean(g->vpp > 1));
    ckpt_json_set(&args, "cp_comm_type", json_pack("[s]", "p2p"));
    ckpt_json_set(&args, "expert_model_parallel_size", json_integer(g->ep));
    ckpt_json_set(&args, "expert_tensor_parallel_size", json_integer(g->experts ? g->etp : g->tp));
    ckpt_json_set(&args, "ckpt_format", json_string(format));
    ckpt_json_set(&args, "use_dist_ckpt", json_boolean(strcmp(format, "torch_dist") == 0));
    ckpt_json_set(&args, "world_size", json_integer((json_int_t)g->size * g->pp));
    ckpt_json_set(&args, "data_parallel_size", json_integer(g->size / g->tp));
    ckpt_json_set(&args, "iteration", json_integer((json_int_t)w->step));
    if (w->groups) { /* whoever resumes looks for random numbers, unless they were not saved */
        ckpt_json_set(&args, "use_distributed_optimizer", json_true());
        ckpt_json_set(&args, "no_save_optim", json_false());
        ckpt_json_set(&args, "no_save_rng", json_true());
        if (ckpt_mg_samples(w))
            ckpt_json_set(&args, CKPT_MG_SAMPLES, json_integer((json_int_t)ckpt_mg_samples(w)));
    }
    return args;
}

int ckpt_mg_put_common(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                       const char *format, struct ckpt_pickle_out *p, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *args = arguments(w, g, format);

    if (!args)
        return ckpt_nomem(err);
    ckpt_pickle_out_text(p, "args");
    ckpt_pickle_out_global(p, "argparse", "Namespace");
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_EMPTY_TUPLE CKPT_PICKLE_OUT_NEWOBJ);
    ckpt_pickle_out_json(p, args);
    ckpt_pickle_out_ops(p, CKPT_PICKLE_OUT_BUILD);
    ckpt_pickle_out_text(p, "checkpoint_version");
    ckpt_pickle_out_float(p, 3.0);
    ckpt_pickle_out_text(p, "iteration");
    ckpt_pickle_out_u64(p, w->step);
    return 0;
}

static int add_common(const struct ckpt_writing *w, const char *folder,
                      const struct ckpt_mg_grid *g, const char *format, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str pickle = {0}, file = {0};
    struct ckpt_pickle_out p = {.out = &pickle};

    ckpt_pickle_out_begin(&p);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    if (ckpt_mg_put_common(w, g, format, &p, err) < 0 ||
        (w->groups && ckpt_mg_put_optimizer(w, g, &p, err) < 0))
        return -1;
    ckpt_pickle_out_text(&p, "content_metadata");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_EMPTY_DICT CKPT_PICKLE_OUT_MARK);
    ckpt_pickle_out_text(&p, "singleton_local_shards");
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_FALSE);
    if (w->groups) {
        ckpt_pickle_out_text(&p, "distrib_optim_sharding_type");
        ckpt_pickle_out_text(&p, "fully_reshardable");
        ckpt_pickle_out_text(&p, "chained_optim_avoid_prefix");
        ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_TRUE);
    }
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_SETITEMS CKPT_PICKLE_OUT_SETITEMS);
    ckpt_pickle_out_ops(&p, CKPT_PICKLE_OUT_STOP);
    if (!pickle.failed)
        ckpt_torch_out_pickle("common/", pickle.ptr, pickle.len, &file);
    return pickle.failed || file.failed
               ? ckpt_nomem(err)
               : ckpt_writing_text(w, folder, "common.pt", file.ptr, file.len, err);
}

int ckpt_mg_common(const struct ckpt_writing *w, const char *folder, const struct ckpt_mg_grid *g,
                   const char *format, struct ckpt_err *err)
{
    static const char metadata[] =
        "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
        "\"common_backend\": \"torch\", \"common_backend_version\": 1}";
    ckpt_cleanup(ckpt_freep) char *step =
        w->step ? ckpt_asprintf("%" PRIu64, w->step) : strdup("release");

    if (!step)
        return ckpt_nomem(err);
    if (ckpt_writing_text(w, "", "latest_checkpointed_iteration.txt", step, strlen(step), err) < 0)
        return -1;
    if (strcmp(format, "torch_dist") != 0)
        return 0;
    return add_common(w, folder, g, format, err) < 0
               ? -1
               : ckpt_writing_text(w, folder, "metadata.json", metadata, sizeof metadata - 1, err);
}
