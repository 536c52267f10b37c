/* SPDX-License-Identifier: Apache-2.0 */
/* The nanotron recipes on real checkpoints (CKPTFS_FIXTURES, else ../shared/fixtures): every tensor
 * byte by byte, every config key. */
#include <dirent.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "test.h"

#include "base/mem.h"
#include "base/str.h"
#include "format/reader.h"
#include "recipe/library/recipe.h"
#include "tensor/read.h"

static char *fixtures(void)
{
    const char *dir = getenv("CKPTFS_FIXTURES"), *source = getenv("CKPTFS_SOURCE");
    char *path = dir ? strdup(dir) : ckpt_asprintf("%s/../shared/fixtures", source ? source : ".");
    char *sub = ckpt_asprintf("%s/nanotron", path);
    struct stat st;

    free(path);
    if (sub && stat(sub, &st) == 0)
        return sub;
    free(sub);
    return NULL;
}

static struct ckpt_catalog *load(const struct ckpt_reader *reader, const char *path)
{
    struct ckpt_err err = {0};
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    struct ckpt_catalog *cat;
    struct ckpt_facts facts = {0};

    if (ckpt_dir_open(path, CKPT_LINKS_BENEATH, &dir, &err) < 0 ||
        ckpt_fdpool_new(64, &pool, &err) < 0)
        fail_msg("%s: %s", path, err.text);
    struct ckpt_reader_options opt = {.pool = pool};
    if (ckpt_catalog_new(&cat, &err) < 0 || reader->load(dir, &opt, &facts, cat, &err) < 0)
        fail_msg("%s: %s", path, err.text);
    ckpt_facts_release(&facts);
    ckpt_fdpool_unref(pool);
    ckpt_dir_unref(dir);
    return cat;
}

static void compare_tensors(const char *what, const struct ckpt_catalog *got,
                            const struct ckpt_catalog *want)
{
    struct ckpt_err err = {0};
    struct ckpt_reading rd = {0};

    for (size_t i = 0; i < want->tensors.len; i++) {
        const struct ckpt_tensor *w = &want->tensors.ptr[i], *g = ckpt_catalog_find(got, w->name);
        if (!g)
            fail_msg("%s: no tensor '%s'", what, w->name);
        if (g->rank != w->rank || g->dtype != w->dtype ||
            memcmp(g->dim, w->dim, w->rank * sizeof *w->dim) != 0)
            fail_msg("%s: '%s' has another shape or type", what, w->name);
        size_t n = ckpt_tensor_nbytes(w);
        char *a = malloc(n + 1), *b = malloc(n + 1);
        if (ckpt_tensor_pread(w, &rd, a, n, 0, &err) < 0 ||
            ckpt_tensor_pread(g, &rd, b, n, 0, &err) < 0)
            fail_msg("%s: '%s': %s", what, w->name, err.text);
        if (memcmp(a, b, n) != 0)
            fail_msg("%s: '%s' has other bytes", what, w->name);
        free(a);
        free(b);
    }
    if (got->tensors.len != want->tensors.len)
        fail_msg("%s: %zu tensors instead of %zu", what, got->tensors.len, want->tensors.len);
}

static void compare_config(const char *what, const json_t *got, const char *path)
{
    json_error_t je;
    const char *key;
    json_t *v, *want = json_load_file(path, 0, &je);

    if (!want)
        fail_msg("%s: %s", path, je.text);
    json_object_foreach(want, key, v) {
        json_t *g = json_object_get(got, key);
        if (strcmp(key, "torch_dtype") != 0 && (!g || !json_equal(g, v))) {
            char *a = json_dumps(v, JSON_ENCODE_ANY),
                 *b = g ? json_dumps(g, JSON_ENCODE_ANY) : strdup("nothing");
            fail_msg("%s: config '%s' is %s, must be %s", what, key, b, a);
        }
    }
    json_decref(want);
}

static void check_step(const struct ckpt_recipes *recipes, const char *step, const char *expected)
{
    struct ckpt_err err = {0};
    struct ckpt_catalog *src = load(&ckpt_reader_nanotron, step),
                        *want = load(&ckpt_reader_hf, expected);
    struct ckpt_recipe_options opt = {0};
    struct ckpt_model *model;

    if (ckpt_recipe_apply(recipes, src, &opt, &model, &err) < 0)
        fail_msg("%s: %s", step, err.text);
    if (json_array_size(model->catalog->warnings) != json_array_size(src->warnings))
        fail_msg("%s: warning: %s", step,
                 json_string_value(json_array_get(model->catalog->warnings, 0)));
    ckpt_catalog_free(src);
    compare_tensors(step, model->catalog, want);
    char *config = ckpt_asprintf("%s/config.json", expected);
    compare_config(step, model->config, config);
    free(config);
    ckpt_model_free(model);
    ckpt_catalog_free(want);
}

/* <case>/<step>/ against <case>.expected/, or <case>.expected/<step>/ where there are several. */
static void check_case(const struct ckpt_recipes *recipes, const char *root, const char *name)
{
    char *dir = ckpt_asprintf("%s/%s", root, name);
    DIR *d = opendir(dir);
    struct stat st;

    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        if (e->d_name[0] < '0' || e->d_name[0] > '9')
            continue;
        char *step = ckpt_asprintf("%s/%s", dir, e->d_name);
        char *expected = ckpt_asprintf("%s.expected/%s", dir, e->d_name);
        if (stat(expected, &st) < 0) {
            free(expected);
            expected = ckpt_asprintf("%s.expected", dir);
        }
        check_step(recipes, step, expected);
        free(step);
        free(expected);
    }
    closedir(d);
    free(dir);
}

TEST(recipe_nanotron, real_checkpoints_become_their_models)
{
    struct ckpt_err err = {0};
    ckpt_cleanup(ckpt_recipes_freep) struct ckpt_recipes *recipes = NULL;
    char *root = fixtures();

    if (!root)
        skip();
    CHECK_OK(ckpt_recipes_load(NULL, &recipes, &err));
    DIR *d = opendir(root);
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.' && !strchr(e->d_name, '.'))
            check_case(recipes, root, e->d_name);
    closedir(d);
    free(root);
}

TESTS(T(recipe_nanotron, real_checkpoints_become_their_models))
