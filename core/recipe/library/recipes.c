/* SPDX-License-Identifier: Apache-2.0 */
/* Loading of recipes and model files, embedded or given, and the choice among them. */
#include "recipe/library/recipes.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/str.h"
#include "io/dir.h"
#include "recipe/language/field.h"
#include "recipe/library/settings.h"

enum { MAX_FILE = 4 << 20 };

/* ---- finding files ---- */

/* Where the files that a recipe names are: in its directory (or the same folder of the embedded
 * files), else among the embedded files. */
struct beside {
    const struct ckpt_files *files;
    const struct ckpt_dir *dir; /* NULL: embedded */
    const char *folder;         /* "nanotron/" */
};

static int find_file(void *ctx, const char *name, const char **ret_text, size_t *ret_len,
                     char **ret_free, struct ckpt_err *err)
{
    const struct beside *b = ctx;
    const struct ckpt_file *found;

    if (b->dir) {
        ckpt_cleanup(ckpt_freep) char *file = ckpt_asprintf("%s.json", name);
        if (!file)
            return ckpt_nomem(err);
        if (ckpt_dir_has_file(b->dir, file)) {
            if (ckpt_dir_read_file(b->dir, file, MAX_FILE, ret_free, ret_len, err) < 0)
                return -1;
            *ret_text = *ret_free;
            return 0;
        }
    }
    if (!(found = ckpt_files_find(b->files, b->folder, name)) &&
        !(found = ckpt_files_find(b->files, "", name)))
        return ckpt_fail(err, CKPT_MISSING, "no file '%.200s.json' beside it, and no embedded one",
                         name);
    *ret_text = found->text;
    *ret_len = found->len;
    return 0;
}

/* ---- loading ---- */

static int keep_family(struct ckpt_recipes *set, struct ckpt_family *f,
                       const struct ckpt_family **ret, struct ckpt_err *err)
{
    if (ckpt_vec_push(&set->families, f) < 0) {
        ckpt_family_release(f);
        return ckpt_nomem(err);
    }
    *ret = f;
    return 0;
}

static int find_family(struct ckpt_recipes *set, struct beside *b, const char *model,
                       const struct ckpt_family **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *owned = NULL, *name = ckpt_asprintf("models/%s", model);
    struct ckpt_family *f;
    const char *text;
    size_t len;

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; i < set->families.len; i++)
        if (strcmp(set->families.ptr[i]->name, name) == 0) {
            *ret = set->families.ptr[i];
            return 0;
        }
    struct beside models = {b->files, b->dir, "models/"};
    if (find_file(&models, model, &text, &len, &owned, err) < 0 ||
        ckpt_family_parse(&set->arena, name, text, len, &f, err) < 0)
        return ckpt_err_in(err, "model file '%.200s'", model);
    return keep_family(set, f, ret, err);
}

int ckpt_model_file(const struct ckpt_recipes *set, struct ckpt_arena *arena, const char *model,
                    struct ckpt_family **ret, struct ckpt_err *err)
{
    const char *name = ckpt_field_text(arena, err, "models/%s", model);
    const struct ckpt_file *file = name ? ckpt_files_find(&set->files, "models/", model) : NULL;

    if (!name)
        return -1;
    if (!file)
        return ckpt_fail(err, CKPT_MISSING, "there is no model file '%.200s'", model);
    return ckpt_family_parse(arena, name, file->text, file->len, ret, err);
}

/* Add the recipe's model file: named, inline, or none. */
static int add_family(struct ckpt_recipes *set, struct beside *b, struct ckpt_recipe *r,
                      struct ckpt_err *err)
{
    const struct ckpt_family *f = NULL;
    struct ckpt_family *own;

    if (!r->model && !r->inline_model)
        return 0;
    if (r->model) {
        if (find_family(set, b, r->model, &f, err) < 0)
            return ckpt_err_in(err, "%s", r->name);
    } else {
        const char *name = ckpt_field_text(&set->arena, err, "%s: model", r->name);
        if (!name || ckpt_family_from_json(&set->arena, name, r->inline_model, &own, err) < 0 ||
            keep_family(set, own, &f, err) < 0)
            return -1;
    }
    return ckpt_recipe_set_family(r, f, err);
}

static int add_one(struct ckpt_recipes *set, struct beside *b, const struct ckpt_recipe_text *file,
                   struct ckpt_recipe **ret, struct ckpt_err *err)
{
    const struct ckpt_file_finder finder = {find_file, b};

    if (ckpt_recipe_parse(&set->arena, file, &finder, ret, err) < 0)
        return -1;
    if (ckpt_vec_push(&set->recipes, *ret) < 0) {
        ckpt_recipe_release(*ret);
        return ckpt_nomem(err);
    }
    return add_family(set, b, *ret, err);
}

static int add_recipe(struct ckpt_recipes *set, struct beside *b, const char *name,
                      const char *text, size_t len, struct ckpt_err *err)
{
    struct ckpt_recipe_text file = {name, text, len, false};
    struct ckpt_recipe *r;

    if (add_one(set, b, &file, &r, err) < 0)
        return -1;
    file.backwards = true;
    return r->back ? add_one(set, b, &file, &r, err) : 0;
}

/* ---- embedded folders ---- */

static const char models_folder[] = "models/", types_folder[] = "types/";

/* Which folder has the recipes for a format. */
static const struct {
    const char *format, *folder;
} formats[] = {
    {"megatron", "megatron/"},         {"nanotron", "nanotron/"}, {"dcp", "torchtitan/"},
    {"transformers", "transformers/"}, {"hub", "transformers/"},  {"torchtitan", "torchtitan/"},
    {"deepspeed", "deepspeed/"},
};

struct folder {
    const char *name;
    struct ckpt_recipes *set;
};

struct ckpt_recipe_folders {
    pthread_mutex_t lock;
    CKPT_VEC(struct folder) parsed;
};

/* "megatron/" of "megatron/llama". */
static int folder_of(struct ckpt_arena *arena, const char *name, const char **ret,
                     struct ckpt_err *err)
{
    *ret = ckpt_field_text(arena, err, "%.*s", (int)(strcspn(name, "/") + 1), name);
    return *ret ? 0 : -1;
}

/* Does the folder have another purpose, so that it has no recipes for other formats? */
static bool is_known(const char *folder)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].folder, folder) == 0)
            return true;
    return strcmp(folder, models_folder) == 0 || strcmp(folder, types_folder) == 0;
}

/* Add a user's recipe, which may be in a folder of any name: its format says what it is for. */
static int add_recipe_file(struct ckpt_recipes *set, const struct ckpt_files *files,
                           const struct ckpt_file *f, const char *folder, struct ckpt_err *err)
{
    struct beside b = {files, NULL, NULL};
    const size_t before = set->recipes.len;

    if (folder_of(&set->arena, f->name, &b.folder, err) < 0)
        return -1;
    if (strcmp(b.folder, folder) != 0 && (!f->given || is_known(b.folder)))
        return 0;
    if (add_recipe(set, &b, f->name, f->text, f->len, err) < 0)
        return -1;
    for (size_t i = before; i < set->recipes.len; i++)
        set->recipes.ptr[i]->given = f->given;
    return 0;
}

static int add_folder(struct ckpt_recipes *set, const struct ckpt_files *files, const char *folder,
                      struct ckpt_err *err)
{
    struct beside b = {files, NULL, folder};
    const size_t n = strlen(folder);

    for (size_t i = 0; i < files->list.len; i++) {
        const struct ckpt_file *f = &files->list.ptr[i];
        const struct ckpt_family *ignored;
        int rc = 0;
        if (folder != models_folder)
            rc = add_recipe_file(set, files, f, folder, err);
        else if (strncmp(f->name, folder, n) == 0)
            rc = find_family(set, &b, f->name + n, &ignored, err);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/* Parse a folder's recipes. Called with the lock held. */
static int parse_folder(const struct ckpt_recipes *all, const char *name,
                        const struct ckpt_recipes **ret, struct ckpt_err *err)
{
    struct ckpt_recipe_folders *f = all->folders;
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = NULL;

    for (size_t i = 0; i < f->parsed.len; i++)
        if (f->parsed.ptr[i].name == name) {
            *ret = f->parsed.ptr[i].set;
            return 0;
        }
    if (!(set = calloc(1, sizeof *set)) || ckpt_vec_reserve(&f->parsed, 1) < 0)
        return ckpt_nomem(err);
    if (add_folder(set, &all->files, name, err) < 0)
        return -1;
    struct folder new = {name, set};
    (void)ckpt_vec_push(&f->parsed, new);
    *ret = ckpt_steal(&set);
    return 0;
}

static int get_folder(const struct ckpt_recipes *set, const char *name,
                      const struct ckpt_recipes **ret, struct ckpt_err *err)
{
    int rc;

    if (!set->folders) {
        *ret = set;
        return 0;
    }
    (void)pthread_mutex_lock(&set->folders->lock);
    rc = parse_folder(set, name, ret, err);
    (void)pthread_mutex_unlock(&set->folders->lock);
    return rc;
}

int ckpt_recipes_of(const struct ckpt_recipes *set, const char *format,
                    const struct ckpt_recipes **ret, struct ckpt_err *err)
{
    for (size_t i = 0; format && i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i].format, format) == 0)
            return get_folder(set, formats[i].folder, ret, err);
    *ret = set; /* there are none */
    return 0;
}

int ckpt_recipes_models(const struct ckpt_recipes *set, const struct ckpt_recipes **ret,
                        struct ckpt_err *err)
{
    return get_folder(set, models_folder, ret, err);
}

static int make_folders(struct ckpt_recipes *set, struct ckpt_err *err)
{
    if (!(set->folders = calloc(1, sizeof *set->folders)))
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&set->folders->lock, NULL);
    return 0;
}

static void free_folders(struct ckpt_recipe_folders *f)
{
    if (!f)
        return;
    for (size_t i = 0; i < f->parsed.len; i++)
        ckpt_recipes_free(f->parsed.ptr[i].set);
    ckpt_vec_release(&f->parsed);
    (void)pthread_mutex_destroy(&f->lock);
    free(f);
}

/* ---- a given recipe ---- */

static int add_path(struct ckpt_recipes *set, const char *path, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *folder = strdup(path), *text = NULL;
    size_t len;

    if (!folder)
        return ckpt_nomem(err);
    char *slash = strrchr(folder, '/');
    const char *file = slash ? path + (slash - folder) + 1 : path;
    if (slash)
        slash[slash == folder] = '\0';
    if (ckpt_dir_open(slash ? folder : ".", CKPT_LINKS_ANY, &dir, err) < 0 ||
        ckpt_dir_read_file(dir, file, MAX_FILE, &text, &len, err) < 0)
        return ckpt_err_in(err, "recipe '%s'", path);
    struct beside b = {&set->files, dir, ""};
    return add_recipe(set, &b, path, text, len, err);
}

static int check_given(struct ckpt_recipes *set, struct ckpt_err *err)
{
    const struct ckpt_recipe *r = set->recipes.ptr[0];

    set->given = true;
    if (!r->format)
        return ckpt_fail(err, CKPT_FORMAT, "%s: 'format' is missing: this is a fragment", r->name);
    return 0;
}

int ckpt_recipes_load(const char *path, struct ckpt_recipes **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = calloc(1, sizeof *set);

    struct stat st;
    const bool is_dir = path && stat(path, &st) == 0 && S_ISDIR(st.st_mode);

    if (!set)
        return ckpt_nomem(err);
    if (ckpt_files_load(&set->files, is_dir ? path : NULL, err) < 0 ||
        ckpt_types_load(&set->files, &set->types, err) < 0)
        return is_dir ? ckpt_err_in(err, "recipe '%s'", path) : -1;
    if (!path || is_dir) {
        if (make_folders(set, err) < 0)
            return -1;
    } else if (add_path(set, path, err) < 0 || check_given(set, err) < 0) {
        return -1;
    }
    *ret = ckpt_steal(&set);
    return 0;
}

int ckpt_recipes_parse(const char *name, const char *text, size_t len, struct ckpt_recipes **ret,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = calloc(1, sizeof *set);
    struct beside b = {NULL, NULL, ""};

    if (!set)
        return ckpt_nomem(err);
    b.files = &set->files;
    if (ckpt_files_load(&set->files, NULL, err) < 0 ||
        add_recipe(set, &b, name, text, len, err) < 0 || check_given(set, err) < 0)
        return -1;
    *ret = ckpt_steal(&set);
    return 0;
}

void ckpt_recipes_free(struct ckpt_recipes *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->recipes.len; i++)
        ckpt_recipe_release(set->recipes.ptr[i]);
    for (size_t i = 0; i < set->families.len; i++)
        ckpt_family_release(set->families.ptr[i]);
    ckpt_vec_release(&set->recipes);
    ckpt_vec_release(&set->families);
    ckpt_arena_release(&set->arena);
    ckpt_types_free(set->types);
    ckpt_files_release(&set->files);
    free_folders(set->folders);
    free(set);
}

void ckpt_recipes_freep(struct ckpt_recipes **set)
{
    ckpt_recipes_free(*set);
    *set = NULL;
}

bool ckpt_recipes_forced(const struct ckpt_recipes *set) { return set->given; }

bool ckpt_recipes_has_given(const struct ckpt_recipes *set, const char *name)
{
    const struct ckpt_file *f = ckpt_files_find(&set->files, "", name);

    return f && f->given;
}

const struct ckpt_types *ckpt_recipes_types(const struct ckpt_recipes *set) { return set->types; }

/* ---- choosing ---- */

static bool present(const struct ckpt_catalog *src, const struct ckpt_evidence_name *e)
{
    uint64_t value[CKPT_NAME_NUMBERS];

    for (uint32_t k = 0; k < e->n; k++) {
        const struct ckpt_name *n = &e->name[k];
        if (n->npart == 1 && n->part[0].text) {
            if (ckpt_catalog_find(src, n->part[0].text))
                return true;
            continue;
        }
        for (size_t i = 0; i < src->tensors.len; i++)
            if (ckpt_name_match(n, src->tensors.ptr[i].name, strlen(src->tensors.ptr[i].name),
                                value))
                return true;
    }
    return false;
}

const char *ckpt_recipe_evidence_lacks(const struct ckpt_recipe *r, const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < r->has.len; i++)
        if (!present(cat, &r->has.ptr[i]))
            return r->has.ptr[i].text;
    return NULL;
}

static const char *format_of(const struct ckpt_catalog *src, const struct ckpt_recipe_options *opt)
{
    return opt->format ? opt->format : ckpt_json_str(src->about, "format");
}

static bool fits(const struct ckpt_recipe *r, const struct ckpt_catalog *src,
                 const struct ckpt_recipe_options *opt)
{
    const char *format = format_of(src, opt);
    struct ckpt_settings s = {.src = src,
                              .framework = src->config,
                              .overrides = opt->overrides,
                              .type = ckpt_settings_type(opt)};
    const struct ckpt_expr_env env = {ckpt_settings_before, &s, src};

    if (!r->format || !format || strcmp(r->format, format) != 0 || r->backwards != opt->back)
        return false;
    for (size_t i = 0; i < r->when.len; i++)
        if (ckpt_expr_truth(r->when.ptr[i], &env) != CKPT_TRUE)
            return false;
    if (r->backwards) /* the model's names are no evidence of a framework's */
        return true;
    for (size_t i = 0; i < r->lacks.len; i++)
        if (present(src, &r->lacks.ptr[i]))
            return false;
    return !ckpt_recipe_evidence_lacks(r, src);
}

/* Does the recipe's family match the requested one, if there is one? */
static bool suits_base(const struct ckpt_recipe *r, const struct ckpt_recipe_options *opt)
{
    const char *type = ckpt_settings_type(opt);

    return !type || !r->family || ckpt_family_has_type(r->family, type);
}

/* Of the matching recipes, those of the lowest tier are candidates; the user's come before the
 * embedded ones. */
enum { NTIER = 8 };

/* Backwards, a model type's own family comes before others that list it too. */
static int tier_of(const struct ckpt_recipe *r, const struct ckpt_recipe_options *opt)
{
    const char *type = ckpt_settings_type(opt);
    const bool other = r->backwards && type && r->family && r->family->ntypes &&
                       strcmp(r->family->types[0], type) != 0;

    return 4 * other + 2 * r->fallback + !r->given;
}

static int choice_error(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, int tier, struct ckpt_err *err)
{
    struct ckpt_str names = {0};
    const char *format = format_of(src, opt);
    size_t nother = 0;

    for (size_t i = 0; i < set->recipes.len; i++)
        nother += fits(set->recipes.ptr[i], src, opt);
    for (size_t i = 0; i < set->recipes.len; i++) {
        const struct ckpt_recipe *r = set->recipes.ptr[i];
        const bool mine =
            r->format && format && strcmp(r->format, format) == 0 && r->backwards == opt->back;
        if (tier < NTIER ? fits(r, src, opt) && suits_base(r, opt) && tier_of(r, opt) == tier
            : nother     ? fits(r, src, opt)
                         : mine && !r->fallback)
            ckpt_str_printf(&names, "%s%s", names.len ? ", " : "", r->name);
    }
    if (tier < NTIER)
        (void)ckpt_fail(err, CKPT_CONFLICT,
                        "several recipes fit: %s; choose one with model_type=... or "
                        "recipe=FILE",
                        ckpt_str_get(&names));
    else if (nother)
        (void)ckpt_fail(err, CKPT_CONFLICT,
                        "%s '%s', which none of the recipes that fit the checkpoint makes (%s)",
                        ckpt_json_str(opt->overrides, "_model_type") ? "model_type= asks for"
                                                                     : "the base model is of type",
                        ckpt_settings_type(opt), ckpt_str_get(&names));
    else
        (void)ckpt_fail(err, CKPT_MISSING,
                        "no recipe fits this checkpoint of format '%s' (there are: %s); give one "
                        "with recipe=FILE, or look at its tensors with view=raw",
                        format ? format : "?", names.len ? ckpt_str_get(&names) : "none");
    ckpt_str_release(&names);
    return -1;
}

int ckpt_recipe_fits(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                     const struct ckpt_recipe_options *opt, bool *ret, struct ckpt_err *err)
{
    if (ckpt_recipes_of(set, format_of(src, opt), &set, err) < 0)
        return -1;
    *ret = false;
    for (size_t i = 0; i < set->recipes.len && !*ret; i++)
        *ret = fits(set->recipes.ptr[i], src, opt) && suits_base(set->recipes.ptr[i], opt);
    return 0;
}

int ckpt_recipes_choose(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const struct ckpt_recipe **ret,
                        struct ckpt_err *err)
{
    const struct ckpt_recipe *found = NULL;
    size_t n = 0;
    int tier = -1;

    if (set->given) {
        *ret = set->recipes.ptr[0];
        return 0;
    }
    if (ckpt_recipes_of(set, format_of(src, opt), &set, err) < 0)
        return -1;
    while (n == 0 && ++tier < NTIER)
        for (size_t i = 0; i < set->recipes.len; i++) {
            const struct ckpt_recipe *r = set->recipes.ptr[i];
            if (tier_of(r, opt) == tier && fits(r, src, opt) && suits_base(r, opt)) {
                found = r;
                n++;
            }
        }
    if (n != 1)
        return choice_error(set, src, opt, tier, err);
    *ret = found;
    return 0;
}
