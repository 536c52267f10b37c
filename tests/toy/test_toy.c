/* SPDX-License-Identifier: Apache-2.0 */
/* A format is one file and one line: toy.c and format/readers.def are all that the library knows of
 * a made-up format, which opens as a run with steps. */
#include "test.h"
#include "tree.h"

#include <ckptfs/ckptfs.h>

#include "format/reader.h"

/* Weights of 4 x 2, element i of which is i + first. */
static void write_weights(const struct tree *t, const char *name, unsigned first)
{
    struct {
        char header[64];
        float data[8];
    } file;

    memset(file.header, ' ', sizeof file.header);
    memcpy(file.header, "model.embed_tokens.weight 4 2\n", 30);
    for (unsigned i = 0; i < 8; i++)
        file.data[i] = (float)(i + first);
    tree_put(t, name, &file, sizeof file);
}

static void write_step(const struct tree *t, unsigned step, bool done)
{
    char at[64], name[128];

    (void)snprintf(at, sizeof at, "saves/step_%u/net", step);
    (void)snprintf(name, sizeof name, "%s/weights.toy", at);
    write_weights(t, name, step);
    (void)snprintf(name, sizeof name, "%s/words/config.json", at);
    tree_text(t, name, "{\"model_type\": \"toy\", \"dtype\": \"float32\"}");
    (void)snprintf(name, sizeof name, "%s/words/tokenizer.json", at);
    tree_text(t, name, "{\"words\": 3}");
    (void)snprintf(name, sizeof name, "%s/words/notes.txt", at);
    tree_text(t, name, "not the model's");
    (void)snprintf(name, sizeof name, "%s/done.toy", at);
    if (done)
        tree_text(t, name, "");
}

static void make_run(struct tree *t)
{
    tree_open(t);
    write_step(t, 5, true);
    write_step(t, 10, true);
    write_step(t, 20, false);
    tree_link(t, "step_5", "saves/best");
    tree_text(t, "saves/newest.toy", "step_5");
}

static struct ckpt_run *open_run(const struct tree *t, struct ckpt_err *err)
{
    struct ckpt_run *run = NULL;

    if (ckpt_run_open(t->path, NULL, &run, err) < 0)
        fail_msg("%s", err->text);
    return run;
}

static bool has_file(const struct ckpt_view *v, const char *name)
{
    return ckpt_view_find(v, name) != NULL;
}

#define CKPT_READER(NAME, ...) +1
enum {
    IN_CORE = 0
#include "../../core/format/readers.def"
};
#undef CKPT_READER

TEST(toy, is_one_line_more_than_the_library_has)
{
    size_t n = 0;
    while (ckpt_reader_list[n])
        n++;
    CHECK_EQ(n, IN_CORE + 1);
    CHECK_STR(ckpt_reader_list[n - 1]->name, "toy");
}

TEST(toy, steps_lie_in_the_inner_folder_and_the_pointer_file_says_which_is_the_latest)
{
    struct ckpt_err err = {0};
    struct ckpt_step *step;
    struct tree t;
    size_t n;
    make_run(&t);
    struct ckpt_run *run = open_run(&t, &err);
    CHECK(ckpt_run_is_folder(run));
    CHECK_OK(ckpt_run_steps(run, &step, &n, &err));
    CHECK_EQ(n, 2); /* one is not finished, and `best` is a link */
    CHECK_STR(step[0].name, "step_5");
    CHECK_STR(step[1].name, "step_10");
    CHECK(step[0].is_latest && !step[1].is_latest);
    ckpt_steps_free(step, n);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(toy, a_step_shows_its_tensor_and_its_side_files)
{
    struct ckpt_err err = {0};
    struct ckpt_tensor_info info = {.size = sizeof info};
    struct ckpt_view *view;
    struct tree t;
    float data[8];
    make_run(&t);
    struct ckpt_run *run = open_run(&t, &err);
    CHECK_OK(ckpt_run_view(run, "step_10", &view, &err));
    CHECK_STR(ckpt_view_source(view), "toy, step step_10");
    CHECK_EQ(ckpt_view_tensors(view), 1);
    (void)ckpt_view_tensor(view, 0, &info, NULL);
    CHECK_STR(info.name, "model.embed_tokens.weight");
    CHECK(info.rank == 2 && info.shape[0] == 4 && info.shape[1] == 2);
    CHECK_OK(ckpt_view_tensor_pread(view, 0, data, sizeof data, 0, &err));
    for (int i = 0; i < 8; i++)
        CHECK(data[i] == (float)(i + 10));
    CHECK(has_file(view, "model.safetensors") && has_file(view, "config.json"));
    CHECK(has_file(view, "tokenizer.json") && !has_file(view, "notes.txt"));
    ckpt_view_release(view);
    ckpt_run_close(run);
    tree_close(&t);
}

/* The text of a view's file; a static buffer. */
static const char *text_of(struct ckpt_view *v, const char *name)
{
    static char text[4096];
    const struct ckpt_node *node = ckpt_view_find(v, name);
    struct ckpt_err err = {0};
    size_t len = 0;

    if (!node || ckpt_node_pread(v, node, text, sizeof text - 1, 0, &len, &err) < 0)
        fail_msg("%s: %s", name, err.text);
    text[len] = '\0';
    return text;
}

/* A view of step_10, which has no config.json, over a base that states float32. */
static struct ckpt_view *open_over_base(const struct tree *t, const char *dtype,
                                        struct ckpt_run **ret_run)
{
    struct ckpt_err err = {0};
    struct ckpt_options *opt;
    struct ckpt_view *view = NULL;
    char base[5000];

    tree_delete(t, "saves/step_10/net/words/config.json");
    tree_text(t, "base/config.json", "{ \"model_type\":\"toy\", \"dtype\":\"float32\" }");
    (void)snprintf(base, sizeof base, "%s/base", t->path);
    TREE_MUST(ckpt_options_new(&opt, &err) == 0);
    TREE_MUST(ckpt_options_set(opt, "base", base, &err) == 0);
    TREE_MUST(ckpt_options_set(opt, "dtype", dtype, &err) == 0);
    if (ckpt_run_open(t->path, opt, ret_run, &err) < 0 ||
        ckpt_run_view(*ret_run, "step_10", &view, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_options_free(opt);
    return view;
}

TEST(toy, the_config_of_a_base_passes_to_the_letter_if_the_tensors_have_its_dtype)
{
    static const struct {
        const char *dtype, *text;
    } cases[] = {{"float32", "{ \"model_type\":\"toy\", \"dtype\":\"float32\" }"},
                 {"bfloat16", "\"dtype\": \"bfloat16\""}};
    for (size_t i = 0; i < 2; i++) {
        struct ckpt_run *run;
        struct tree t;
        make_run(&t);
        struct ckpt_view *view = open_over_base(&t, cases[i].dtype, &run);
        CHECK(strstr(text_of(view, "config.json"), cases[i].text));
        ckpt_view_release(view);
        ckpt_run_close(run);
        tree_close(&t);
    }
}

TEST(toy, the_marker_ends_a_save)
{
    struct ckpt_err err = {0};
    struct tree t;
    bool changed;
    make_run(&t);
    struct ckpt_run *run = open_run(&t, &err);
    write_step(&t, 20, true);
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(!changed);
    tree_text(&t, "saves/step_20/net/done.toy", "again");
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    ckpt_run_close(run);
    tree_close(&t);
}

TESTS(T(toy, is_one_line_more_than_the_library_has),
      T(toy, steps_lie_in_the_inner_folder_and_the_pointer_file_says_which_is_the_latest),
      T(toy, a_step_shows_its_tensor_and_its_side_files),
      T(toy, the_config_of_a_base_passes_to_the_letter_if_the_tensors_have_its_dtype),
      T(toy, the_marker_ends_a_save), )
