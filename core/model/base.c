/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and reading a base model. */
#include "model/base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/archive.h"
#include "container/config.h"
#include "format/reader.h"

enum { MAX_REF_BYTES = 256 };

void ckpt_base_free(struct ckpt_base *base)
{
    if (!base)
        return;
    ckpt_dir_unref(base->dir);
    json_decref(base->config);
    ckpt_weight_map_unref(base->weight_map);
    ckpt_catalog_free(base->cat);
    ckpt_facts_release(&base->facts);
    free(base);
}

/* The hub's cache directory, looked for in the same places and order as huggingface_hub does. */
static char *hub_cache(void)
{
    const char *cache = getenv("HF_HUB_CACHE"), *hf = getenv("HF_HOME");
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    if (cache)
        return strdup(cache);
    if (hf)
        return ckpt_asprintf("%s/hub", hf);
    if (xdg)
        return ckpt_asprintf("%s/huggingface/hub", xdg);
    return ckpt_asprintf("%s/.cache/huggingface/hub", home ? home : "");
}

/* Find <cache>/models--ORG--NAME/snapshots/REV, where REV is the content of refs/main. */
static int find_in_hub(const char *name, char **ret_path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *cache = hub_cache();
    ckpt_cleanup(ckpt_freep) char *model = NULL;
    ckpt_cleanup(ckpt_freep) char *rev = NULL;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    const char *slash = strchr(name, '/');
    size_t len;

    if (!cache)
        return ckpt_nomem(err);
    if (!slash || slash == name || !slash[1] || strchr(slash + 1, '/') || name[0] == '.')
        return ckpt_fail(err, CKPT_MISSING, "base '%s' is not a directory%s", name,
                         ckpt_path_advice(name));
    model = ckpt_asprintf("%s/models--%.*s--%s", cache, (int)(slash - name), name, slash + 1);
    if (!model)
        return ckpt_nomem(err);
    if (ckpt_dir_open(model, CKPT_LINKS_BENEATH, &dir, err) < 0 ||
        ckpt_dir_read_file(dir, "refs/main", MAX_REF_BYTES, &rev, &len, err) < 0)
        return ckpt_err_in(err, "base '%s' is neither a directory nor in the local hub cache",
                           name);
    rev[strcspn(rev, " \t\r\n")] = '\0';
    if (!*rev || strchr(rev, '/'))
        return ckpt_fail(err, CKPT_FORMAT, "'%s/refs/main' names no snapshot", model);
    *ret_path = ckpt_asprintf("%s/snapshots/%s", model, rev);
    return *ret_path ? 0 : ckpt_nomem(err);
}

/* Is it a directory, or an archive? */
static bool is_there(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && (S_ISDIR(st.st_mode) || S_ISREG(st.st_mode));
}

/* Does the base have no weights (deleted, or never downloaded)? Its index still tells the split. */
static bool has_no_weights(const struct ckpt_base *b)
{
    for (size_t i = 0; b->weight_map && i < b->weight_map->files.len; i++)
        if (ckpt_dir_has_file(b->dir, b->weight_map->files.ptr[i]))
            return false;
    return b->weight_map != NULL;
}

static bool has_single(const struct ckpt_base *b)
{
    return ckpt_dir_has_file(b->dir, "model.safetensors") ||
           ckpt_dir_has_file(b->dir, "diffusion_pytorch_model.safetensors");
}

static int read_weights(struct ckpt_base *b, struct ckpt_fdpool *pool, struct ckpt_err *err)
{
    static const char *const indices[] = {"model.safetensors.index.json",
                                          "diffusion_pytorch_model.safetensors.index.json"};
    struct ckpt_reader_options opt = {.pool = pool};

    if (ckpt_reader_hf.probe(b->dir) == CKPT_NOT_MINE)
        return 0;
    for (size_t i = 0; i < 2 && !b->weight_map && !has_single(b); i++)
        if (ckpt_dir_has_file(b->dir, indices[i]) &&
            ckpt_weight_map_read(b->dir, indices[i], &b->weight_map, err) < 0)
            return -1;
    if (has_no_weights(b))
        return 0;
    return ckpt_catalog_new(&b->cat, err) < 0
               ? -1
               : ckpt_reader_hf.load(b->dir, &opt, &b->facts, b->cat, err);
}

int ckpt_base_find(const char *name, char **ret_path, struct ckpt_err *err)
{
    if (!is_there(name) && !ckpt_is_bucket(name))
        return find_in_hub(name, ret_path, err);
    return (*ret_path = strdup(name)) ? 0 : ckpt_nomem(err);
}

int ckpt_base_open(const char *name, const struct ckpt_access *how, struct ckpt_fdpool *pool,
                   struct ckpt_base **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = NULL;
    struct ckpt_base *b = calloc(1, sizeof *b);
    int result;

    if (!b)
        return ckpt_nomem(err);
    result = ckpt_base_find(name, &path, err) < 0 ||
                     ckpt_archive_open(path, how, &b->dir, err) < 0 ||
                     ckpt_config_read_if(b->dir, "config.json", CKPT_CONFIG_MAX_BYTES, &b->config,
                                         err) < 0 ||
                     read_weights(b, pool, err) < 0
                 ? -1
                 : 0;
    if (result == 0 && !b->config && !b->cat && !ckpt_dir_has_file(b->dir, "adapter_config.json"))
        result =
            ckpt_fail(err, CKPT_MISSING, "base '%s' has neither config.json nor weights", path);
    if (result < 0) {
        ckpt_base_free(b);
        return -1;
    }
    *ret = b;
    return 0;
}
