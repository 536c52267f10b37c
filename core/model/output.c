/* SPDX-License-Identifier: Apache-2.0 */
/* Bringing a view's model to the names of the framework whose checkpoint the view is. */
#include "model/opening.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/writer.h"
#include "model/dequantize.h"

bool ckpt_opening_has_output_names(const struct ckpt_opening *o)
{
    const struct ckpt_writer *writer = o->shared->opt->output.writer;

    return writer && writer->recipes;
}

/* Dtypes follow from the hub's names, which the tensors still have: note them. */
static void note_dtypes(struct ckpt_opening *o)
{
    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        t->wanted = (uint8_t)(ckpt_dtypes_wanted(o, t) + 1);
    }
}

static int no_recipe(const struct ckpt_opening *o, const struct ckpt_writer *writer,
                     struct ckpt_err *err)
{
    const char *type = ckpt_json_str(o->config, "model_type");

    if (!o->config)
        return ckpt_fail(
            err, CKPT_MISSING,
            "view=%s needs a config.json that says which model it is; give one with base=DIR",
            writer->name);
    return ckpt_fail(err, CKPT_UNSUPPORTED, "view=%s: no recipe makes a model of type '%s'",
                     writer->name, type ? type : "?");
}

void ckpt_opening_keep_framework(struct ckpt_opening *o)
{
    const struct ckpt_writer *writer = o->shared->opt->output.writer;
    const char *format = ckpt_json_str(o->cat->about, "format");

    if (writer && writer->recipes && format && strcmp(writer->recipes, format) == 0 &&
        o->cat->config)
        o->framework = json_incref(o->cat->config);
}

/* Warn of keys that whoever reads the view as a Hugging Face model will not find. A base has them.
 */
static int warn_of_lost_keys(struct ckpt_opening *o, const struct ckpt_writer *writer,
                             const struct ckpt_model *made, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str lost = {0};

    if (o->shared->base || writer->bare || writer->hub_files)
        return 0;
    if (ckpt_recipe_lost(o->shared->recipes, made, o->config, writer->recipes, &lost, err) < 0)
        return -1;
    if (lost.len)
        ckpt_catalog_warn(made->catalog,
                          "view=%s does not keep these keys of config.json: %s (base=DIR gives "
                          "them back when it is read as a Hugging Face model again)",
                          writer->name, ckpt_str_get(&lost));
    return 0;
}

static void note_no_config(struct ckpt_opening *o, const struct ckpt_writer *writer)
{
    if (writer->bare && o->config && !o->shared->base)
        ckpt_catalog_note(o->cat,
                          "view=%s has no place for config.json: to read it as a Hugging Face "
                          "model again, give base=DIR",
                          writer->name);
}

static int apply_backwards(struct ckpt_opening *o, const struct ckpt_writer *writer,
                           const struct ckpt_recipe_options *opt, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    bool done = false;

    if (o->config && ckpt_recipe_fits(o->shared->recipes, o->cat, opt, &done, err) < 0)
        return -1;
    if (!done)
        return no_recipe(o, writer, err);
    note_dtypes(o);
    if (ckpt_recipe_apply(o->shared->recipes, o->cat, opt, &model, err) < 0)
        return ckpt_err_in(err, "view=%s", writer->name);
    if (warn_of_lost_keys(o, writer, model, err) < 0)
        return -1;
    ckpt_catalog_free(o->cat);
    o->cat = ckpt_steal(&model->catalog);
    json_decref(o->framework);
    o->framework = ckpt_steal(&model->made);
    return 0;
}

/* Rows of the vocabulary on a rank (of all, where the format says so) are a multiple of this: as an
 * option says, else the checkpoint that is read, if it is the same framework's. */
static uint64_t vocab_multiple(const struct ckpt_opening *o)
{
    const struct ckpt_output *output = &o->shared->opt->output;
    uint64_t own;

    if (output->cut[CKPT_CUT_VOCAB])
        return output->cut[CKPT_CUT_VOCAB];
    if (ckpt_json_u64(o->framework, ckpt_output_keys[CKPT_CUT_VOCAB], &own) && own &&
        own <= CKPT_CUT_MOST)
        return own;
    return output->writer->vocab_multiple ? output->writer->vocab_multiple : 1;
}

static bool says_quantized(const json_t *config)
{
    return json_object_get(config, "quantization_config") ||
           json_object_get(json_object_get(config, "text_config"), "quantization_config");
}

/* Values that are computed have the hub's names: of the framework's tensors, which are parts of
 * several of them, they are not made. A mount of one view, and a view of that mount, is as good. */
static int check_values(const struct ckpt_opening *o, const char *view, struct ckpt_err *err)
{
    if (o->shared->opt->lora == CKPT_LORA_MERGE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "view=%s is not made of a merged adapter in one step: mount or export "
                         "lora=merge, and give the result as the run for view=%s",
                         view, view);
    if (o->facts.is_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is a LoRA adapter, which view=%s has no place for: mount or export "
                         "the merged model (lora=merge, with base=), and give that as the run",
                         ckpt_dir_path(o->dir), view);
    if (says_quantized(o->config) && ckpt_is_quantized(o->cat))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the weights of '%s' are quantised, which view=%s has no place for: mount "
                         "or export it with the option dequantize, and give the result as the run",
                         ckpt_dir_path(o->dir), view);
    return 0;
}

int ckpt_opening_to_output(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;
    const struct ckpt_writer *writer = s->opt->output.writer;

    if (!writer)
        return 0;
    note_no_config(o, writer);
    if (!writer->recipes)
        return 0;
    const uint64_t tp = ckpt_output_parts(&s->opt->output, CKPT_CUT_TP),
                   multiple = vocab_multiple(o) * (writer->vocab_whole ? 1 : tp);
    const struct ckpt_recipe_output output = {.view = writer->name,
                                              .tp = tp,
                                              .pp = ckpt_output_parts(&s->opt->output, CKPT_CUT_PP),
                                              .pad_to = multiple,
                                              .config = o->framework};
    const struct ckpt_recipe_options convert = {.format = writer->recipes,
                                                .base_config = o->config,
                                                .back = true,
                                                .output = &output,
                                                .allow_leftover = s->opt->allow_leftover};

    if (ckpt_recipes_forced(s->recipes))
        return ckpt_fail(err, CKPT_USAGE,
                         "option recipe: view=%s needs the recipes of both directions: give a "
                         "directory of recipes instead of one file",
                         writer->name);
    return check_values(o, writer->name, err) < 0 ? -1 : apply_backwards(o, writer, &convert, err);
}
