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

#define MODELS_FOLDER "models"

/* The formats for which there are recipes, and the folder of data that has them; models are no
 * format, but a folder, too. Hugging Face's stand here. A framework names its folder in its line of
 * the readers' table, and in that of the writers' what only a writer asks for: there the format has
 * the folder's name. A line without a folder is of a format without recipes. */
static const struct {
    const char *format, *folder;
} formats[] = {
    {"", MODELS_FOLDER},
    {"transformers", "transformers"},
    {"hub", "transformers"},
#define CKPT_READER(NAME, ...) {#NAME, "" __VA_ARGS__},
#include "format/readers.def"
#undef CKPT_READER
#define CKPT_WRITER(NAME, ...) {"" __VA_ARGS__, "" __VA_ARGS__},
#include "format/writers.def"
#undef CKPT_WRITER
};

enum { MODELS, NFORMAT = sizeof formats / sizeof *formats };

/* A set of recipes keeps here what was parsed so far. */
struct parsed {
    pthread_mutex_t lock; /* of folders that are being parsed; parsed ones do not change */
    struct ckpt_files files;
    struct ckpt_recipe_folder folder[NFORMAT]; /* the first format of each folder has it */
    struct ckpt_recipe_folder given; /* a recipe that was given by its path, and its model file */
};

struct ckpt_recipes {
    struct ckpt_types *types; /* NULL for a recipe from memory */
    struct parsed *parsed;
    bool given;  /* a recipe was given: the only candidate, without checking its conditions */
    bool shared; /* by all runs of the process, which never frees it */
};

/* ---- parsing ---- */

static int find_family(struct ckpt_recipe_folder *to, const struct ckpt_beside *b,
                       const char *model, const struct ckpt_family **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *owned = NULL, *name = ckpt_asprintf("models/%s", model);
    const struct ckpt_beside models = {b->files, b->dir, MODELS_FOLDER "/"};
    struct ckpt_family *f;
    struct ckpt_file file;

    if (!name || ckpt_vec_reserve(&to->families, 1) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < to->families.len; i++)
        if (strcmp(to->families.ptr[i]->name, name) == 0) {
            *ret = to->families.ptr[i];
            return 0;
        }
    if (ckpt_beside_find(&models, model, &file, &owned, err) < 0 ||
        ckpt_family_parse(&to->arena, name, file.text, file.len, &f, err) < 0)
        return ckpt_err_in(err, "model file '%.200s'", model);
    f->given = file.given;
    *ret = to->families.ptr[to->families.len++] = f;
    return 0;
}

/* Add the recipe's model file: named, inline, or none. */
static int add_family(struct ckpt_recipe_folder *to, const struct ckpt_beside *b,
                      struct ckpt_recipe *r, struct ckpt_err *err)
{
    const struct ckpt_family *f = NULL;
    struct ckpt_family *own;

    if (!r->model && !r->inline_model)
        return 0;
    if (ckpt_vec_reserve(&to->families, 1) < 0)
        return ckpt_nomem(err);
    if (r->model) {
        if (find_family(to, b, r->model, &f, err) < 0)
            return ckpt_err_in(err, "%s", r->name);
    } else {
        const char *name = ckpt_field_text(&to->arena, err, "%s: model", r->name);
        if (!name || ckpt_family_from_json(&to->arena, name, r->inline_model, &own, err) < 0)
            return -1;
        f = to->families.ptr[to->families.len++] = own;
    }
    r->family = f;
    return 0;
}

/* Add a recipe, and the same read backwards if it says so. A user's is parsed to its end, so that
 * he sees its errors at once; of ours, of which a folder has a hundred, only the one that is
 * chosen. */
static int add_recipe(struct ckpt_recipe_folder *to, const struct ckpt_beside *b,
                      const struct ckpt_file *file, struct ckpt_err *err)
{
    struct ckpt_recipe *r = NULL;

    for (int backwards = 0; backwards < (r && r->back ? 2 : 1); backwards++) {
        if (ckpt_vec_reserve(&to->recipes, 1) < 0)
            return ckpt_nomem(err);
        if (ckpt_recipe_begin(&to->arena, file, backwards, b, &r, err) < 0)
            return -1;
        to->recipes.ptr[to->recipes.len++] = r;
        if (add_family(to, b, r, err) < 0 || (r->given && ckpt_recipe_finish(r, err) < 0))
            return -1;
    }
    return 0;
}

/* ---- folders of the set ---- */

static void folder_release(struct ckpt_recipe_folder *f)
{
    for (size_t i = 0; i < f->recipes.len; i++)
        ckpt_recipe_release(f->recipes.ptr[i]);
    for (size_t i = 0; i < f->families.len; i++)
        ckpt_family_release(f->families.ptr[i]);
    ckpt_vec_release(&f->recipes);
    ckpt_vec_release(&f->families);
    ckpt_arena_release(&f->arena);
}

static bool is_in(const struct ckpt_file *f, const char *folder)
{
    const size_t len = strlen(folder);

    return len && strncmp(f->name, folder, len) == 0 && f->name[len] == '/';
}

/* Is the file one of the folder? A user's recipe may be in a folder of any other name: its format
 * says what it is for. */
static bool belongs(const struct ckpt_file *f, size_t folder)
{
    if (is_in(f, formats[folder].folder) || folder == MODELS || !f->given)
        return is_in(f, formats[folder].folder);
    for (size_t i = 0; i < NFORMAT; i++)
        if (is_in(f, formats[i].folder))
            return false;
    return !ckpt_has_prefix(f->name, "types/");
}

static int add_file(struct ckpt_recipe_folder *to, const struct ckpt_files *files,
                    const struct ckpt_file *f, bool is_model, struct ckpt_err *err)
{
    const size_t n = strcspn(f->name, "/") + 1;
    const struct ckpt_family *ignored;
    const struct ckpt_beside b = {files, NULL,
                                  ckpt_field_text(&to->arena, err, "%.*s", (int)n, f->name)};

    if (!b.folder)
        return -1;
    return is_model ? find_family(to, &b, f->name + n, &ignored, err) : add_recipe(to, &b, f, err);
}

/* Parse the folder's files as JSON, each once: many recipes include the same. */
static int parse_json(struct ckpt_files *files, size_t folder, struct ckpt_err *err)
{
    for (size_t i = 0; i < files->list.len; i++) {
        struct ckpt_file *f = &files->list.ptr[i];
        if (belongs(f, folder) &&
            ckpt_json_parse_strict(f->text, f->len, f->name, &f->json, err) < 0)
            return -1;
    }
    return 0;
}

static int parse_files(struct ckpt_recipe_folder *to, struct ckpt_files *files, size_t folder,
                       struct ckpt_err *err)
{
    if (folder != MODELS && parse_json(files, folder, err) < 0)
        return -1;
    for (size_t i = 0; i < files->list.len; i++) {
        const struct ckpt_file *f = &files->list.ptr[i];
        if (belongs(f, folder) && add_file(to, files, f, folder == MODELS, err) < 0)
            return -1;
    }
    return 0;
}

/* Parse a folder's files. Called with the lock held. */
static int parse_folder(struct ckpt_recipe_folder *to, struct ckpt_files *files, size_t folder,
                        struct ckpt_err *err)
{
    const int rc = parse_files(to, files, folder, err);

    ckpt_files_forget_json(files);
    if (rc < 0)
        folder_release(to);
    to->parsed = rc == 0;
    return rc;
}

static int get_folder(const struct ckpt_recipes *set, size_t folder,
                      const struct ckpt_recipe_folder **ret, struct ckpt_err *err)
{
    struct parsed *p = set->parsed;
    int rc = 0;

    *ret = &p->folder[folder];
    (void)pthread_mutex_lock(&p->lock);
    if (!(*ret)->parsed)
        rc = parse_folder(&p->folder[folder], &p->files, folder, err);
    (void)pthread_mutex_unlock(&p->lock);
    return rc;
}

/* The number of the folder with a format's recipes, which is that of the first format that has the
 * same folder. NFORMAT: there are none. */
static size_t folder_of(const char *format)
{
    size_t i = 0, first = 0;

    while (i < NFORMAT && (!*formats[i].folder || strcmp(formats[i].format, format) != 0))
        i++;
    while (i < NFORMAT && strcmp(formats[first].folder, formats[i].folder) != 0)
        first++;
    return i < NFORMAT ? first : NFORMAT;
}

int ckpt_recipes_of(const struct ckpt_recipes *set, const char *format,
                    const struct ckpt_recipe_folder **ret, struct ckpt_err *err)
{
    static const struct ckpt_recipe_folder none;

    *ret = set->given ? &set->parsed->given : &none;
    if (!format || set->given)
        return 0;
    const size_t folder = folder_of(format);
    return folder < NFORMAT ? get_folder(set, folder, ret, err) : 0;
}

int ckpt_recipes_finish(const struct ckpt_recipes *set, struct ckpt_recipe *r, struct ckpt_err *err)
{
    (void)pthread_mutex_lock(&set->parsed->lock);
    const int rc = ckpt_recipe_finish(r, err);
    (void)pthread_mutex_unlock(&set->parsed->lock);
    return rc;
}

int ckpt_recipes_models(const struct ckpt_recipes *set, const struct ckpt_recipe_folder **ret,
                        struct ckpt_err *err)
{
    *ret = &set->parsed->given;
    return set->given ? 0 : get_folder(set, MODELS, ret, err);
}

int ckpt_recipes_family(const struct ckpt_recipes *set, const char *model_type,
                        const struct ckpt_family **ret, struct ckpt_err *err)
{
    const struct ckpt_recipe_folder *models;

    *ret = NULL;
    if (ckpt_recipes_models(set, &models, err) < 0)
        return -1;
    for (size_t i = 0; i < models->families.len && !(*ret && (*ret)->given); i++) {
        const struct ckpt_family *f = models->families.ptr[i];
        /* a type that is not Hugging Face's is in the config that the family produces */
        const char *made = ckpt_json_str(f->config, "model_type");
        if (!f->open &&
            (ckpt_family_has_type(f, model_type) || (made && strcmp(made, model_type) == 0)))
            *ret = f;
    }
    return 0;
}

int ckpt_recipes_common(const struct ckpt_recipes *set, const struct ckpt_family **ret,
                        struct ckpt_err *err)
{
    const struct ckpt_recipe_folder *models;

    if (get_folder(set, MODELS, &models, err) < 0)
        return -1;
    for (size_t i = 0; i < models->families.len; i++)
        if (strcmp(models->families.ptr[i]->name, "models/common") == 0) {
            *ret = models->families.ptr[i];
            return 0;
        }
    return ckpt_fail(err, CKPT_MISSING, "there is no model file 'common'");
}

/* ---- life ---- */

/* Make the set of files, in which nothing is parsed yet. */
static int new_set(const char *dir, struct ckpt_recipes **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = calloc(1, sizeof *set);

    if (!set || !(set->parsed = calloc(1, sizeof *set->parsed)))
        return ckpt_nomem(err);
    (void)pthread_mutex_init(&set->parsed->lock, NULL);
    if (ckpt_files_load(&set->parsed->files, dir, err) < 0)
        return -1;
    *ret = ckpt_steal(&set);
    return 0;
}

/* Add the recipe that is the only candidate. */
static int add_given(struct ckpt_recipes *set, const struct ckpt_dir *dir,
                     const struct ckpt_file *file, struct ckpt_err *err)
{
    struct ckpt_recipe_folder *given = &set->parsed->given;
    const struct ckpt_beside b = {&set->parsed->files, dir, ""};

    if (add_recipe(given, &b, file, err) < 0)
        return -1;
    if (!given->recipes.ptr[0]->format)
        return ckpt_fail(err, CKPT_FORMAT, "%s: 'format' is missing: this is a fragment",
                         file->name);
    set->given = given->parsed = true;
    return 0;
}

static int load(const char *path, struct ckpt_recipes **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = NULL;
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct stat st;
    const bool is_dir = path && stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    struct ckpt_file file = {.name = path, .given = true};

    if (new_set(is_dir ? path : NULL, &set, err) < 0 ||
        ckpt_types_load(&set->parsed->files, &set->types, err) < 0)
        return is_dir ? ckpt_err_in(err, "recipe '%s'", path) : -1;
    if (path && !is_dir) {
        if (ckpt_file_read(path, &dir, &text, &file.len, err) < 0)
            return ckpt_err_in(err, "recipe '%s'", path);
        file.text = text;
        if (add_given(set, dir, &file, err) < 0)
            return -1;
    }
    *ret = ckpt_steal(&set);
    return 0;
}

/* The set of the embedded files lives as long as the process, all of whose runs share it: who opens
 * many parses them once. Its two locks are held over fork(), so that no child inherits one from a
 * thread that it does not have. */
static struct {
    pthread_mutex_t lock;
    struct ckpt_recipes *set;
    bool at_fork;
} embedded = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void before_fork(void)
{
    (void)pthread_mutex_lock(&embedded.lock);
    if (embedded.set)
        (void)pthread_mutex_lock(&embedded.set->parsed->lock);
}

static void after_fork(void)
{
    if (embedded.set)
        (void)pthread_mutex_unlock(&embedded.set->parsed->lock);
    (void)pthread_mutex_unlock(&embedded.lock);
}

static int make_embedded(struct ckpt_err *err)
{
    if (!embedded.at_fork && pthread_atfork(before_fork, after_fork, after_fork) != 0)
        return ckpt_nomem(err);
    embedded.at_fork = true;
    if (load(NULL, &embedded.set, err) < 0)
        return -1;
    embedded.set->shared = true;
    return 0;
}

int ckpt_recipes_load(const char *path, struct ckpt_recipes **ret, struct ckpt_err *err)
{
    int rc = 0;

    if (path)
        return load(path, ret, err);
    (void)pthread_mutex_lock(&embedded.lock);
    if (!embedded.set)
        rc = make_embedded(err);
    *ret = embedded.set;
    (void)pthread_mutex_unlock(&embedded.lock);
    return rc;
}

int ckpt_recipes_parse(const char *name, const char *text, size_t len, struct ckpt_recipes **ret,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *set = NULL;
    const struct ckpt_file file = {.name = name, .text = text, .len = len, .given = true};

    if (new_set(NULL, &set, err) < 0 || add_given(set, NULL, &file, err) < 0)
        return -1;
    *ret = ckpt_steal(&set);
    return 0;
}

void ckpt_recipes_free(struct ckpt_recipes *set)
{
    if (!set || set->shared)
        return;
    for (size_t i = 0; set->parsed && i < NFORMAT; i++)
        folder_release(&set->parsed->folder[i]);
    if (set->parsed) {
        folder_release(&set->parsed->given);
        ckpt_files_release(&set->parsed->files);
        (void)pthread_mutex_destroy(&set->parsed->lock);
    }
    free(set->parsed);
    ckpt_types_free(set->types);
    free(set);
}

bool ckpt_recipes_forced(const struct ckpt_recipes *set) { return set->given; }

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

/* The matching recipes of the lowest tier are candidates; the user's come before the embedded
 * ones. */
enum { NTIER = 8 };

/* Backwards, a model type's own family comes before others that list it too. */
static int tier_of(const struct ckpt_recipe *r, const struct ckpt_recipe_options *opt)
{
    const char *type = ckpt_settings_type(opt);
    const bool other = r->backwards && type && r->family && r->family->types.n &&
                       strcmp(r->family->types.text[0], type) != 0;

    return 4 * other + 2 * r->fallback + !r->given;
}

/* Is the recipe, which does not fit, near: does it make the model type that is asked for, or, if
 * none is, does the checkpoint have some of the names by which the recipe knows its own? */
static bool is_near(const struct ckpt_recipe *r, const struct ckpt_catalog *src,
                    const struct ckpt_recipe_options *opt)
{
    const char *type = ckpt_settings_type(opt);

    if (type)
        return r->family && ckpt_family_has_type(r->family, type);
    for (size_t i = 0; i < r->has.len; i++)
        if (present(src, &r->has.ptr[i]))
            return true;
    return false;
}

/* Append three of the tensors' names, from the beginning, the middle and the end. */
static void put_names(struct ckpt_str *out, const struct ckpt_catalog *src)
{
    const size_t n = src->tensors.len, at[] = {0, n / 2, n ? n - 1 : 0};

    for (size_t i = 0; i < 3; i++)
        if (at[i] < n && (i == 0 || at[i] != at[i - 1]))
            ckpt_str_printf(out, "%s'%s'", out->len ? ", " : "", src->tensors.ptr[at[i]].name);
}

/* Fail because no recipe of the set fits: those that are near are named, with what each misses; of
 * a family that none knows, its names are shown and what can be done. */
static int none_fits(const struct ckpt_recipe_folder *set, const struct ckpt_catalog *src,
                     const struct ckpt_recipe_options *opt, struct ckpt_err *err)
{
    enum { MOST_NAMED = 4 };
    ckpt_cleanup(ckpt_str_release) struct ckpt_str near = {0}, names = {0};
    const char *format = format_of(src, opt), *type = ckpt_settings_type(opt);
    size_t nnear = 0;

    for (size_t i = 0; i < set->recipes.len; i++) {
        const struct ckpt_recipe *r = set->recipes.ptr[i];
        if (!r->format || !format || strcmp(r->format, format) != 0 || r->backwards != opt->back ||
            r->fallback)
            continue;
        if (!is_near(r, src, opt) || nnear++ >= MOST_NAMED)
            continue;
        const char *lacks = ckpt_recipe_evidence_lacks(r, src);
        ckpt_str_printf(&near, "%s%s%s%s%s", near.len ? ", " : "", r->name,
                        lacks ? " expects '" : "", lacks ? lacks : "", lacks ? "'" : "");
    }
    if (nnear)
        return ckpt_fail(err, CKPT_MISSING,
                         "no recipe fits this checkpoint of format '%s' (near are: %s%s); give one "
                         "with recipe=FILE, or look at its tensors with view=raw",
                         format, ckpt_str_get(&near), nnear > MOST_NAMED ? ", ..." : "");
    put_names(&names, src);
    return ckpt_fail(err, CKPT_MISSING,
                     "no recipe fits this checkpoint of format '%s': none knows "
                     "%s%s%sthe names of its tensors (%s). If they are a Hugging Face model's own "
                     "names, give such a model, with its weights, as base=DIR; otherwise give a "
                     "recipe with recipe=FILE, or look at the tensors with view=raw",
                     format ? format : "?", type ? "model type '" : "", type ? type : "",
                     type ? "' or " : "", ckpt_str_get(&names));
}

static int choice_error(const struct ckpt_recipe_folder *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, int tier, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};
    size_t nother = 0;

    for (size_t i = 0; i < set->recipes.len; i++)
        nother += fits(set->recipes.ptr[i], src, opt);
    if (tier == NTIER && !nother)
        return none_fits(set, src, opt, err);
    for (size_t i = 0; i < set->recipes.len; i++) {
        const struct ckpt_recipe *r = set->recipes.ptr[i];
        if (fits(r, src, opt) && (tier == NTIER || (suits_base(r, opt) && tier_of(r, opt) == tier)))
            ckpt_str_printf(&names, "%s%s", names.len ? ", " : "", r->name);
    }
    if (tier < NTIER)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "several recipes fit: %s; choose one with model_type=... or "
                         "recipe=FILE",
                         ckpt_str_get(&names));
    return ckpt_fail(err, CKPT_CONFLICT,
                     "%s '%s', which none of the recipes that fit the checkpoint makes (%s)",
                     ckpt_json_str(opt->overrides, "_model_type") ? "model_type= asks for"
                                                                  : "the base model is of type",
                     ckpt_settings_type(opt), ckpt_str_get(&names));
}

int ckpt_recipe_fits(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                     const struct ckpt_recipe_options *opt, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_recipe_folder *all;

    if (ckpt_recipes_of(set, format_of(src, opt), &all, err) < 0)
        return -1;
    *ret = false;
    for (size_t i = 0; i < all->recipes.len && !*ret; i++)
        *ret = fits(all->recipes.ptr[i], src, opt) && suits_base(all->recipes.ptr[i], opt);
    return 0;
}

int ckpt_recipes_choose(const struct ckpt_recipes *set, const struct ckpt_catalog *src,
                        const struct ckpt_recipe_options *opt, const struct ckpt_recipe **ret,
                        struct ckpt_err *err)
{
    const struct ckpt_recipe_folder *all;
    struct ckpt_recipe *found = NULL;
    size_t n = 0;
    int tier = -1;

    if (ckpt_recipes_of(set, format_of(src, opt), &all, err) < 0)
        return -1;
    if (set->given) {
        *ret = all->recipes.ptr[0];
        return 0;
    }
    while (n == 0 && ++tier < NTIER)
        for (size_t i = 0; i < all->recipes.len; i++) {
            struct ckpt_recipe *r = all->recipes.ptr[i];
            if (tier_of(r, opt) == tier && fits(r, src, opt) && suits_base(r, opt)) {
                found = r;
                n++;
            }
        }
    if (n != 1)
        return choice_error(all, src, opt, tier, err);
    *ret = found;
    return ckpt_recipes_finish(set, found, err);
}
