/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a directory of data files, and listing the embedded ones. */
#include "recipe/library/files.h"

#include <string.h>

#include "base/json.h"
#include "base/str.h"
#include "io/dir.h"
#include "recipe/language/field.h"

enum { MAX_FILE = 4 << 20, MAX_FILES = 4096, MAX_TOTAL = 64 << 20 };

#define SUFFIX ".json"

/* Listing a given directory: its folders, and the files of one of them. */
struct given {
    struct ckpt_files *files;
    struct ckpt_dir *dir;
    const char *folder; /* NULL: the directory itself */
};

static int add_given(struct given *g, const char *entry, struct ckpt_err *err)
{
    struct ckpt_files *f = g->files;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_file file = {.given = true};

    if (f->list.len == MAX_FILES)
        return ckpt_fail(err, CKPT_LIMIT, "more than %d recipe files", MAX_FILES);
    if (ckpt_dir_read_file(g->dir, entry, MAX_FILE, &text, &file.len, err) < 0)
        return -1;
    if (f->arena.total > MAX_TOTAL)
        return ckpt_fail(err, CKPT_LIMIT, "the recipe files have more than %d bytes", MAX_TOTAL);
    file.name = ckpt_field_text(&f->arena, err, "%s/%.*s", g->folder,
                                (int)(strlen(entry) - strlen(SUFFIX)), entry);
    file.text = ckpt_arena_strndup(&f->arena, text, file.len);
    return !file.name || !file.text || ckpt_vec_push(&f->list, file) < 0 ? ckpt_nomem(err) : 0;
}

static int visit(void *ctx, const struct ckpt_entry *entry, struct ckpt_err *err)
{
    struct given *g = ctx;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *below = NULL;

    if (entry->name[0] == '.')
        return 0;
    if (g->folder)
        return entry->kind == CKPT_ENTRY_FILE && ckpt_has_suffix(entry->name, SUFFIX)
                   ? add_given(g, entry->name, err)
                   : 0;
    if (entry->kind != CKPT_ENTRY_DIR)
        return 0;
    if (ckpt_dir_open_below(g->dir, entry->name, &below, err) < 0)
        return -1;
    struct given inner = {g->files, below, entry->name};
    return ckpt_dir_list(below, visit, &inner, err);
}

static int load_given(struct ckpt_files *f, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct given g = {.files = f};

    if (ckpt_dir_open(path, CKPT_LINKS_ANY, &dir, err) < 0)
        return -1;
    g.dir = dir;
    if (ckpt_dir_list(dir, visit, &g, err) < 0)
        return -1;
    if (f->list.len == 0)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' holds no recipe: expected models/NAME.json, types/NAME.json and "
                         "FRAMEWORK/NAME.json below it, as in core/recipe/data",
                         path);
    return 0;
}

int ckpt_files_load(struct ckpt_files *f, const char *dir, struct ckpt_err *err)
{
    if (dir && load_given(f, dir, err) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_recipe_nblobs; i++) {
        const struct ckpt_recipe_blob *b = &ckpt_recipe_blobs[i];
        const struct ckpt_file file = {
            .name = b->name, .text = (const char *)b->data, .len = b->len};
        if (!(dir && ckpt_files_find(f, "", b->name)) && ckpt_vec_push(&f->list, file) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

void ckpt_files_forget_json(struct ckpt_files *f)
{
    for (size_t i = 0; i < f->list.len; i++) {
        json_decref(f->list.ptr[i].json);
        f->list.ptr[i].json = NULL;
    }
}

void ckpt_files_release(struct ckpt_files *f)
{
    ckpt_vec_release(&f->list);
    ckpt_arena_release(&f->arena);
}

const struct ckpt_file *ckpt_files_find(const struct ckpt_files *f, const char *folder,
                                        const char *name)
{
    const size_t n = strlen(folder);

    for (size_t i = 0; i < f->list.len; i++)
        if (strncmp(f->list.ptr[i].name, folder, n) == 0 &&
            strcmp(f->list.ptr[i].name + n, name) == 0)
            return &f->list.ptr[i];
    return NULL;
}

int ckpt_beside_find(const struct ckpt_beside *b, const char *name, struct ckpt_file *ret,
                     char **ret_free, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *file = ckpt_asprintf("%s.json", name);
    const struct ckpt_file *found;

    if (!file)
        return ckpt_nomem(err);
    *ret = (struct ckpt_file){0};
    if (b->dir && ckpt_dir_has_file(b->dir, file)) {
        if (ckpt_dir_read_file(b->dir, file, MAX_FILE, ret_free, &ret->len, err) < 0)
            return -1;
        ret->text = *ret_free;
        return 0;
    }
    if (!(found = ckpt_files_find(b->files, b->folder, name)) &&
        !(found = ckpt_files_find(b->files, "", name)))
        return ckpt_fail(err, CKPT_MISSING, "no file '%.200s' beside it, and no embedded one",
                         file);
    *ret = *found;
    return 0;
}

int ckpt_file_read(const char *path, struct ckpt_dir **ret_dir, char **ret_text, size_t *ret_len,
                   struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = strdup(path);
    char *slash = folder ? strrchr(folder, '/') : NULL;

    if (!folder)
        return ckpt_nomem(err);
    const char *name = path + (slash ? slash + 1 - folder : 0);
    if (slash)
        slash[slash == folder] = '\0';
    return ckpt_dir_open(slash ? folder : ".", CKPT_LINKS_ANY, ret_dir, err) < 0
               ? -1
               : ckpt_dir_read_file(*ret_dir, name, MAX_FILE, ret_text, ret_len, err);
}

/* ---- keys of the embedded model files ---- */

static bool names(const struct ckpt_recipe_blob *b, const char *key)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;

    if (ckpt_json_parse_strict((const char *)b->data, b->len, b->name, &j, NULL) < 0)
        return false;
    const json_t *fixed = json_object_get(json_object_get(j, "config"), key);
    return ckpt_field_lists(json_object_get(j, "needs"), key) ||
           ckpt_field_lists(json_object_get(j, "takes"), key) ||
           (fixed && !json_is_array(fixed) && !json_is_object(fixed));
}

bool ckpt_keys_known(const char *key)
{
    for (size_t i = 0; i < ckpt_recipe_nblobs; i++)
        if (ckpt_has_prefix(ckpt_recipe_blobs[i].name, "models/") &&
            names(&ckpt_recipe_blobs[i], key))
            return true;
    return false;
}
