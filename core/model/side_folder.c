/* SPDX-License-Identifier: Apache-2.0 */
/* Which folders of a model directory belong to the model. */
#include "model/side_folder.h"

#include <fnmatch.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "format/trainer.h"

enum {
    MAX_DEPTH = 2,   /* routers of sentence-transformers nest their modules once */
    MAX_FILES = 128, /* a template for every tool, or pictures of a model card, are some dozens */
    MAX_MODULES_BYTES = 1024 * 1024, /* modules.json is a few lines */
};
/* A dense layer of sentence-transformers has some tens of MiB. A folder of more holds the whole
 * model once more, which would double an export. */
static const uint64_t max_bytes = (uint64_t)256 * 1024 * 1024;

static bool matches(const char *name, const char *const *patterns)
{
    for (; *patterns; patterns++)
        if (fnmatch(*patterns, name, 0) == 0)
            return true;
    return false;
}

bool ckpt_side_is_of_tools(const char *name)
{
    /* hidden folders, logs, caches */
    static const char *const patterns[] = {".*",     "runs",        "logs",           "wandb",
                                           "mlruns", "tensorboard", "lightning_logs", "__pycache__",
                                           NULL};

    return matches(name, patterns) || ckpt_trainers_is_step_name(name) ||
           ckpt_reader_is_staging(name);
}

/* Is it the whole model, as another program than transformers reads it? */
static bool is_other_model(const char *name)
{
    static const char *const patterns[] = {"*.onnx",         "*.gguf", "*.h5",
                                           "*.msgpack",      "*.ckpt", "openvino_model*",
                                           "consolidated.*", NULL};

    return matches(name, patterns);
}

/* Why a folder with a checkpoint in it is left out (ckpt_side_folder.why). A module of
 * sentence-transformers has weights and a config.json, too, which names no model. */
static const char *why_own(struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;
    struct ckpt_err err = {0};
    const struct ckpt_reader *reader = ckpt_reader_probe(dir, &err);

    if (!reader && err.code != CKPT_CONFLICT)
        return NULL;
    (void)ckpt_config_read_if(dir, "config.json", CKPT_CONFIG_MAX_BYTES, &config, NULL);
    const bool is_model =
        ckpt_json_str(config, "model_type") || json_object_get(config, "architectures");
    if (config && !is_model)
        return NULL;
    if (is_model)
        return "a model of its own";
    if (!reader || !reader->is_published)
        return "";
    return ckpt_dir_has_file(dir, "adapter_config.json") ? "an adapter of its own" : NULL;
}

struct walk {
    struct ckpt_dir *top;
    bool is_module;
    uint64_t nbytes;
    struct ckpt_side_folder *ret;
};

static int add_entry(struct walk *w, const char *path, const struct ckpt_entry *e,
                     struct ckpt_err *err)
{
    struct ckpt_side_entry entry = {.leads_nowhere = e->kind != CKPT_ENTRY_FILE};
    struct ckpt_dir_found found;

    if (!entry.leads_nowhere && ckpt_dir_look(w->top, path, &found, NULL) == 0)
        w->nbytes += ckpt_min_u64(found.extent.len, max_bytes + 1);
    if ((entry.path = strdup(path)) && ckpt_vec_push(&w->ret->files, entry) == 0)
        return 0;
    free(entry.path);
    return ckpt_nomem(err);
}

/* Why a file, which was added, leaves its folder out. */
static const char *why_file(const struct walk *w, const char *name)
{
    if (w->ret->files.len > MAX_FILES)
        return "more than 128 files";
    if (w->is_module)
        return NULL;
    return ckpt_reader_is_state_file(name) ? ""
           : is_other_model(name)          ? "the model for other programs"
           : w->nbytes > max_bytes         ? "more than 256 MiB"
                                           : NULL;
}

static int walk_folder(struct walk *w, const char *path, int depth, struct ckpt_err *err);

static int walk_entry(struct walk *w, const char *folder, const struct ckpt_entry *e, int depth,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s/%s", folder, e->name);
    const bool link = e->is_link && e->kind == CKPT_ENTRY_OTHER;

    if (!path)
        return ckpt_nomem(err);
    if (e->kind == CKPT_ENTRY_DIR)
        return ckpt_side_is_of_tools(e->name) ? 0 : walk_folder(w, path, depth + 1, err);
    if (e->name[0] == '.' || !(link || e->kind == CKPT_ENTRY_FILE))
        return 0;
    if (add_entry(w, path, e, err) < 0)
        return -1;
    w->ret->why = why_file(w, e->name);
    return 0;
}

static int walk_folder(struct walk *w, const char *path, int depth, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_err own = {0};
    struct ckpt_entry e;

    if (depth > MAX_DEPTH) {
        w->ret->why = "more than two folders deep";
        return 0;
    }
    if (ckpt_dir_open_below(w->top, path, &dir, &own) < 0 ||
        ckpt_entries_read(dir, &entries, &own) < 0) {
        if (own.code != CKPT_IO || w->is_module)
            return ckpt_err_move(err, &own);
        w->ret->why = "unreadable"; /* such as lost+found */
        return 0;
    }
    if (!w->is_module)
        w->ret->why = why_own(dir);
    while (!w->ret->why && ckpt_entries_next(&entries, &e))
        if (walk_entry(w, path, &e, depth, err) < 0)
            return -1;
    return 0;
}

int ckpt_side_folder_read(struct ckpt_dir *dir, const char *name, bool is_module,
                          struct ckpt_side_folder *ret, struct ckpt_err *err)
{
    struct walk w = {.top = dir, .is_module = is_module, .ret = ret};

    return walk_folder(&w, name, 1, err);
}

void ckpt_side_folder_release(struct ckpt_side_folder *folder)
{
    for (size_t i = 0; i < folder->files.len; i++)
        free(folder->files.ptr[i].path);
    ckpt_vec_release(&folder->files);
}

json_t *ckpt_side_modules(const struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    json_t *modules = NULL;
    size_t len;

    if (ckpt_dir_has_file(dir, "modules.json") &&
        ckpt_dir_read_file(dir, "modules.json", MAX_MODULES_BYTES, &text, &len, NULL) == 0)
        (void)ckpt_json_parse(text, len, "modules.json", &modules, NULL);
    return modules;
}

bool ckpt_side_is_module(const json_t *modules, const char *name)
{
    const size_t len = strlen(name);
    const json_t *module;
    size_t i;

    json_array_foreach(modules, i, module) {
        const char *path = ckpt_json_str(module, "path");
        if (path && strncmp(path, name, len) == 0 && (path[len] == '\0' || path[len] == '/'))
            return true;
    }
    return false;
}
