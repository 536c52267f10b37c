/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a view's files: a Hugging Face model directory, or what a writer makes. */
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"
#include "container/st_metadata.h"
#include "format/writer.h"
#include "model/opening.h"
#include "model/side_folder.h"
#include "recipe/library/types.h"

static int64_t newest_shard(const struct ckpt_catalog *cat)
{
    int64_t newest = 0;

    for (size_t i = 0; i < cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(cat->sources.ptr[i], &id) && id.mtime_ns > newest)
            newest = id.mtime_ns;
    }
    return newest;
}

/* ---- config.json ---- */

/* Do the tensors have the dtype that the base's config states? A config without a dtype means
 * float32. */
static bool has_base_dtype(const struct ckpt_opening *o)
{
    const json_t *config = ckpt_opening_base_config(o);
    const char *says = ckpt_config_dtype(config), *is = ckpt_main_dtype(o->cat, false);

    if (config && !ckpt_config_is_model(config)) /* another library's says none */
        return true;
    return is && strcmp(says ? says : "float32", is) == 0;
}

/* Does the base's config describe the model that a recipe made? */
static bool fits_base_config(const struct ckpt_opening *o)
{
    return o->decision.config == CKPT_CONFIG_PASS_IF_DTYPE && has_base_dtype(o);
}

static bool passes_config(const struct ckpt_opening *o)
{
    const enum ckpt_config_rule rule = o->decision.config;

    return !o->config_changed &&
           (rule == CKPT_CONFIG_PASS || (rule == CKPT_CONFIG_PASS_UNLESS_CAST && !o->cast) ||
            (rule == CKPT_CONFIG_PASS_IF_DTYPE && has_base_dtype(o)));
}

/* ---- generation_config.json: transformers' GenerationConfig.from_model_config ---- */

/* Copy those fields that `from` says (not null) and the result does not say yet. */
static void take_fields(json_t **g, const struct ckpt_texts *fields, const json_t *from)
{
    for (size_t i = 0; i < fields->n; i++) {
        const json_t *v = json_object_get(from, fields->text[i]);
        if (v && !json_is_null(v) && !json_object_get(*g, fields->text[i]))
            ckpt_json_set(g, fields->text[i], json_deep_copy(v));
    }
}

/* The decoder's config of a composite model, or NULL. */
static const json_t *text_config(const json_t *config, const char *decoder)
{
    static const char *const names[] = {"decoder", "generator", "text_config"};

    if (decoder)
        return json_object_get(config, decoder);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (json_object_size(json_object_get(config, names[i])) > 0)
            return json_object_get(config, names[i]);
    return NULL;
}

/* Add what a config class has although config.json may leave it out. */
static void add_defaults(json_t **g, bool no_use_cache)
{
    static const char *const outputs[] = {"output_attentions", "output_hidden_states",
                                          "output_scores", "output_logits"};
    bool any = false;

    for (size_t i = 0; i < 4; i++) {
        if (i < 2 && !json_object_get(*g, outputs[i]))
            ckpt_json_set(g, outputs[i], json_false());
        any |= ckpt_json_bool(*g, outputs[i], false);
    }
    if (!no_use_cache && !json_object_get(*g, "use_cache"))
        ckpt_json_set(g, "use_cache", json_true());
    if (any)
        ckpt_json_set(g, "return_dict_in_generate", json_true());
}

int ckpt_generation_config(const json_t *config, const struct ckpt_type *type, json_t **ret,
                           struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *g = json_object();
    const char *version = ckpt_json_str(config, "transformers_version");

    ckpt_json_set(&g, "_from_model_config", json_true());
    take_fields(&g, &type->generation, config);
    take_fields(&g, &type->generation, text_config(config, type->decoder_config));
    add_defaults(&g, type->no_use_cache);
    if (version)
        ckpt_json_set(&g, "transformers_version", json_string(version));
    if (!g)
        return ckpt_nomem(err);
    *ret = ckpt_steal(&g);
    return 0;
}

/* ---- files that the view shows unchanged: tokenizer, processor, remote code ... ---- */

struct sides {
    struct ckpt_opening *o;
    CKPT_VEC(struct ckpt_side_file) files; /* each path is owned, each source referenced */
    int64_t mtime_ns;                      /* time of the newest file */
    size_t nlink;            /* files left out because they are links that lead nowhere, or out */
    char *dangling;          /* the first that leads nowhere; or NULL */
    struct ckpt_err leaving; /* of the first that leads out; or empty */
    size_t nfolder;          /* folders that were looked into */
    size_t nleft;            /* folders that are left out, and are worth a note */
    struct ckpt_str left;    /* a list of the first of them, and why */
};

enum {
    NAMED = 8,    /* so many files or folders are named in a message */
    FOLDERS = 64, /* so many folders are looked into: a model has a few, each costs a listing */
};

/* Which files of a directory to add: those that belong to a model but are not its weights. */
enum side_rule {
    SIDE_TOKENIZER, /* files that save_pretrained of transformers' tokenizers and processors writes,
                       with its folder of templates, generation_config.json, *.py */
    SIDE_ALL,       /* all files except weights, their indices and hidden files, and small folders
                       (model/side_folder.h): for a model directory that is shown as itself */
};

/* The folder in which tokenizers have their other chat templates. */
#define TEMPLATES "additional_chat_templates"

static bool matches(const char *name, const struct ckpt_texts *patterns)
{
    for (size_t i = 0; i < patterns->n; i++)
        if (fnmatch(patterns->text[i], name, 0) == 0)
            return true;
    return false;
}

static bool wanted(const struct ckpt_opening *o, const char *name, enum side_rule rule)
{
    const struct ckpt_type *type = ckpt_opening_type(o);

    if (name[0] == '.')
        return false;
    return rule == SIDE_TOKENIZER ? matches(name, &type->tokenizer_files)
                                  : !matches(name, &type->weight_files);
}

static void side_release(struct ckpt_side_file *f)
{
    free((char *)f->path);
    ckpt_source_unref(f->source);
}

static void sides_release(struct sides *s)
{
    for (size_t i = 0; i < s->files.len; i++)
        side_release(&s->files.ptr[i]);
    ckpt_vec_release(&s->files);
    free(s->dangling);
    ckpt_str_release(&s->left);
}

static struct ckpt_side_file *sides_find(const struct sides *s, const char *path)
{
    for (size_t i = 0; i < s->files.len; i++)
        if (strcmp(s->files.ptr[i].path, path) == 0)
            return &s->files.ptr[i];
    return NULL;
}

/* Remove a file from the list, if it is there. */
static void sides_remove(struct sides *s, const char *path)
{
    struct ckpt_side_file *file = sides_find(s, path);

    if (!file)
        return;
    side_release(file);
    *file = s->files.ptr[--s->files.len];
}

static int add_file(struct sides *s, struct ckpt_dir *dir, const char *name, struct ckpt_err *err)
{
    struct ckpt_side_file file = {0};
    struct ckpt_file_id id;

    if (sides_find(s, name))
        return 0;
    if (ckpt_source_file_new(dir, name, s->o->shared->pool, &file.source, err) < 0)
        return -1;
    if (ckpt_source_file_id(file.source, &id) && id.mtime_ns > s->mtime_ns)
        s->mtime_ns = id.mtime_ns;
    if (!(file.path = strdup(name)) || ckpt_vec_push(&s->files, file) < 0) {
        side_release(&file);
        return ckpt_nomem(err);
    }
    return 0;
}

/* Note a link that is left out. */
static int note_link(struct sides *s, const struct ckpt_dir *dir, const char *name,
                     struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    struct ckpt_dir_found found;

    s->nlink++;
    if (ckpt_dir_look(dir, name, &found, &why) < 0 && why.code == CKPT_UNSUPPORTED) {
        (void)ckpt_err_move(&s->leaving, &why);
        return 0;
    }
    return s->dangling || (s->dangling = strdup(name)) ? 0 : ckpt_nomem(err);
}

/* Is it a file of weights of this model, as far as the catalogue was read from it? */
static bool is_read(const struct ckpt_opening *o, const struct ckpt_dir *dir, const char *name)
{
    struct ckpt_dir_found found;

    if (ckpt_dir_look(dir, name, &found, NULL) < 0)
        return false;
    for (size_t i = 0; i < o->cat->sources.len; i++)
        if (ckpt_source_is_file(o->cat->sources.ptr[i], &found))
            return true;
    return false;
}

/* Are there files of this folder already? */
static bool has_folder(const struct sides *s, const char *name)
{
    const size_t len = strlen(name);

    for (size_t i = 0; i < s->files.len; i++)
        if (strncmp(s->files.ptr[i].path, name, len) == 0 && s->files.ptr[i].path[len] == '/')
            return true;
    return false;
}

/* Add a file of a side folder, if it is no shard of the model. One that cannot be read is left out
 * with a warning, unless it belongs to a module. */
static int add_file_of_folder(struct sides *s, struct ckpt_dir *dir,
                              const struct ckpt_side_entry *e, bool is_module, struct ckpt_err *err)
{
    const struct ckpt_texts *weights = &ckpt_opening_type(s->o)->weight_files;
    struct ckpt_err own = {0};

    if (e->leads_nowhere)
        return note_link(s, dir, e->path, err);
    if ((matches(strrchr(e->path, '/') + 1, weights) && is_read(s->o, dir, e->path)) ||
        add_file(s, dir, e->path, &own) == 0)
        return 0;
    if (own.code != CKPT_IO || is_module)
        return ckpt_err_move(err, &own);
    ckpt_catalog_warn(s->o->cat, "left out: %s", own.text);
    return 0;
}

/* Keep the name of a folder that is left out, for the note. */
static int note_folder(struct sides *s, const char *name, const char *why, struct ckpt_err *err)
{
    if (*why && s->nleft++ < NAMED)
        ckpt_str_printf(&s->left, "%s'%s' (%s)", s->left.len ? ", " : "", name, why);
    return s->left.failed ? ckpt_nomem(err) : 0;
}

/* Add the files of a side folder, unless a directory that goes before this one has something of its
 * name, too. */
static int add_folder(struct sides *s, struct ckpt_dir *dir, const char *name,
                      const json_t *modules, struct ckpt_err *err)
{
    const bool is_module = ckpt_side_is_module(modules, name);
    ckpt_cleanup(ckpt_side_folder_release) struct ckpt_side_folder folder = {0};

    if (has_folder(s, name) || sides_find(s, name) || (!is_module && ckpt_side_is_of_tools(name)))
        return 0;
    if (s->nfolder++ >= FOLDERS && !is_module)
        return note_folder(s, name, "more than 64 folders", err);
    if (ckpt_side_folder_read(dir, name, is_module, &folder, err) < 0)
        return -1;
    if (folder.why)
        return note_folder(s, name, folder.why, err);
    for (size_t i = 0; i < folder.files.len; i++)
        if (add_file_of_folder(s, dir, &folder.files.ptr[i], is_module, err) < 0)
            return -1;
    return 0;
}

/* Add the files of a folder that the rule wants. */
static int add_wanted(struct sides *s, struct ckpt_dir *dir, enum side_rule rule,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *modules =
        rule == SIDE_ALL ? ckpt_side_modules(dir) : NULL;
    struct ckpt_entry e;

    if (ckpt_entries_read(dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e)) {
        const bool link = e.is_link && e.kind == CKPT_ENTRY_OTHER;
        if (e.kind == CKPT_ENTRY_DIR && (rule == SIDE_ALL || strcmp(e.name, TEMPLATES) == 0) &&
            add_folder(s, dir, e.name, modules, err) < 0)
            return -1;
        if ((link || e.kind == CKPT_ENTRY_FILE) && wanted(s->o, e.name, rule) &&
            (link ? note_link(s, dir, e.name, err) : add_file(s, dir, e.name, err)) < 0)
            return -1;
    }
    return 0;
}

/* Does a file hold weights that are neither the model's (or the adapter's), nor the same in another
 * container, nor a trainer's own state: a projector, a head? */
static bool is_more_weights(const char *name, bool adapter)
{
    static const char *const same[] = {"pytorch_model", "diffusion_pytorch_model", "consolidated",
                                       "adapter_model"};
    static const char *const ends[] = {".safetensors", ".bin", ".pt", ".pth"};
    bool is = false;

    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        is |= ckpt_has_suffix(name, ends[i]);
    for (size_t i = adapter ? 3 : 0; i < sizeof same / sizeof *same; i++)
        is &= !ckpt_has_prefix(name, same[i]);
    return is && name[0] != '.' && !ckpt_reader_is_state(name);
}

/* Warn about weights beside a model, or an adapter, which are neither shown nor merged. */
static int warn_beside(struct sides *s, const char *below, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    struct ckpt_opening *o = s->o;
    const bool adapter = o->facts.is_adapter || o->decision.merge_files;
    struct ckpt_entry e;
    size_t n = 0;

    if (*below && ckpt_dir_open_below(o->dir, below, &sub, err) < 0)
        return -1;
    if (ckpt_entries_read(sub ? sub : o->dir, &entries, err) < 0)
        return -1;
    while (ckpt_entries_next(&entries, &e))
        if (e.kind == CKPT_ENTRY_FILE && is_more_weights(e.name, adapter) &&
            !is_read(o, sub ? sub : o->dir, e.name) && n++ < NAMED)
            ckpt_str_printf(&names, "%s'%s'", names.len ? ", " : "", e.name);
    if (n > NAMED)
        ckpt_str_printf(&names, " and %zu more", n - NAMED);
    if (names.failed)
        return ckpt_nomem(err);
    if (n)
        ckpt_catalog_warn(o->cat, "left out: weights beside the %s that are not the %s's: %s%s",
                          adapter ? "adapter" : "model", adapter ? "adapter" : "model",
                          ckpt_str_get(&names),
                          o->decision.merge_files ? "; they are not merged" : "");
    return 0;
}

#define ADAPTER_CONFIG "adapter_config.json"

/* Leave out the config of an adapter beside a model: transformers would load the base that it names
 * in place of the model. */
static void leave_adapter_out(struct sides *s)
{
    if (s->o->facts.is_adapter || !sides_find(s, ADAPTER_CONFIG))
        return;
    sides_remove(s, ADAPTER_CONFIG);
    ckpt_catalog_warn(s->o->cat, "left out: '" ADAPTER_CONFIG
                                 "' of an adapter beside the model; transformers would load the "
                                 "base that it names in the model's place");
}

/* Add the files of subdirectory `below` ("" for dir itself), except names that were added before;
 * or, if there is a name, that one of them, if it exists. */
static int add_from(struct sides *s, struct ckpt_dir *dir, const char *below, const char *name,
                    enum side_rule rule, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;

    if (*below && !ckpt_dir_has_dir(dir, below))
        return 0;
    if (*below && ckpt_dir_open_below(dir, below, &sub, err) < 0)
        return -1;
    dir = sub ? sub : dir;
    if (!name)
        return add_wanted(s, dir, rule, err);
    return ckpt_dir_has_file(dir, name) ? add_file(s, dir, name, err) : 0;
}

/* Add the tokenizer of the base and of the model's home. */
static int add_tokenizer(struct sides *s, struct ckpt_err *err)
{
    const struct ckpt_base *base = s->o->shared->base;
    struct ckpt_dir *const dirs[] = {base ? base->dir : NULL, s->o->home.dir};

    for (size_t i = 0; i < 2; i++)
        if (dirs[i] && add_from(s, dirs[i], "", NULL, SIDE_TOKENIZER, err) < 0)
            return -1;
    return 0;
}

static void warn_links(const struct sides *s)
{
    if (s->leaving.code != CKPT_OK)
        ckpt_catalog_warn(s->o->cat, "left out: %zu side files that are links: %s", s->nlink,
                          s->leaving.text);
    else if (s->nlink)
        ckpt_catalog_warn(s->o->cat,
                          "left out: %zu side files that are links to files that are not there "
                          "('%s' first)",
                          s->nlink, s->dangling);
}

static int collect_sides(struct sides *s, struct ckpt_err *err)
{
    struct ckpt_opening *o = s->o;
    const struct ckpt_decision *d = &o->decision;
    const struct ckpt_base *base = o->shared->base;
    const enum side_rule rule = o->facts.files >= CKPT_FILES_ALL ? SIDE_ALL : SIDE_TOKENIZER;
    const bool adapter = o->facts.is_adapter && !o->shared->opt->raw;
    const char *config = adapter ? ADAPTER_CONFIG : "config.json", *at = o->facts.files_at;

    if ((o->facts.is_adapter || d->merge_files ? o->facts.files == CKPT_FILES_COMPLETE
                                               : o->facts.is_hub_dir) &&
        warn_beside(s, at, err) < 0)
        return -1;
    if (d->merge_files) /* the base's files, but the adapter's tokenizer instead of the base's */
        return add_from(s, o->dir, ckpt_merge_folder(o), NULL, SIDE_TOKENIZER, err) < 0
                   ? -1
                   : add_from(s, base->dir, "", NULL, SIDE_ALL, err);
    if (d->own_files && add_from(s, o->dir, at, NULL, rule, err) < 0)
        return -1;
    for (const char *const *tool = o->reader->tools; tool && *tool; tool++)
        sides_remove(s, *tool);
    leave_adapter_out(s);
    if ((d->own_config && add_from(s, o->dir, at, "config.json", SIDE_ALL, err) < 0) ||
        (d->base_files && add_tokenizer(s, err) < 0) ||
        (d->own_adapter_config && add_from(s, o->dir, at, config, SIDE_ALL, err) < 0))
        return -1;
    if (d->base_files && (d->base_config || fits_base_config(o)) &&
        add_from(s, o->home.dir ? o->home.dir : base->dir, "", config, SIDE_ALL, err) < 0)
        return -1;
    if (adapter && !sides_find(s, config) && !o->facts.adapter_config)
        ckpt_catalog_warn(o->cat, "the adapter has no %s; give one with base=DIR", config);
    return 0;
}

/* ---- weights ---- */

/* Choose the weight map; *ret is a reference, or NULL. */
static int choose_weight_map(const struct ckpt_opening *o, struct ckpt_weight_map **ret,
                             struct ckpt_err *err)
{
    const struct ckpt_naming naming = ckpt_naming_of(ckpt_recipes_types(o->shared->recipes));
    const struct ckpt_base *base = o->shared->base;

    if (o->decision.split == CKPT_SPLIT_LIKE_BASE)
        return o->facts.split_as_base(
            o->cat, &(struct ckpt_split_base){base->cat, base->weight_map, o->base_names}, &naming,
            o->config, ret, err);
    *ret = ckpt_weight_map_ref(o->decision.split == CKPT_SPLIT_OWN ? o->facts.weight_map
                               : o->decision.split == CKPT_SPLIT_BASE
                                   ? (struct ckpt_weight_map *)ckpt_base_map(base)
                                   : NULL);
    return 0;
}

static bool sorts_names(const struct ckpt_opening *o)
{
    const enum ckpt_order order = o->decision.order;

    return !o->ordered && (order == CKPT_ORDER_NAMES ||
                           (order == CKPT_ORDER_FRESH && ckpt_opening_type(o)->converted));
}

/* Is a directory of Hugging Face's shown as it is? Then its files keep their order of tensors,
 * which is the catalogue's. */
static bool keeps_order(const struct ckpt_opening *o)
{
    const struct ckpt_decision *d = &o->decision;

    return o->facts.is_hub_dir && !o->renamed && !o->cast && !o->adapter && !o->ordered &&
           d->convert == CKPT_CONVERT_NOT && d->split == CKPT_SPLIT_OWN && !d->dequantize;
}

/* The name of the index, by which other libraries call their files, too: the checkpoint's own, else
 * the base's. */
static const char *index_name(const struct ckpt_opening *o)
{
    const struct ckpt_base *base = o->shared->base;

    if (o->facts.index_name || !base || o->shared->opt->raw || o->facts.is_adapter)
        return o->facts.index_name;
    return base->facts.index_name;
}

/* With a base that has weights, the view has a generation_config.json if the base has one. */
static bool writes_generation(const struct ckpt_opening *o)
{
    const struct ckpt_base *base = o->shared->base;

    return o->config && o->decision.write_generation &&
           !(o->decision.way == CKPT_WAY_MEMORY && base && base->cat);
}

/* The number of elements in buffers, which num_parameters() of transformers does not count, and so
 * the total_parameters of an index does not either. */
static uint64_t buffer_numel(const struct ckpt_opening *o)
{
    const struct ckpt_texts *ends = &ckpt_opening_type(o)->buffers;
    uint64_t n = 0;

    for (size_t i = 0; i < o->cat->tensors.len; i++)
        if (ckpt_texts_end(ends, o->cat->tensors.ptr[i].name))
            n += o->cat->tensors.ptr[i]
                     .numel; /* cannot overflow: the tree refuses more than 2^63 bytes */
    return n;
}

/* ---- other formats ---- */

/* Get the step that the checkpoint says, or the number in which its folder's name ends:
 * "step-20". */
static uint64_t step_of(const struct ckpt_opening *o)
{
    const size_t len = strlen(o->name);
    unsigned long long n;
    uint64_t step;
    size_t at = len;

    if (ckpt_json_u64(o->cat->about, "step", &step))
        return step;
    while (at > 0 && o->name[at - 1] >= '0' && o->name[at - 1] <= '9')
        at--;
    if (o->facts.is_hub_dir || (at > 0 && !strchr("-_", o->name[at - 1])) ||
        !ckpt_parse_u64(o->name + at, len - at, &n))
        return 0;
    return n;
}

static int write_files(struct ckpt_opening *o, const struct ckpt_vtree_options *model,
                       struct ckpt_err *err)
{
    const struct ckpt_output *output = &o->shared->opt->output;
    const size_t bytes = (o->cat->tensors.len + 1) * sizeof(struct ckpt_vplace);
    ckpt_cleanup(ckpt_vfiles_release) struct ckpt_vfiles files = {0};
    struct ckpt_writing w = {.cat = o->cat,
                             .output = output,
                             .config = o->framework,
                             .about = o->cat->about,
                             .groups = o->groups,
                             .model = model,
                             .files = &files};

    if (!(w.step = step_of(o)))
        w.step = o->taken;
    if (!(w.place = ckpt_arena_alloc(&files.arena, bytes)))
        return ckpt_nomem(err);
    memset(w.place, 0, bytes);
    if (output->writer->write(&w, err) < 0)
        return ckpt_err_in(err, "view=%s", output->writer->name);
    return ckpt_vtree_of_files(o->cat, &files, w.place, model->mtime_ns, &o->tree, err);
}

/* ---- __metadata__ ---- */

/* Warns of entries that the view lacks, because the run's files disagree on them. */
static void warn_differing(const struct ckpt_opening *o, const json_t *keys)
{
    const size_t n = json_array_size(keys);

    if (n)
        ckpt_catalog_warn(
            o->cat,
            "left out: %zu entries of __metadata__ on which the files that are joined "
            "or split anew disagree ('%s' first)",
            n, json_string_value(json_array_get(keys, 0)));
}

/* ---- all of it ---- */

int ckpt_opening_lay_out(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(sides_release) struct sides sides = {.o = o};
    ckpt_cleanup(ckpt_json_decrefp) json_t *generation = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *joined = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *differ = NULL;
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *map = NULL;
    struct ckpt_vtree_options opt = {
        .index_name = index_name(o),
        .bare = o->decision.bare_header,
        .metadata = o->decision.split == CKPT_SPLIT_OWN ? o->facts.metadata : NULL,
        .max_shard_size = o->shared->opt->max_shard_size,
        .sort = sorts_names(o),
        .keep_order = keeps_order(o),
        .buffer_numel = buffer_numel(o),
        .mtime_ns = newest_shard(o->cat),
    };

    if (collect_sides(&sides, err) < 0 || choose_weight_map(o, &map, err) < 0 ||
        ckpt_st_metadata_join(o->facts.metadata, &joined, &differ, err) < 0)
        return -1;
    warn_links(&sides);
    if (sides.nleft > NAMED)
        ckpt_str_printf(&sides.left, " and %zu more", sides.nleft - NAMED);
    if (sides.nleft)
        ckpt_catalog_note(o->cat, "left out: folders beside the model: %s",
                          ckpt_str_get(&sides.left));
    opt.weight_map = map;
    opt.joined = joined;
    if (o->config && !passes_config(o)) {
        opt.config = o->config;
        sides_remove(&sides, "config.json");
    }
    if (writes_generation(o) && !sides_find(&sides, "generation_config.json")) {
        if (ckpt_generation_config(o->config, ckpt_opening_type(o), &generation, err) < 0)
            return -1;
        opt.generation = generation;
    }
    if (o->facts.is_adapter && !o->shared->opt->raw && !sides_find(&sides, "adapter_config.json"))
        opt.adapter = o->facts.adapter_config;
    opt.side = sides.files.ptr;
    opt.nside = sides.files.len;
    if (sides.mtime_ns > opt.mtime_ns)
        opt.mtime_ns = sides.mtime_ns;
    if (o->shared->opt->output.writer)
        return write_files(o, &opt, err);
    if (ckpt_vtree_new(o->cat, &opt, &o->tree, err) < 0)
        return -1;
    if (ckpt_vtree_joins(o->tree))
        warn_differing(o, differ);
    return 0;
}
