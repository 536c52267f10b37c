/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "made_map.h"
#include "model/opening.h"
#include "small_catalog.h"
#include "tensor/value.h"
#include "view/view.h"

static struct small_catalog three_tensors(void)
{
    struct small_catalog c = small_catalog_new();

    (void)small_add(&c, "c", CKPT_BF16, 4, 0);
    (void)small_add(&c, "a", CKPT_F32, 2, 0);
    (void)small_add(&c, "b", CKPT_BF16, 3, 0);
    return c;
}

/* The names of a directory, joined. */
static const char *listing(const struct ckpt_vnode *dir)
{
    static char text[1024];

    text[0] = '\0';
    for (size_t i = 0; i < dir->nchild; i++) {
        (void)strcat(text, dir->child[i]->name);
        (void)strcat(text, dir->child[i]->kind == CKPT_NODE_DIR ? "/ " : " ");
    }
    return text;
}

static const char *content(const struct ckpt_vnode *file)
{
    static char text[4096];
    struct ckpt_err err = {0};
    size_t n;

    if (!file || ckpt_vfile_pread(NULL, file, text, sizeof text - 1, 0, &n, &err) < 0)
        return "";
    text[n] = '\0';
    return text;
}

TEST(vtree, few_tensors_lie_in_one_file)
{
    struct small_catalog c = three_tensors();
    struct ckpt_vtree_options opt = {.mtime_ns = 42};
    struct ckpt_vtree *t;
    const struct ckpt_vnode *file;
    struct ckpt_err err = {0};
    uint64_t off;

    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(listing(ckpt_vtree_root(t)), "model.safetensors ");
    const struct ckpt_vnode *model = ckpt_vtree_find(t, "model.safetensors");
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                         "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]},"
                         "\"c\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[14,22]}}";
    const char *got = content(model);
    size_t padded = (strlen(header) + 7) / 8 * 8;
    CHECK_EQ((unsigned char)got[0], padded);
    CHECK(memcmp(got + 8, header, strlen(header)) == 0);
    CHECK_EQ(model->size, 8 + padded + 22);
    CHECK_EQ(model->mtime_ns, 42);
    static const uint64_t at[] = {14, 0, 8}, source[] = {0, 8, 16};
    for (size_t i = 0; i < 3; i++) {
        ckpt_vtree_place(t, i, &file, &off);
        CHECK(file == model);
        CHECK_EQ(off, 8 + padded + at[i]);
        CHECK_EQ((unsigned char)got[off], small_byte(source[i]));
    }
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, several_files_have_an_index)
{
    struct small_catalog c = three_tensors();
    struct ckpt_vtree_options opt = {.max_shard_size = 8};
    struct ckpt_vtree *t;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(listing(ckpt_vtree_root(t)),
              "model-00001-of-00003.safetensors model-00002-of-00003.safetensors "
              "model-00003-of-00003.safetensors model.safetensors.index.json ");
    CHECK(strstr(content(ckpt_vtree_find(t, "model.safetensors.index.json")),
                 "\"a\": \"model-00002-of-00003.safetensors\",\n"));
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, a_map_for_one_file_under_another_name_has_an_index)
{
    struct small_catalog c = three_tensors();
    struct ckpt_weight_map *one = made_map(json_pack("{s:s}", "a", "weights.safetensors"));
    struct ckpt_weight_map *plain = made_map(json_pack("{s:s}", "a", "model.safetensors"));
    struct ckpt_weight_map *foreign = made_map(json_pack("{s:s}", "z", "z.safetensors"));
    struct ckpt_weight_map *bad = made_map(json_pack("{s:s}", "a", "../y.safetensors"));
    struct ckpt_vtree_options opt = {.weight_map = one};
    struct ckpt_vtree *t;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(listing(ckpt_vtree_root(t)), "model.safetensors.index.json weights.safetensors ");
    ckpt_vtree_free(t);
    opt.weight_map = plain;
    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(listing(ckpt_vtree_root(t)), "model.safetensors ");
    ckpt_vtree_free(t);
    opt.weight_map = foreign; /* of another model: ignored */
    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(listing(ckpt_vtree_root(t)), "model.safetensors ");
    ckpt_vtree_free(t);
    opt.weight_map = bad;
    CHECK_FAILS(ckpt_vtree_new(c.cat, &opt, &t, &err), CKPT_FORMAT, "../y.safetensors");
    ckpt_weight_map_unref(one);
    ckpt_weight_map_unref(plain);
    ckpt_weight_map_unref(foreign);
    ckpt_weight_map_unref(bad);
    small_catalog_free(&c);
}

/* The facts that hold for most types; they live as long as the test. */
static const struct ckpt_type *any_type(void)
{
    static struct ckpt_recipes *recipes;
    struct ckpt_err err = {0};

    if (!recipes && ckpt_recipes_load(NULL, &recipes, &err) < 0)
        abort();
    return ckpt_types_any(ckpt_recipes_types(recipes));
}

TEST(vtree, configs_are_written_as_transformers_does)
{
    struct small_catalog c = three_tensors();
    json_t *config =
        json_pack("{s:s, s:f, s:n}", "model_type", "llama", "eps", 1e-5, "bos_token_id");
    json_t *generation = NULL;
    struct ckpt_err err = {0};
    struct ckpt_vtree *t;

    CHECK_OK(ckpt_generation_config(config, any_type(), &generation, &err));
    struct ckpt_vtree_options opt = {.config = config, .generation = generation};
    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_STR(content(ckpt_vtree_find(t, "config.json")),
              "{\n  \"bos_token_id\": null,\n  \"eps\": 1e-05,\n  \"model_type\": \"llama\"\n}\n");
    CHECK_STR(content(ckpt_vtree_find(t, "generation_config.json")),
              "{\n  \"_from_model_config\": true,\n  \"output_attentions\": false,\n"
              "  \"output_hidden_states\": false,\n  \"use_cache\": true\n}\n");
    ckpt_vtree_free(t);
    json_decref(config);
    json_decref(generation);
    small_catalog_free(&c);
}

TEST(vtree, generation_config_takes_what_the_config_says)
{
    json_t *config = json_pack("{s:i, s:[i,i], s:n, s:b, s:b, s:s, s:{s:i, s:i}}", "bos_token_id",
                               1, "eos_token_id", 2, 3, "pad_token_id", "use_cache", 0,
                               "output_attentions", 1, "transformers_version", "5.0.0",
                               "text_config", "pad_token_id", 7, "bos_token_id", 8);
    ckpt_cleanup(ckpt_json_decrefp) json_t *g = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_generation_config(config, any_type(), &g, &err));
    CHECK_OK(ckpt_json_dump(g, CKPT_JSON_COMPACT, true, &text, NULL, &err));
    CHECK(strstr(text, "\"bos_token_id\":1") && strstr(text, "\"pad_token_id\":7"));
    CHECK(strstr(text, "\"use_cache\":false") && strstr(text, "\"output_attentions\":true"));
    CHECK(strstr(text, "\"return_dict_in_generate\":true"));
    CHECK(strstr(text, "\"transformers_version\":\"5.0.0\""));
    json_decref(config);
}

/* Side files of these paths, each with its path as content; the error is in err. */
static struct ckpt_vtree *with_side(const struct small_catalog *c, const char *const *path,
                                    size_t n, struct ckpt_err *err)
{
    struct ckpt_side_file side[16];
    json_t *config = json_pack("{s:i}", "n", 1);
    struct ckpt_vtree_options opt = {.config = config, .side = side, .nside = n};
    struct ckpt_vtree *t = NULL;

    for (size_t i = 0; i < n; i++) {
        side[i].path = path[i];
        assert_int_equal(
            ckpt_source_mem_new(path[i], path[i], strlen(path[i]), &side[i].source, err), 0);
    }
    (void)ckpt_vtree_new(c->cat, &opt, &t, err);
    for (size_t i = 0; i < n; i++)
        ckpt_source_unref(side[i].source);
    json_decref(config);
    return t;
}

#define SIDE(...)                                                                                  \
    with_side(&c, (const char *const[]){__VA_ARGS__},                                              \
              sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *), &err)

TEST(vtree, side_files_make_directories)
{
    struct small_catalog c = three_tensors();
    struct ckpt_err err = {0};
    struct ckpt_vtree *t = SIDE("tokenizer.json", "z/y/deep.py", "a-b", "a/b", "a/a", "z/x", "a.b");

    CHECK(t);
    CHECK_STR(listing(ckpt_vtree_root(t)),
              "a/ a-b a.b config.json model.safetensors tokenizer.json z/ ");
    CHECK_STR(listing(ckpt_vtree_find(t, "a")), "a b ");
    CHECK_STR(listing(ckpt_vtree_find(t, "z")), "x y/ ");
    CHECK_STR(content(ckpt_vtree_find(t, "z/y/deep.py")), "z/y/deep.py");
    CHECK_EQ(ckpt_vtree_find(t, "a/b")->size, 3);
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, paths_that_are_not_there_are_not_found)
{
    struct small_catalog c = three_tensors();
    struct ckpt_err err = {0};
    struct ckpt_vtree *t = SIDE("a/b", "x");

    CHECK(t && ckpt_vtree_find(t, "") == ckpt_vtree_root(t));
    CHECK(ckpt_vtree_find(t, "a/b") && ckpt_vtree_find(t, "a"));
    static const char *const absent[] = {"/",    "a/", "a//b",   "/a",
                                         "a/c",  "b",  "a/b/",   "x/y",
                                         "mode", "..", "a/../x", "model.safetensorsX"};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        CHECK(!ckpt_vtree_find(t, absent[i]));
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, generated_files_go_before_side_files)
{
    struct small_catalog c = three_tensors();
    struct ckpt_err err = {0};
    struct ckpt_vtree *t = SIDE("config.json", "generation_config.json", "model.safetensors",
                                "model.safetensors.index.json", "sub/config.json");

    CHECK(t);
    CHECK_STR(listing(ckpt_vtree_root(t)),
              "config.json generation_config.json model.safetensors sub/ ");
    CHECK_STR(content(ckpt_vtree_find(t, "config.json")), "{\n  \"n\": 1\n}\n");
    CHECK_STR(content(ckpt_vtree_find(t, "generation_config.json")), "generation_config.json");
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, side_files_that_hide_one_another_are_refused)
{
    struct small_catalog c = three_tensors();
    struct ckpt_err err = {0};

    CHECK(!SIDE("a", "a") && err.code == CKPT_CONFLICT);
    err = (struct ckpt_err){0};
    CHECK(!SIDE("a/b", "a", "a-") && err.code == CKPT_CONFLICT);
    err = (struct ckpt_err){0};
    CHECK(!SIDE("config.json/x") && err.code == CKPT_CONFLICT);
    CHECK(strstr(err.text, "'config.json' and 'config.json/x'"));
    small_catalog_free(&c);
}

TEST(vtree, side_paths_are_plain)
{
    static const char *const bad[] = {"", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/."};
    struct small_catalog c = three_tensors();
    char *name = calloc(1, 8192);

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct ckpt_err err = {0};
        CHECK(!SIDE(bad[i]) && err.code == CKPT_FORMAT);
    }
    for (size_t len = 255; len <= 256; len++) { /* NAME_MAX */
        struct ckpt_err err = {0};
        memset(name, 'n', len);
        struct ckpt_vtree *t = SIDE(name);
        CHECK(!t == (len == 256));
        ckpt_vtree_free(t);
    }
    for (size_t i = 0; i < 4000; i++) /* depth */
        name[i] = i % 2 ? '/' : 'd';
    name[3999] = '\0';
    struct ckpt_err err = {0};
    CHECK(!SIDE(name) && err.code == CKPT_FORMAT);
    free(name);
    small_catalog_free(&c);
}

TEST(vtree, names_that_no_safetensors_file_can_hold_are_refused)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_vtree_options opt = {0};
    struct ckpt_vtree *t;
    struct ckpt_err err = {0};

    (void)small_add(&c, "a\xff", CKPT_U8, 1, 0);
    CHECK_FAILS(ckpt_vtree_new(c.cat, &opt, &t, &err), CKPT_FORMAT, "UTF-8");
    small_catalog_free(&c);
}

TEST(vtree, without_tensors_there_is_no_model_file)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_err err = {0};
    struct ckpt_vtree *t = SIDE("model.safetensors.index.json", "x");

    CHECK(t);
    CHECK_STR(listing(ckpt_vtree_root(t)), "config.json model.safetensors.index.json x ");
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

TEST(vtree, empty_and_cast_tensors_have_their_place)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_vtree_options opt = {0};
    struct ckpt_vtree *t;
    const struct ckpt_vnode *file;
    struct ckpt_err err = {0};
    uint64_t off[4];

    for (int i = 0; i < 4; i++)
        (void)small_add(&c, (const char[]){(char)('a' + i), 0}, CKPT_F32, i % 2 ? 0 : 5, 0);
    CHECK_OK(ckpt_value_cast(c.cat, 2, CKPT_F16, &err));
    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    for (size_t i = 0; i < 4; i++)
        ckpt_vtree_place(t, i, &file, &off[i]);
    CHECK(off[1] == off[0] + 20 && off[3] == off[1] && off[2] == off[3]);
    CHECK_EQ(file->size, off[2] + 10);
    CHECK(strstr(content(file) + 8,
                 "\"c\":{\"dtype\":\"F16\",\"shape\":[5],\"data_offsets\":[20,30]}}"));
    ckpt_vtree_free(t);
    small_catalog_free(&c);
}

/* Two files of 16 bytes in a directory of their own, modified at 1000 and 2000 s. */
struct two_files {
    char path[64];
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    struct ckpt_source *source[2];
};

static void set_mtime(const struct two_files *f, const char *name, int64_t s)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", f->path, name);
    assert_int_equal(utimensat(AT_FDCWD, path, (struct timespec[2]){{s, 5}, {s, 5}}, 0), 0);
}

static void two_files_init(struct two_files *f)
{
    struct ckpt_err err = {0};

    (void)strcpy(f->path, "/tmp/test_vtree.XXXXXX");
    assert_non_null(mkdtemp(f->path));
    assert_int_equal(ckpt_dir_open(f->path, CKPT_LINKS_BENEATH, &f->dir, &err), 0);
    assert_int_equal(ckpt_fdpool_new(0, &f->pool, &err), 0);
    for (int i = 0; i < 2; i++) {
        char path[128], name[2] = {(char)('0' + i), 0};
        (void)snprintf(path, sizeof path, "%s/%s", f->path, name);
        int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
        assert_int_equal(write(fd, "0123456789abcdef", 16), 16);
        (void)close(fd);
        set_mtime(f, name, 1000 * (i + 1));
        assert_int_equal(ckpt_source_file_new(f->dir, name, f->pool, &f->source[i], &err), 0);
    }
}

static void two_files_release(struct two_files *f)
{
    for (int i = 0; i < 2; i++) {
        char path[128];
        (void)snprintf(path, sizeof path, "%s/%d", f->path, i);
        (void)unlink(path);
        ckpt_source_unref(f->source[i]);
    }
    (void)rmdir(f->path);
    ckpt_fdpool_unref(f->pool);
    ckpt_dir_unref(f->dir);
}

TEST(vtree, files_are_as_old_as_what_they_are_made_of)
{
    struct two_files f;
    struct small_catalog c = three_tensors();
    struct ckpt_err err = {0};
    struct ckpt_vtree *t;
    char buf[16];
    size_t n;

    two_files_init(&f);
    for (size_t i = 0; i < 2; i++) { /* "c" from file 0, "a" (cast) from file 1 */
        uint32_t source = ckpt_catalog_add_source(c.cat, f.source[i], &err);
        ((struct ckpt_piece *)c.cat->tensors.ptr[i].piece)->source = source;
    }
    CHECK_OK(ckpt_value_cast(c.cat, 1, CKPT_BF16, &err));
    json_t *config = json_object();
    struct ckpt_side_file side = {"side", f.source[0]};
    struct ckpt_vtree_options opt = {
        .config = config, .side = &side, .nside = 1, .mtime_ns = 7, .max_shard_size = 8};
    CHECK_OK(ckpt_vtree_new(c.cat, &opt, &t, &err));
    CHECK_EQ(ckpt_vtree_root(t)->child[1]->mtime_ns, INT64_C(1000000000005)); /* c */
    CHECK_EQ(ckpt_vtree_root(t)->child[2]->mtime_ns, INT64_C(2000000000005)); /* a */
    CHECK_EQ(ckpt_vtree_find(t, "side")->mtime_ns, INT64_C(1000000000005));
    CHECK_EQ(ckpt_vtree_find(t, "config.json")->mtime_ns, 7);
    CHECK_OK(ckpt_vfile_pread(NULL, ckpt_vtree_find(t, "side"), buf, sizeof buf, 0, &n, &err));
    CHECK(n == 16 && memcmp(buf, "0123456789abcdef", 16) == 0);
    set_mtime(&f, "0", 3000);
    CHECK_FAILS(ckpt_vfile_pread(NULL, ckpt_vtree_find(t, "side"), buf, sizeof buf, 0, &n, &err),
                CKPT_STALE, "side: ");
    ckpt_vtree_free(t);
    json_decref(config);
    small_catalog_free(&c);
    two_files_release(&f);
}

TESTS(T(vtree, files_are_as_old_as_what_they_are_made_of), T(vtree, few_tensors_lie_in_one_file),
      T(vtree, several_files_have_an_index),
      T(vtree, a_map_for_one_file_under_another_name_has_an_index),
      T(vtree, configs_are_written_as_transformers_does),
      T(vtree, generation_config_takes_what_the_config_says), T(vtree, side_files_make_directories),
      T(vtree, paths_that_are_not_there_are_not_found),
      T(vtree, generated_files_go_before_side_files),
      T(vtree, side_files_that_hide_one_another_are_refused), T(vtree, side_paths_are_plain),
      T(vtree, names_that_no_safetensors_file_can_hold_are_refused),
      T(vtree, without_tensors_there_is_no_model_file),
      T(vtree, empty_and_cast_tensors_have_their_place))
