/* SPDX-License-Identifier: Apache-2.0 */
/* Runs: steps, the latest, views that come and go. */
#include <pthread.h>

#include "test.h"

#include <ckptfs/ckptfs.h>

#include "base/json.h"
#include "base/option.h"
#include "base/str.h"
#include "format/writer.h"
#include "model/options.h"
#include "tree.h"

static struct ckpt_options *raw(void)
{
    struct ckpt_options *opt;
    struct ckpt_err err = {0};
    TREE_MUST(ckpt_options_new(&opt, &err) == 0);
    TREE_MUST(ckpt_options_set(opt, "view", "raw", &err) == 0);
    return opt;
}

static struct ckpt_run *open_run(const struct tree *t, const char *below)
{
    struct ckpt_options *opt = raw();
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    char path[5000];
    (void)snprintf(path, sizeof path, "%s%s", t->path, below);
    if (ckpt_run_open(path, opt, &run, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_options_free(opt);
    return run;
}

static void keep_line(void *text, enum ckpt_log_severity severity, const char *line)
{
    (void)severity;
    (void)strncat(strncat(text, line, 900), "\n", 2);
}

/* Open the folder; messages are appended to the text, which has room for 2048 bytes. */
static struct ckpt_run *open_logged(const struct tree *t, char *log)
{
    struct ckpt_options *opt = raw();
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    ckpt_options_set_log(opt, keep_line, log);
    if (ckpt_run_open(t->path, opt, &run, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_options_free(opt);
    return run;
}

/* "2 10* 100": names in order, a star on the latest. */
static const char *steps(struct ckpt_run *run)
{
    static char text[256];
    struct ckpt_step *s;
    struct ckpt_err err = {0};
    size_t n;
    TREE_MUST(ckpt_run_steps(run, &s, &n, &err) == 0);
    text[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        (void)strcat(strcat(text, i ? " " : ""), s[i].name);
        (void)strcat(text, s[i].is_latest ? "*" : "");
    }
    ckpt_steps_free(s, n);
    return text;
}

TEST(run, steps_are_in_natural_order_and_latest_txt_decides)
{
    struct ckpt_err err = {0};
    struct tree t;
    bool changed;
    tree_open(&t);
    nt_checkpoint(&t, "100/");
    nt_checkpoint(&t, "2/");
    nt_checkpoint(&t, "10/");
    tree_text(&t, "notes/readme", "x");
    struct ckpt_run *run = open_run(&t, "");
    CHECK(ckpt_run_is_folder(run));
    CHECK_STR(steps(run), "2 10 100*");
    tree_text(&t, "latest.txt", "10");
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(steps(run), "2 10* 100");
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(!changed);
    ckpt_run_close(run);
    tree_close(&t);
}

/* Set the times of a step's folder and of all that is in it. */
static void set_time(const struct tree *t, const char *step, long seconds)
{
    char command[5000];
    (void)snprintf(command, sizeof command, "find '%s/%s' -exec touch -d @%ld {} +", t->path, step,
                   seconds);
    TREE_MUST(system(command) == 0);
}

TEST(run, the_latest_is_the_highest_number_or_the_newest_word)
{
    static const struct {
        const char *names[6], *steps, *note;
    } cases[] = {
        /* the first is the newest */
        {{"checkpoint-best", "checkpoint-9", "checkpoint-100", "checkpoint-10"},
         "checkpoint-best checkpoint-9 checkpoint-10 checkpoint-100*",
         NULL},
        {{"b", "c", "a"}, "a c b*", "newest save is the latest, 'b'"},
        {{"last2x", "step1000-unsharded", "step900-unsharded"},
         "last2x step900-unsharded step1000-unsharded*",
         NULL},
        {{"step_3", "epoch_200", "step_1", "epoch_30"},
         "step_1 step_3 epoch_30 epoch_200*",
         "highest number is the latest, 'epoch_200'"},
        {{"epoch_3", "step_200", "10"}, "epoch_3 10 step_200*", NULL},
        {{"0000009", "0000010"}, "0000009 0000010*", NULL},
        /* a fraction is a metric or a version */
        {{"best_0.91", "checkpoint-10"}, "best_0.91 checkpoint-10*", NULL},
        {{"best_0.91", "best_0.95", "checkpoint-10", "v1.10", "v1.9"},
         "best_0.91 best_0.95 v1.9 v1.10 checkpoint-10*",
         "highest number is the latest, 'checkpoint-10'"},
        {{"last", "epoch=1-step=20-loss=0.53"},
         "epoch=1-step=20-loss=0.53 last*",
         "newest save is the latest, 'last'"},
        {{"epoch=2-step=30-loss=0.40", "epoch=1-step=20-loss=0.53", "last"},
         "last epoch=1-step=20-loss=0.53 epoch=2-step=30-loss=0.40*",
         NULL},
        {{"99999999999999999999999", "100000000000000000000000"},
         "99999999999999999999999 100000000000000000000000*",
         NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tree t;
        char at[64], log[2048] = "";
        tree_open(&t);
        for (size_t k = 0; cases[i].names[k]; k++) {
            (void)snprintf(at, sizeof at, "%s/", cases[i].names[k]);
            nt_checkpoint(&t, at);
            set_time(&t, cases[i].names[k], 1700000000 - 100 * (long)k);
        }
        struct ckpt_run *run = open_logged(&t, log);
        CHECK_STR(steps(run), cases[i].steps);
        if (cases[i].note)
            CHECK(strstr(log, cases[i].note) != NULL);
        else
            CHECK_STR(log, "");
        ckpt_run_close(run);
        tree_close(&t);
    }
}

TEST(run, a_link_to_another_step_is_a_second_name_of_it)
{
    struct ckpt_step_link *link;
    struct ckpt_err err = {0};
    struct ckpt_view *v, *w;
    struct tree t;
    char *name;
    size_t n;
    bool changed;
    tree_open(&t);
    nt_checkpoint(&t, "step-9/");
    nt_checkpoint(&t, "step-10/");
    nt_checkpoint(&t, "elsewhere/steps/11/");
    tree_link(&t, "elsewhere/steps/11", "step-8"); /* of one folder elsewhere, both are steps */
    tree_link(&t, "step-9", "best");
    tree_link(&t, "best", "step-99");
    tree_link(&t, "step-10", "latest");
    tree_link(&t, "elsewhere/steps/11", "step-11");
    tree_text(&t, "notes/readme", "x");
    tree_link(&t, "notes", "other");
    struct ckpt_run *run = open_run(&t, "");
    CHECK_STR(steps(run), "step-8 step-9 step-10 step-11*");
    CHECK_OK(ckpt_run_links(run, &link, &n, &err));
    CHECK_EQ(n, 2);
    CHECK_STR(link[0].name, "best");
    CHECK_STR(link[0].step, "step-9");
    CHECK_STR(link[1].name, "step-99");
    CHECK_STR(link[1].step, "step-9");
    ckpt_step_links_free(link, n);
    CHECK_OK(ckpt_run_find_step(run, "best", &name, &err));
    CHECK_STR(name, "step-9");
    free(name);
    CHECK_OK(ckpt_run_view(run, "best", &v, &err));
    CHECK_OK(ckpt_run_view(run, "step-9", &w, &err));
    CHECK(v == w);
    ckpt_view_release(v);
    ckpt_view_release(w);
    tree_delete(&t, "latest");
    tree_text(&t, "latest", "best"); /* DeepSpeed's pointer file names the link */
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(steps(run), "step-8 step-9* step-10 step-11");
    tree_delete(&t, "best");
    tree_link(&t, "step-10", "best"); /* a link that has moved is a change */
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(steps(run), "step-8 step-9 step-10* step-11");
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(run, a_folder_that_is_named_as_unfinished_is_no_step)
{
    static const char *const names[] = {
        "tmp-checkpoint-20", "checkpoint-30.tmp", "checkpoint-30_incomplete",
        "50.tmp.1234",       "60_partial",        "70.orbax-checkpoint-tmp-80",
        "90-unfinished",
    };
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    struct tree t;
    char at[64], log[2048] = "";
    tree_open(&t);
    nt_checkpoint(&t, "checkpoint-10/");
    nt_checkpoint(&t, "tmpl-9/");         /* another word */
    nt_checkpoint(&t, "partial_tune-8/"); /* a part of the model was trained */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        (void)snprintf(at, sizeof at, "%s/", names[i]);
        nt_checkpoint(&t, at);
    }
    tree_link(&t, "checkpoint-30.tmp", "newest-40");
    tree_text(&t, "tmp-data/readme", "x");
    run = open_logged(&t, log);
    CHECK_STR(steps(run), "partial_tune-8 tmpl-9 checkpoint-10*");
    CHECK(strstr(log, "'tmp-checkpoint-20' is no step") || strstr(log, "is no step: its name"));
    CHECK(strstr(log, "(and 6 more)") != NULL);
    ckpt_run_close(run);
    (void)renameat(t.fd, "checkpoint-30.tmp", t.fd, "checkpoint-30");
    run = open_run(&t, "");
    CHECK_STR(steps(run), "partial_tune-8 tmpl-9 checkpoint-10 checkpoint-30*");
    ckpt_run_close(run);
    tree_close(&t);

    tree_open(&t); /* alone, it is what the error names */
    nt_checkpoint(&t, "tmp-checkpoint-20/");
    CHECK_FAILS(ckpt_run_open(t.path, NULL, &run, &err), CKPT_MISSING,
                "the save of tmp-checkpoint-20 (nanotron)");
    tree_close(&t);
}

TEST(run, a_struct_whose_size_is_not_set_is_named)
{
    struct ckpt_tensor_info info = {0};
    struct ckpt_change change = {0};
    struct ckpt_stats stats = {0};
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    nt_checkpoint(&t, "7/");
    struct ckpt_run *run = open_run(&t, "");
    CHECK_OK(ckpt_run_view(run, NULL, &v, &err));
    CHECK_FAILS(ckpt_view_tensor(v, 0, &info, &err), CKPT_USAGE,
                "struct ckpt_tensor_info has size 0");
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_run_stats(run, &stats, &err), CKPT_USAGE, "struct ckpt_stats has size 0");
    err = (struct ckpt_err){0};
    const struct ckpt_changes_form *form = ckpt_changes_form_at(0), other = *form;
    CHECK_FAILS(ckpt_view_change(v, v, 0, form, false, &change, &err), CKPT_USAGE,
                "struct ckpt_change has size 0");
    change.size = sizeof change;
    err = (struct ckpt_err){0};
    CHECK_FAILS(ckpt_view_change(v, v, 0, &other, false, &change, &err), CKPT_USAGE,
                "not one of ckpt_changes_form_at");
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

/* The error of opening the newest view with part=, "" if there is none. */
static const char *with_part(const struct tree *t, const char *below, const char *part)
{
    static struct ckpt_err err;
    struct ckpt_options *opt = raw();
    struct ckpt_run *run = NULL;
    struct ckpt_view *v = NULL;
    char path[5000];
    err = (struct ckpt_err){0};
    TREE_MUST(ckpt_options_set(opt, "part", part, &err) == 0);
    (void)snprintf(path, sizeof path, "%s%s", t->path, below);
    if (ckpt_run_open(path, opt, &run, &err) == 0 && ckpt_run_view(run, NULL, &v, &err) == 0)
        ckpt_view_release(v);
    if (run)
        ckpt_run_close(run);
    ckpt_options_free(opt);
    return err.text;
}

TEST(run, a_step_is_a_folder_with_one_model_in_it)
{
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    struct tree t;
    bool changed;
    tree_open(&t);
    nt_checkpoint(&t, "step_9/policy/weights/");
    nt_checkpoint(&t, "step_9/policy/optimizer/"); /* a trainer's state is no model */
    tree_text(&t, "step_9/training_info.json", "{}");
    nt_checkpoint(&t, "step_10/policy/weights/");
    nt_checkpoint(&t, "step_11/a/b/weights/"); /* is too deep */
    nt_checkpoint(&t, "notes/weights/");       /* is not named like a step */
    nt_checkpoint(&t, "ckpt-run-v2/weights/");
    nt_checkpoint(&t, "exp1/step_3/"); /* is another run */
    struct ckpt_run *run = open_run(&t, "");
    CHECK_STR(steps(run), "step_9 step_10*");
    CHECK_OK(ckpt_run_view(run, "step_9", &v, &err));
    CHECK_EQ(ckpt_view_tensors(v), 3);
    ckpt_view_release(v);
    nt_checkpoint(&t, "step_12/policy/weights/");
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(steps(run), "step_9 step_10 step_12*");
    ckpt_run_close(run);

    run = open_run(&t, "/step_9"); /* the step itself */
    CHECK(!ckpt_run_is_folder(run));
    CHECK_OK(ckpt_run_view(run, NULL, &v, &err));
    CHECK_EQ(ckpt_view_tensors(v), 3);
    ckpt_view_release(v);
    ckpt_run_close(run);

    tree_text(&t, "flax/1000/flax_model.msgpack", "");
    CHECK(strstr(with_part(&t, "/flax", "nothing"), "a Flax model"));

    nt_checkpoint(&t, "step_13/value/weights/");
    nt_checkpoint(&t, "step_13/student/");
    CHECK(strstr(with_part(&t, "", "nothing"), "two models, 'student' and 'value/weights'"));
    CHECK(strstr(with_part(&t, "/step_13", "nothing"), "choose one with -o part=student"));
    CHECK_STR(with_part(&t, "", "value/weights"), "");
    CHECK_STR(with_part(&t, "/step_13", "student"), "");
    CHECK(strstr(with_part(&t, "/step_9", "student"), "part=student is neither a folder"));
    CHECK_STR(with_part(&t, "/step_9", "model"), ""); /* the beginning of names */
    tree_close(&t);
}

TEST(run, a_model_beside_steps_says_so)
{
    struct tree t;
    char log[2048] = "";
    tree_open(&t);
    tree_text(&t, "config.json", "{\"model_type\":\"llama\"}");
    tree_st(&t, "model.safetensors",
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    nt_checkpoint(&t, "checkpoint-5/");
    struct ckpt_run *run = open_logged(&t, log);
    CHECK(!ckpt_run_is_folder(run));
    CHECK(strstr(log, "in the same folder are 1 steps, the latest"));
    CHECK(strstr(log, "/checkpoint-5': to see a step, give its path"));
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(run, an_unfinished_step_is_hidden_until_it_is_complete)
{
    struct ckpt_err err = {0};
    struct tree t;
    bool changed;
    tree_open(&t);
    nt_checkpoint(&t, "1/");
    nt_checkpoint(&t, "2/");
    tree_delete(&t, "2/model_config.json");
    tree_text(&t, "2/config.yaml", "model: {model_config: {}}\n");
    tree_text(&t, "latest.txt", "1");
    struct ckpt_run *run = open_run(&t, "");
    CHECK_STR(steps(run), "1*");
    tree_text(&t, "2/model_config.json", "{}");
    tree_text(&t, "latest.txt", "2");
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(steps(run), "1 2*");
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(run, a_single_checkpoint_is_one_step_without_a_name)
{
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    nt_checkpoint(&t, "7/");
    struct ckpt_run *run = open_run(&t, "/7");
    CHECK(!ckpt_run_is_folder(run));
    CHECK_STR(steps(run), "*");
    CHECK_OK(ckpt_run_view(run, NULL, &v, &err));
    CHECK_EQ(ckpt_view_tensors(v), 3);
    ckpt_run_close(run);
    CHECK_EQ(ckpt_view_tensors(v), 3); /* a view outlives its run */
    ckpt_view_release(v);
    tree_close(&t);
}

TEST(run, the_newest_view_that_can_be_read_is_taken_or_the_newest_error)
{
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    nt_checkpoint(&t, "1/");
    nt_checkpoint(&t, "2/");
    tree_text(&t, "2/model/model/norm/model_weight.safetensors", "");
    struct ckpt_run *run = open_run(&t, "");
    CHECK_FAILS(ckpt_run_view(run, NULL, &v, &err), CKPT_FORMAT, "2/model/model/norm");
    CHECK_FAILS(ckpt_run_view(run, "3", &v, &err), CKPT_MISSING, "no step '3'");
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_newest_view(run, &v, &err));
    ckpt_view_release(v);
    tree_text(&t, "1/model/model/norm/model_weight.safetensors", "");
    ckpt_run_close(run);
    run = open_run(&t, "");
    CHECK_FAILS(ckpt_run_newest_view(run, &v, &err), CKPT_FORMAT, "2/model/model/norm");
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(run, a_generation_lasts_until_the_step_is_saved_again)
{
    uint64_t generation[3];
    struct tree t;
    tree_open(&t);
    nt_checkpoint(&t, "1/");
    for (int i = 0; i < 3; i++) {
        struct ckpt_err err = {0};
        struct ckpt_view *v;
        if (i == 2)
            nt_checkpoint(&t, "1/");
        struct ckpt_run *run = open_run(&t, "");
        CHECK_OK(ckpt_run_view(run, "1", &v, &err));
        generation[i] = ckpt_view_generation(v);
        ckpt_view_release(v);
        ckpt_run_close(run);
    }
    CHECK(generation[0] == generation[1]);
    CHECK(generation[0] != generation[2]);
    tree_close(&t);
}

static size_t open_files(struct ckpt_run *run)
{
    struct ckpt_stats stats = {.size = sizeof stats};
    (void)ckpt_run_stats(run, &stats, NULL);
    return (size_t)stats.open_files;
}

TEST(run, views_that_nobody_holds_are_freed)
{
    enum { N = 8, FILES = 5 }; /* shard files of a step */
    struct ckpt_err err = {0};
    struct ckpt_view *v[N];
    struct tree t;
    tree_open(&t);
    for (int i = 0; i < N; i++) {
        char at[16];
        (void)snprintf(at, sizeof at, "%d/", i);
        nt_checkpoint(&t, at);
    }
    struct ckpt_run *run = open_run(&t, "");
    for (int i = 0; i < N; i++) {
        char step[16];
        (void)snprintf(step, sizeof step, "%d", i);
        CHECK_OK(ckpt_run_view(run, step, &v[i], &err));
    }
    CHECK_EQ(open_files(run), N * FILES);
    for (int i = 0; i < N; i++)
        ckpt_view_release(v[i]);
    CHECK_OK(ckpt_run_view(run, "0", &v[0], &err));
    CHECK(open_files(run) <= 3 * FILES);
    struct ckpt_view *again;
    CHECK_OK(ckpt_run_view(run, "0", &again, &err));
    CHECK(again == v[0]);
    ckpt_view_release(again);
    ckpt_view_release(v[0]);
    ckpt_run_close(run);
    tree_close(&t);
}

/* ---- several at once, of a run with a base and options: TSan sees what they share ---- */

enum { AT_ONCE = 4 };

struct opening {
    struct ckpt_run *run;
    const char *step;
    int rc;
    struct ckpt_err err;
};

static void *open_one(void *arg)
{
    struct opening *o = arg;
    struct ckpt_view *view = NULL;

    o->rc = ckpt_run_view(o->run, o->step, &view, &o->err);
    ckpt_view_release(view);
    return NULL;
}

static void shell(const char *fmt, ...)
{
    char command[12000];
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(command, sizeof command, fmt, args);
    va_end(args);
    TREE_MUST(system(command) == 0);
}

/* An index as a hub's model has it, of all tensors of a view. */
static void put_index(const struct tree *t, struct ckpt_view *view)
{
    struct ckpt_str text = {0};

    ckpt_str_puts(&text, "{\"weight_map\": {");
    for (size_t i = 0; i < ckpt_view_tensors(view); i++) {
        struct ckpt_tensor_info info = {.size = sizeof info};
        (void)ckpt_view_tensor(view, i, &info, NULL);
        ckpt_str_printf(&text, "%s\"%s\": \"model-00001-of-00001.safetensors\"", i ? ", " : "",
                        info.name);
    }
    ckpt_str_puts(&text, "}}");
    tree_text(t, "base/model.safetensors.index.json", ckpt_str_get(&text));
    ckpt_str_release(&text);
}

TEST(run, steps_are_opened_at_once_with_one_base)
{
    static const char *const name[AT_ONCE] = {"10", "20", "30", "40"};
    const char *source = getenv("CKPTFS_SOURCE");
    struct opening o[AT_ONCE];
    pthread_t thread[AT_ONCE];
    struct ckpt_options *opt;
    struct ckpt_view *view;
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    char path[5000];
    struct tree t;
    tree_open(&t);
    tree_dirs(&t, "run/");
    tree_dirs(&t, "base/");
    source = source ? source : ".";
    for (int i = 0; i < AT_ONCE; i++)
        shell("cp -r '%s/tests/golden/nanotron/llama_tp2_pp2_tied/10' '%s/run/%s'", source, t.path,
              name[i]);
    shell("cp '%s/tests/golden/nanotron/llama_tp2_pp2_tied.expected/config.json' '%s/base'", source,
          t.path);
    CHECK_OK(ckpt_options_new(&opt, &err));
    (void)snprintf(path, sizeof path, "%s/base", t.path);
    for (int round = 0; round < 2; round++) { /* without and with a weight map */
        (void)snprintf(path, sizeof path, "%s/base", t.path);
        CHECK_OK(ckpt_options_set(opt, "base", path, &err));
        CHECK_OK(ckpt_options_set(opt, "rope_theta", "10000.0", &err));
        (void)snprintf(path, sizeof path, "%s/run", t.path);
        CHECK_OK(ckpt_run_open(path, opt, &run, &err));
        for (int i = 0; i < AT_ONCE; i++) {
            o[i] = (struct opening){.run = run, .step = name[i]};
            CHECK_EQ(pthread_create(&thread[i], NULL, open_one, &o[i]), 0);
        }
        for (int i = 0; i < AT_ONCE; i++) {
            (void)pthread_join(thread[i], NULL);
            if (o[i].rc < 0)
                fail_msg("%s: %s", name[i], o[i].err.text);
        }
        CHECK_OK(ckpt_run_view(run, "10", &view, &err));
        put_index(&t, view);
        ckpt_view_release(view);
        ckpt_run_close(run);
    }
    ckpt_options_free(opt);
    tree_close(&t);
}

static unsigned times(const char *text, const char *word)
{
    unsigned n = 0;

    while ((text = strstr(text, word))) {
        n++;
        text += strlen(word);
    }
    return n;
}

TEST(run, an_error_names_each_file_once)
{
    static const char shard[] = "model_weight.safetensors", file[] = "model.safetensors";
    const char *source = getenv("CKPTFS_SOURCE");
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    struct ckpt_view *view;
    char path[5000], buf[4096];
    struct tree t;
    size_t got = 1;
    tree_open(&t);
    shell("cp -r '%s/tests/golden/nanotron/llama_tp2_pp2_tied/10' '%s/run'", source ? source : ".",
          t.path);
    (void)snprintf(path, sizeof path, "%s/run", t.path);
    CHECK_OK(ckpt_run_open(path, NULL, &run, &err));
    CHECK_OK(ckpt_run_view(run, NULL, &view, &err));
    shell("find '%s/run' -name '%s' -exec truncate -s -2 {} +", t.path, shard);
    const struct ckpt_node *node = ckpt_view_find(view, file);
    int rc = 0;
    for (uint64_t off = 0; rc == 0 && got; off += got)
        rc = ckpt_node_pread(view, node, buf, sizeof buf, off, &got, &err);
    CHECK_EQ(rc, -1);
    if (times(err.text, shard) != 1 || times(err.text, file) != 1)
        fail_msg("%s", err.text);
    ckpt_view_release(view);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(run, nothing_to_see_is_an_error)
{
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    struct tree t;
    tree_open(&t);
    CHECK_FAILS(ckpt_run_open(t.path, NULL, &run, &err), CKPT_MISSING, "neither a checkpoint");
    CHECK_FAILS(ckpt_run_open("/nowhere", NULL, &run, &err), CKPT_MISSING, "/nowhere");
    tree_close(&t);
}

/* The error of opening the run, "" if there is none. */
static const char *opening(const struct tree *t, const char *below, bool follow)
{
    static struct ckpt_err err;
    struct ckpt_options *opt = raw();
    struct ckpt_run *run = NULL;
    struct ckpt_view *v = NULL;
    char path[5000];
    err = (struct ckpt_err){0};
    if (follow)
        TREE_MUST(ckpt_options_set(opt, "follow_symlinks", "yes", &err) == 0);
    (void)snprintf(path, sizeof path, "%s%s", t->path, below);
    if (ckpt_run_open(path, opt, &run, &err) == 0 && ckpt_run_view(run, NULL, &v, &err) == 0)
        ckpt_view_release(v);
    if (run)
        ckpt_run_close(run);
    ckpt_options_free(opt);
    return err.text;
}

TEST(run, a_link_that_leads_out_is_named_where_there_is_no_step)
{
    static const char *const runs[] = {"/step", "/weights", "/weights/7", "/config"};
    struct tree t;
    tree_open(&t);
    nt_checkpoint(&t, "out/7/");
    tree_dirs(&t, "step/");
    tree_link(&t, "../out/7", "step/7");
    tree_dirs(&t, "weights/7/");
    tree_link(&t, "../../out/7/model", "weights/7/model");
    nt_checkpoint(&t, "config/7/");
    tree_delete(&t, "config/7/model_config.json");
    tree_link(&t, "../../out/7/model_config.json", "config/7/model_config.json");
    for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
        const char *text = opening(&t, runs[i], false);
        if (!strstr(text, "is a link that leads out of") || !strstr(text, "follow_symlinks"))
            fail_msg("%s: %s", runs[i], text);
    }
    CHECK_STR(opening(&t, "/step", true), "");
    CHECK_STR(opening(&t, "/config", true), "");
    tree_dirs(&t, "nowhere/");
    tree_link(&t, "gone", "nowhere/7");
    CHECK(strstr(opening(&t, "/nowhere", true), "'7' is a link that leads nowhere"));
    tree_close(&t);
}

TEST(options, values_that_mean_nothing_are_refused)
{
    static const char *const bad[][2] = {
        {"dtype", "int8"},
        {"dtype", NULL},
        {"view", "xml"},
        {"max_shard_size", "-1"},
        {"max_shard_size", "many"},
        {"rope", "sideways"},
        {"allow_partial", "maybe"},
        {"nonsense", "1"},
        {"base", ""},
        {"num_attention_heads", NULL},
    };
    static const char *const good[][2] = {
        {"dtype", "auto"},         {"dtype", "bf16"},       {"dtype", "torch.float32"},
        {"dtype", "half"},         {"view", "hf"},          {"rope", "half"},
        {"max_shard_size", "5GB"}, {"allow_partial", NULL}, {"num_attention_heads", "4"},
    };
    struct ckpt_options *opt = raw();
    struct ckpt_err err = {0};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_FAILS(ckpt_options_set(opt, bad[i][0], bad[i][1], &err), CKPT_USAGE, bad[i][0]);
    err = (struct ckpt_err){0};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        if (strcmp(good[i][1] ? good[i][1] : "", "bf16") != 0)
            CHECK_OK(ckpt_options_set(opt, good[i][0], good[i][1], &err));
    ckpt_options_free(opt);
}

static void check_word_of_others(const char *word, const char *value)
{
    ckpt_cleanup(ckpt_freep) char *meant = ckpt_options_meant(word);
    size_t n = 0;

    for (size_t i = 0; ckpt_options_row(i); i++)
        n += ckpt_words_find(ckpt_options_row(i)->also, word) != NULL;
    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++)
        n += ckpt_words_find((*w)->also, word) != NULL;
    if (n != 1 || ckpt_options_knows(word))
        fail_msg("'%s' means %zu things%s", word, n,
                 ckpt_options_knows(word) ? ", and itself" : "");
    if (value) {
        struct ckpt_options *opt = raw();
        struct ckpt_err err = {0};
        char *equals = strchr(meant, '=');
        *equals = '\0';
        if (ckpt_options_set(opt, meant, value, &err) < 0)
            fail_msg("'%s' means %s=%s: %s", word, meant, value, err.text);
        ckpt_options_free(opt);
    }
}

/* The words of a list, each with its value or, where there is none, `implied`. */
static void check_words_of_others(const char *also, const char *implied)
{
    ckpt_cleanup(ckpt_freep) char *list = strdup(also ? also : "");

    for (char *rest = NULL, *word = strtok_r(list, " ", &rest); word;
         word = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(word, ':');
        if (value)
            *value++ = '\0';
        check_word_of_others(word, value ? value : implied);
    }
}

TEST(options, another_programs_word_means_one_thing)
{
    UNUSED_STATE;
    for (size_t i = 0; ckpt_options_row(i); i++)
        check_words_of_others(ckpt_options_row(i)->also, NULL);
    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++)
        check_words_of_others((*w)->also, (*w)->name);
}

TEST(options, words_of_other_programs_are_understood)
{
    static const char *const cases[][2] = {
        {"precision", "did you mean dtype=auto|stored|bfloat16"},
        {"bf16", "did you mean dtype=bfloat16"},
        {"torch-dtype", "did you mean dtype="},
        {"merge_lora", "did you mean lora=merge"},
        {"hf_model", "did you mean base=DIR|ORG/NAME"},
        {"shard_size", "did you mean max_shard_size=SIZE"},
        {"ignore_missing", "did you mean allow_partial"},
        {"tensor_model_parallel_size", "did you mean tp=N"},
        {"dtyp", "did you mean dtype"},
        {"nonsense", "there is no option 'nonsense'"},
    };
    struct ckpt_options *opt = raw();

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckpt_err err = {0};
        CHECK_FAILS(ckpt_options_set(opt, cases[i][0], "1", &err), CKPT_USAGE, cases[i][1]);
    }
    ckpt_options_free(opt);
}

TEST(base, it_is_looked_up_in_the_local_hub_cache)
{
    struct ckpt_options *opt = raw();
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    struct tree t;
    char path[5000];
    tree_open(&t);
    nt_checkpoint(&t, "run/1/");
    tree_text(&t, "hub/models--org--name/refs/main", "abc\n");
    tree_text(&t, "hub/models--org--name/blobs/1", "{\"model_type\": \"llama\"}");
    tree_link(&t, "../../blobs/1", "hub/models--org--name/snapshots/abc/config.json");
    (void)snprintf(path, sizeof path, "%s/hub", t.path);
    (void)setenv("HF_HUB_CACHE", path, 1);
    (void)snprintf(path, sizeof path, "%s/run", t.path);
    CHECK_OK(ckpt_options_set(opt, "base", "org/name", &err));
    CHECK_OK(ckpt_run_open(path, opt, &run, &err));
    ckpt_run_close(run);
    CHECK_OK(ckpt_options_set(opt, "base", "org/other", &err));
    CHECK_FAILS(ckpt_run_open(path, opt, &run, &err), CKPT_MISSING, "org/other");
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_options_set(opt, "base", "../name", &err));
    CHECK_FAILS(ckpt_run_open(path, opt, &run, &err), CKPT_MISSING, "../name");
    ckpt_options_free(opt);
    tree_close(&t);
}

TEST(run, a_view_tells_the_dtypes_that_it_shows_and_those_that_are_stored)
{
    struct ckpt_options *opt;
    struct ckpt_run *run;
    struct ckpt_view *view;
    struct ckpt_err err = {0};
    char *info;
    struct tree t;

    tree_open(&t);
    tree_text(&t, "config.json", "{\"model_type\":\"clip\"}");
    tree_st(&t, "model.safetensors",
            "{\"text_model.a.weight\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]},"
            "\"text_model.b.weight\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[16,24]}}",
            24);
    CHECK_OK(ckpt_options_new(&opt, &err));
    CHECK_OK(ckpt_options_set(opt, "dtype", "bfloat16", &err));
    CHECK_OK(ckpt_run_open(t.path, opt, &run, &err));
    ckpt_options_free(opt);
    CHECK_OK(ckpt_run_view(run, NULL, &view, &err));
    CHECK_OK(ckpt_view_info(view, &info, &err));
    json_t *j = json_loads(info, 0, NULL);
    const json_t *shown = json_object_get(j, "dtypes"),
                 *stored = json_object_get(j, "stored_dtypes");
    CHECK_EQ(json_object_size(shown), 1);
    CHECK_EQ(json_integer_value(json_object_get(shown, "bfloat16")), 2);
    CHECK_EQ(json_object_size(stored), 1);
    CHECK_EQ(json_integer_value(json_object_get(stored, "float32")), 2);
    CHECK_STR(json_string_value(json_object_get(j, "dtype")), "bfloat16");
    CHECK_STR(json_string_value(json_object_get(j, "stored_dtype")), "float32");
    json_decref(j);
    free(info);
    ckpt_view_release(view);
    ckpt_run_close(run);
    tree_close(&t);
}

TESTS(T(run, a_view_tells_the_dtypes_that_it_shows_and_those_that_are_stored),
      T(run, steps_are_in_natural_order_and_latest_txt_decides),
      T(run, the_latest_is_the_highest_number_or_the_newest_word),
      T(run, a_link_to_another_step_is_a_second_name_of_it),
      T(run, a_folder_that_is_named_as_unfinished_is_no_step),
      T(run, a_struct_whose_size_is_not_set_is_named), T(run, a_model_beside_steps_says_so),
      T(run, a_step_is_a_folder_with_one_model_in_it),
      T(run, an_unfinished_step_is_hidden_until_it_is_complete),
      T(run, a_single_checkpoint_is_one_step_without_a_name),
      T(run, the_newest_view_that_can_be_read_is_taken_or_the_newest_error),
      T(run, a_generation_lasts_until_the_step_is_saved_again),
      T(run, views_that_nobody_holds_are_freed), T(run, steps_are_opened_at_once_with_one_base),
      T(run, an_error_names_each_file_once), T(run, nothing_to_see_is_an_error),
      T(run, a_link_that_leads_out_is_named_where_there_is_no_step),
      T(options, values_that_mean_nothing_are_refused),
      T(options, another_programs_word_means_one_thing),
      T(options, words_of_other_programs_are_understood),
      T(base, it_is_looked_up_in_the_local_hub_cache))
