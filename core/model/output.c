/* SPDX-License-Identifier: Apache-2.0 */
/* Bringing a view's model to the names of the framework whose checkpoint the view is. */
#include "model/output.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/writers.h"
#include "model/dequantize.h"
#include "model/facts.h"
#include "recipe/apply/lost.h"

bool ckpt_view_has_output_names(const struct ckpt_view *v)
{
    const struct ckpt_writer *writer = v->shared->opt->output.writer;

    return writer && writer->recipes;
}

/* Dtypes follow from the hub's names, which the tensors still have: note them. */
static void note_dtypes(struct ckpt_view *v)
{
    const struct ckpt_dtypes dtypes = ckpt_view_dtypes(v);

    for (size_t i = 0; i < v->cat->tensors.len; i++) {
        struct ckpt_tensor *t = &v->cat->tensors.ptr[i];
        t->wanted = (uint8_t)(ckpt_dtypes_wanted(&dtypes, t) + 1);
    }
}

static int no_recipe(const struct ckpt_view *v, const struct ckpt_writer *writer,
                     struct ckpt_err *err)
{
    const char *type = ckpt_json_str(v->config, "model_type");

    if (!v->config)
        return ckpt_fail(
            err, CKPT_MISSING,
            "view=%s needs a config.json that says which model it is; give one with base=DIR",
            writer->name);
    return ckpt_fail(err, CKPT_UNSUPPORTED, "view=%s: no recipe makes a model of type '%s'",
                     writer->name, type ? type : "?");
}

void ckpt_view_keep_framework(struct ckpt_view *v, const struct ckpt_catalog *src)
{
    const struct ckpt_writer *writer = v->shared->opt->output.writer;
    const char *format = ckpt_json_str(src->about, "format");

    if (writer && writer->recipes && format && strcmp(writer->recipes, format) == 0 && src->config)
        v->framework = json_incref(src->config);
}

/* Warn of what nobody can read in the view again. With a base, what it lacks can be lent again. */
static int warn_of_lost_keys(struct ckpt_view *v, const struct ckpt_writer *writer,
                             const struct ckpt_model *made, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str lost = {0};

    if (v->shared->base || writer->bare)
        return 0;
    if (ckpt_recipe_lost(v->shared->recipes, made, v->config, writer->recipes, &lost, err) < 0)
        return -1;
    if (lost.len)
        ckpt_catalog_warn(made->catalog,
                          "view=%s does not keep these keys of config.json: %s (base=DIR lends "
                          "them to whoever reads it as a Hugging Face model again)",
                          writer->name, ckpt_str_get(&lost));
    return 0;
}

static void warn_of_no_config(struct ckpt_view *v, const struct ckpt_writer *writer)
{
    if (writer && writer->bare && v->config && !v->shared->base)
        ckpt_catalog_warn(v->cat,
                          "view=%s keeps nothing of config.json: whoever reads it as a Hugging "
                          "Face model again needs base=DIR",
                          writer->name);
}

static int apply_backwards(struct ckpt_view *v, const struct ckpt_writer *writer,
                           const struct ckpt_recipe_options *opt, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    bool done = false;

    if (v->config && ckpt_recipe_fits(v->shared->recipes, v->cat, opt, &done, err) < 0)
        return -1;
    if (!done)
        return no_recipe(v, writer, err);
    note_dtypes(v);
    if (ckpt_recipe_apply(v->shared->recipes, v->cat, opt, &model, err) < 0)
        return ckpt_err_in(err, "view=%s", writer->name);
    if (warn_of_lost_keys(v, writer, model, err) < 0)
        return -1;
    ckpt_catalog_free(v->cat);
    v->cat = ckpt_steal(&model->catalog);
    json_decref(v->framework);
    v->framework = ckpt_steal(&model->made);
    return ckpt_view_add_warnings(v->warnings, v->cat->warnings) < 0 ? ckpt_nomem(err) : 0;
}

/* Rows of the vocabulary are a multiple of this: as an option says, else the checkpoint that is
 * read, if it is the same framework's. */
static uint64_t vocab_multiple(const struct ckpt_view *v, const struct ckpt_output *o)
{
    uint64_t own;

    if (o->cut[CKPT_CUT_VOCAB])
        return o->cut[CKPT_CUT_VOCAB];
    if (ckpt_json_u64(v->framework, ckpt_output_keys[CKPT_CUT_VOCAB], &own) && own &&
        own <= CKPT_CUT_MOST)
        return own;
    return o->writer && o->writer->vocab_multiple ? o->writer->vocab_multiple : 1;
}

static bool says_quantized(const json_t *config)
{
    return json_object_get(config, "quantization_config") ||
           json_object_get(json_object_get(config, "text_config"), "quantization_config");
}

/* Values that are computed have the hub's names: of the framework's tensors, which are parts of
 * several of them, they are not made. A mount of one view, and a view of that mount, is as good. */
static int check_values(const struct ckpt_view *v, const char *view, struct ckpt_err *err)
{
    if (v->shared->opt->lora == CKPT_LORA_MERGE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "view=%s is not made of a merged adapter in one step: mount or export "
                         "lora=merge, and give the result as the run for view=%s",
                         view, view);
    if (v->facts.is_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is a LoRA adapter, which view=%s has no place for: mount or export "
                         "the merged model (lora=merge, with base=), and give that as the run",
                         ckpt_dir_path(v->dir), view);
    if (says_quantized(v->config) && ckpt_is_quantized(v->cat))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the weights of '%s' are quantised, which view=%s has no place for: mount "
                         "or export it with the option dequantize, and give the result as the run",
                         ckpt_dir_path(v->dir), view);
    return 0;
}

int ckpt_view_convert_to_output(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_output *o = &s->opt->output;
    const struct ckpt_recipe_output output = {.view = o->writer ? o->writer->name : NULL,
                                              .tp = ckpt_output_parts(o, CKPT_CUT_TP),
                                              .pp = ckpt_output_parts(o, CKPT_CUT_PP),
                                              .pad_to = vocab_multiple(v, o) *
                                                        ckpt_output_parts(o, CKPT_CUT_TP),
                                              .config = v->framework};
    const struct ckpt_recipe_options convert = {.format = o->writer ? o->writer->recipes : NULL,
                                                .base_config = v->config,
                                                .back = true,
                                                .output = &output,
                                                .allow_leftover = s->opt->allow_leftover};

    warn_of_no_config(v, o->writer);
    if (!convert.format)
        return 0;
    if (ckpt_recipes_forced(s->recipes))
        return ckpt_fail(err, CKPT_USAGE,
                         "option recipe: view=%s needs the recipes of both directions: give a "
                         "directory of recipes instead of one file",
                         o->writer->name);
    if (check_values(v, o->writer->name, err) < 0)
        return -1;
    return apply_backwards(v, o->writer, &convert, err);
}
