/* SPDX-License-Identifier: Apache-2.0 */
/* Steps that are saved again in their old place, touched, removed, or cannot be looked into. */
#include "test.h"

#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

#include <ckptfs/ckptfs.h>

#include "tree.h"

/* ---- a step of five shards ---- */

static const char *const shards[] = {
    "model/model/norm/model_weight.safetensors",
    "model/model/rows/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
    "model/model/rows/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
    "model/model/cols/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
    "model/model/cols/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
};
enum { NSHARD = sizeof shards / sizeof shards[0] };
static const char marker[] = "model_config.json";

static const char *in_step(const char *step, const char *name)
{
    static char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", step, name);
    return path;
}

/* The file was last written so many seconds ago. */
static void age(const struct tree *t, const char *step, const char *name, time_t seconds)
{
    struct timespec times[2] = {{time(NULL) - seconds, 0}, {time(NULL) - seconds, 0}};
    TREE_MUST(utimensat(t->fd, in_step(step, name), times, 0) == 0);
}

/* All shards and then the marker were written an hour ago. */
static void save(const struct tree *t, const char *step)
{
    nt_checkpoint(t, in_step(step, ""));
    for (int i = 0; i < NSHARD; i++)
        age(t, step, shards[i], 3600 - i);
    age(t, step, marker, 3500);
}

/* A shard's file of another save: same size, other bytes at its end. */
static void save_shard(const struct tree *t, const char *step, int i, bool in_place)
{
    char path[512], next[600];
    unsigned char bytes[4096];
    (void)snprintf(path, sizeof path, "%s", in_step(step, shards[i]));
    int fd = openat(t->fd, path, O_RDWR | O_CLOEXEC);
    ssize_t n = pread(fd, bytes, sizeof bytes, 0);
    TREE_MUST(fd >= 0 && n > 0);
    bytes[n - 1] ^= 0xff;
    if (in_place) {
        TREE_MUST(pwrite(fd, bytes, (size_t)n, 0) == n);
    } else {
        (void)snprintf(next, sizeof next, "%s.new", path);
        tree_put(t, next, bytes, (size_t)n);
        TREE_MUST(renameat(t->fd, next, t->fd, path) == 0);
    }
    (void)close(fd);
}

/* ---- a run and what it logs ---- */

struct log {
    int lines;
    char last[2 * CKPT_ERR_TEXT];
};

static void keep_line(void *ctx, enum ckpt_log_severity severity, const char *text)
{
    struct log *log = ctx;
    if (severity > CKPT_WARNING)
        return;
    log->lines++;
    (void)snprintf(log->last, sizeof log->last, "%s", text);
}

static struct ckpt_run *open_with(const struct tree *t, struct log *log, const char *option)
{
    struct ckpt_options *opt;
    struct ckpt_err err = {0};
    struct ckpt_run *run;
    TREE_MUST(ckpt_options_new(&opt, &err) == 0);
    TREE_MUST(ckpt_options_set(opt, "view", "raw", &err) == 0);
    if (option)
        TREE_MUST(ckpt_options_set(opt, option, NULL, &err) == 0);
    ckpt_options_set_log(opt, keep_line, log);
    if (ckpt_run_open(t->path, opt, &run, &err) < 0)
        fail_msg("%s", err.text);
    ckpt_options_free(opt);
    ckpt_run_watch(run);
    return run;
}

static int read_all(struct ckpt_view *v, struct ckpt_err *err)
{
    unsigned char buf[4096];
    for (size_t i = 0; i < ckpt_view_tensors(v); i++) {
        struct ckpt_tensor_info info = {.size = sizeof info};
        (void)ckpt_view_tensor(v, i, &info, NULL);
        if (ckpt_node_pread(v, info.file, buf, (size_t)info.nbytes, info.file_off, &(size_t){0},
                            err) < 0)
            return -1;
    }
    return 0;
}

/* ---- at first sight ---- */

/* Does step 10 open, with a view that warns with this text? */
static bool opens_with_a_warning(const struct tree *t, const char *option, const char *text)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_view *v;
    char *info;
    struct ckpt_run *run = open_with(t, &log, option);
    TREE_MUST(ckpt_run_view(run, "10", &v, &err) == 0);
    TREE_MUST(ckpt_view_info(v, &info, &err) == 0);
    const bool warns = strstr(info, text) != NULL;
    free(info);
    ckpt_view_release(v);
    ckpt_run_close(run);
    return warns;
}

TEST(first, half_a_save_over_an_old_one_is_an_error_that_names_both)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    save(&t, "10");
    save_shard(&t, "10", 1, false);
    save_shard(&t, "10", 2, false);
    struct ckpt_run *run = open_with(&t, &log, NULL);
    CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "is being written");
    CHECK(strstr(err.text, "norm/model_weight.safetensors") && strstr(err.text, "tp-rank-"));
    CHECK(strstr(err.text, marker) && strstr(err.text, "allow_mixed"));
    for (int i = 0; i < NSHARD; i++) /* all are new, but for the marker */
        age(&t, "10", shards[i], 1);
    CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "is being written");
    save(&t, "10");
    age(&t, "10", shards[1], 200);
    age(&t, "10", shards[2], 200);
    CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "holds shards of two saves");
    CHECK(strstr(err.text, "norm/model_weight.safetensors") &&
          strstr(err.text, "rows/model_weight"));
    ckpt_run_close(run);
    CHECK(opens_with_a_warning(&t, "allow_mixed", "holds shards of two saves"));
    tree_close(&t);
}

/* A rank that was late, or a slow night: the marker may be older than all shards (it was copied
 * with its time), but no shard is older than it. */
TEST(first, a_pause_alone_is_a_warning)
{
    struct tree t;
    tree_open(&t);
    save(&t, "10");
    for (int i = 0; i < NSHARD; i++)
        age(&t, "10", shards[i], i < 2 ? 7200 : 300);
    age(&t, "10", marker, 7300);
    CHECK(opens_with_a_warning(&t, NULL, "was written with a long pause"));
    CHECK(opens_with_a_warning(&t, NULL, marker));
    tree_close(&t);
}

/* cp -r, git clone, hub downloads: all files are new, in any order. */
TEST(first, a_fresh_copy_opens_without_a_word)
{
    static const time_t ages[][NSHARD + 1] = {
        /* shards, then the marker */
        {0, 0, 0, 0, 0, 0},       {500, 400, 300, 200, 100, 600},    {100, 200, 300, 400, 500, 600},
        {90, 70, 50, 30, 10, 70}, {3600, 3100, 2100, 1000, 0, 4000}, {300, 5, 4, 3, 2, 1},
        {0, 0, 0, 3600, 3600, 0},
    };
    for (size_t k = 0; k < sizeof ages / sizeof ages[0]; k++) {
        struct ckpt_err err = {0};
        struct log log = {0};
        struct ckpt_view *v;
        struct tree t;
        tree_open(&t);
        save(&t, "10");
        for (int i = 0; i < NSHARD; i++)
            age(&t, "10", shards[i], ages[k][i]);
        age(&t, "10", marker, ages[k][NSHARD]);
        struct ckpt_run *run = open_with(&t, &log, NULL);
        CHECK_OK(ckpt_run_view(run, "10", &v, &err));
        CHECK_OK(read_all(v, &err));
        CHECK_OK(ckpt_view_verify_unchanged(v, &err));
        CHECK_EQ(log.lines, 0);
        ckpt_view_release(v);
        ckpt_run_close(run);
        tree_close(&t);
    }
}

/* ---- touched, and written again ---- */

TEST(again, a_touched_shard_is_reopened)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_view *v, *w;
    struct tree t;
    tree_open(&t);
    save(&t, "10");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    CHECK_OK(ckpt_run_view(run, "10", &v, &err));
    CHECK_OK(read_all(v, &err));
    age(&t, "10", shards[3], 0);
    for (int i = 0; i < 10; i++)
        CHECK_FAILS(read_all(v, &err), CKPT_STALE, "tp-rank-0-of-2");
    CHECK_EQ(log.lines, 1);
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_OK(ckpt_run_view(run, "10", &w, &err));
    CHECK(w != v);
    CHECK_OK(read_all(w, &err));
    CHECK_EQ(log.lines, 1);
    ckpt_view_release(v);
    ckpt_view_release(w);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(again, a_shard_written_again_is_a_save_under_way_until_the_marker_changes)
{
    for (int in_place = 0; in_place < 2; in_place++) {
        struct ckpt_err err = {0};
        struct log log = {0};
        struct ckpt_view *v;
        struct tree t;
        tree_open(&t);
        save(&t, "10");
        struct ckpt_run *run = open_with(&t, &log, NULL);
        CHECK_OK(ckpt_run_view(run, "10", &v, &err));
        save_shard(&t, "10", 3, true);
        CHECK_FAILS(read_all(v, &err), CKPT_STALE, "tp-rank-0-of-2");
        ckpt_view_release(v);
        age(&t, "10", shards[3], 3000); /* whatever the times say */
        CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "is being saved again");
        CHECK(strstr(err.text, "cols/model_weight") && strstr(err.text, marker));
        for (int i = 0; i < NSHARD; i++)
            save_shard(&t, "10", i, in_place);
        CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "is being saved again");
        age(&t, "10", marker, 0);
        err = (struct ckpt_err){0};
        CHECK_OK(ckpt_run_scan(run, NULL, &err));
        CHECK_OK(ckpt_run_view(run, "10", &v, &err));
        CHECK_OK(read_all(v, &err));
        ckpt_view_release(v);
        ckpt_run_close(run);
        tree_close(&t);
    }
}

/* nanotron's latest.txt says of old steps that they are finished. */
TEST(again, a_marker_that_is_gone_comes_back_with_the_save)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    save(&t, "10");
    tree_text(&t, "latest.txt", "10");
    tree_text(&t, "10/config.yaml", "model: {model_config: {hidden_size: 8}}\n");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    CHECK_OK(ckpt_run_view(run, "10", &v, &err));
    ckpt_view_release(v);
    tree_delete(&t, in_step("10", marker));
    tree_delete(&t, in_step("10", shards[0])); /* that of a tensor that nothing else speaks of */
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_CONFLICT, "'model_config.json', which");
    save(&t, "10");
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_OK(ckpt_run_view(run, "10", &v, &err));
    CHECK_EQ(ckpt_view_tensors(v), 3);
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

/* ---- a save that ends under an open view ---- */

static struct ckpt_view *held(const struct tree *t, struct ckpt_run **run, struct log *log)
{
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    save(t, "10");
    *run = open_with(t, log, NULL);
    if (ckpt_run_view(*run, "10", &v, &err) < 0)
        fail_msg("%s", err.text);
    return v;
}

TEST(marker, a_view_of_the_old_save_goes_on_from_its_descriptors)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_run *run;
    struct tree t;
    tree_open(&t);
    struct ckpt_view *v = held(&t, &run, &log);
    for (int i = 0; i < NSHARD; i++)
        save_shard(&t, "10", i, false);
    age(&t, "10", marker, 0);
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_OK(read_all(v, &err));
    CHECK_OK(ckpt_view_verify_unchanged(v, &err));
    CHECK_EQ(log.lines, 0);
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(marker, a_view_of_which_a_part_is_new_is_stale_from_then_on)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_run *run;
    struct ckpt_view *w;
    struct tree t;
    tree_open(&t);
    struct ckpt_view *v = held(&t, &run, &log);
    for (int i = 0; i < NSHARD - 1; i++)
        save_shard(&t, "10", i, false);
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_OK(read_all(v, &err)); /* nobody knows yet */
    CHECK_FAILS(ckpt_view_verify_unchanged(v, &err), CKPT_STALE, "of its 5 shards");
    age(&t, "10", marker, 0);
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_FAILS(read_all(v, &err), CKPT_STALE, "saved again");
    CHECK_FAILS(ckpt_view_tensor_pread(v, 0, &(char){0}, 1, 0, &err), CKPT_STALE, "saved again");
    CHECK_FAILS(ckpt_view_verify_unchanged(v, &err), CKPT_STALE, "saved again");
    CHECK_EQ(log.lines, 2); /* that it is so, and the first read that met it */
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_view(run, "10", &w, &err));
    CHECK_OK(read_all(w, &err));
    ckpt_view_release(w);
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(marker, a_new_marker_beside_the_old_shards_changes_nothing)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct ckpt_run *run;
    struct tree t;
    tree_open(&t);
    struct ckpt_view *v = held(&t, &run, &log);
    age(&t, "10", marker, 0);
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_OK(read_all(v, &err));
    CHECK_OK(ckpt_view_verify_unchanged(v, &err));
    CHECK_EQ(log.lines, 0);
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

/* ---- which steps there are ---- */

static const char *latest(struct ckpt_run *run)
{
    static char name[64];
    struct ckpt_step *s;
    struct ckpt_err err = {0};
    size_t n;
    TREE_MUST(ckpt_run_steps(run, &s, &n, &err) == 0);
    name[0] = '\0';
    for (size_t i = 0; i < n; i++)
        if (s[i].is_latest)
            (void)snprintf(name, sizeof name, "%s of %zu", s[i].name, n);
    ckpt_steps_free(s, n);
    return name;
}

/* No more files can be opened than are open, and `more`. */
static struct rlimit few_files(const struct tree *t, rlim_t more)
{
    struct rlimit before, few;
    int fd = dup(t->fd);
    TREE_MUST(fd >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = before;
    few.rlim_cur = (rlim_t)fd + more;
    (void)close(fd);
    TREE_MUST(setrlimit(RLIMIT_NOFILE, &few) == 0);
    return before;
}

TEST(steps, the_latest_does_not_go_back_when_files_cannot_be_opened)
{
    struct log log = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    save(&t, "9");
    save(&t, "10");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    CHECK_STR(latest(run), "10 of 2");
    for (rlim_t more = 0; more < 8; more++) {
        struct ckpt_err err = {0};
        struct rlimit before = few_files(&t, more);
        int scanned = ckpt_run_scan(run, NULL, &err);
        bool is = strcmp(latest(run), "10 of 2") == 0;
        TREE_MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(is);
        CHECK(scanned == 0 || err.code == CKPT_IO);
    }
    struct rlimit before = few_files(&t, 1);
    struct ckpt_err err = {0};
    int opened = ckpt_run_view(run, NULL, &v, &err);
    TREE_MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK_EQ(opened, -1);
    CHECK_EQ(err.code, CKPT_IO);
    CHECK(strstr(err.text, "Too many open files"));
    err = (struct ckpt_err){0};
    CHECK_OK(ckpt_run_view(run, NULL, &v, &err));
    ckpt_view_release(v);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(steps, a_pointer_to_a_missing_step_is_a_warning)
{
    struct ckpt_err err = {0};
    struct log log = {0};
    struct tree t;
    tree_open(&t);
    save(&t, "9");
    save(&t, "10");
    tree_text(&t, "latest.txt", "20");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    CHECK_STR(latest(run), "10 of 2");
    CHECK_EQ(log.lines, 1);
    CHECK(strstr(log.last, "'20'") && strstr(log.last, "'10' is taken"));
    for (int i = 0; i < 5; i++)
        CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_EQ(log.lines, 1);
    tree_text(&t, "latest.txt", "9");
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_STR(latest(run), "9 of 2");
    CHECK_EQ(log.lines, 1);
    ckpt_run_close(run);
    tree_close(&t);
}

/* Not every scan looks at every step, but each is looked at when its folder changes, and in turn.
 */
TEST(steps, many_are_looked_at_when_they_change_and_in_turn)
{
    enum { MANY = 40, TURNS = 3 };
    struct ckpt_err err = {0};
    struct log log = {0};
    struct tree t;
    char name[16];
    bool changed;
    tree_open(&t);
    for (int i = 1; i <= MANY; i++) {
        (void)snprintf(name, sizeof name, "%d", i);
        save(&t, name);
    }
    struct ckpt_run *run = open_with(&t, &log, NULL);
    for (int i = 0; i < 2 * TURNS; i++) {
        CHECK_OK(ckpt_run_scan(run, &changed, &err));
        CHECK(!changed);
    }
    TREE_MUST(unlinkat(t.fd, "7/model_config.json", 0) == 0); /* it is no finished step any more */
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    CHECK_STR(latest(run), "40 of 39");
    for (int i = 1; i <= MANY; i += 13) { /* times only: the folder stays as it was */
        (void)snprintf(name, sizeof name, "%d", i);
        age(&t, name, marker, 10);
        int scans = 0;
        do
            CHECK_OK(ckpt_run_scan(run, &changed, &err));
        while (!changed && ++scans < TURNS);
        CHECK(changed);
    }
    age(&t, "40", marker, 10); /* the latest, at once */
    CHECK_OK(ckpt_run_scan(run, &changed, &err));
    CHECK(changed);
    ckpt_run_close(run);
    tree_close(&t);
}

TEST(steps, one_that_was_removed_is_missing_at_once)
{
    struct log log = {0};
    struct ckpt_err err = {0};
    struct ckpt_view *v;
    struct tree t;
    tree_open(&t);
    save(&t, "9");
    save(&t, "10");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    tree_delete(&t, in_step("10", marker)); /* as rmtree begins, in some order */
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_STR(latest(run), "9 of 1");
    save(&t, "10");
    CHECK_OK(ckpt_run_scan(run, NULL, &err));
    CHECK_STR(latest(run), "10 of 2");
    TREE_MUST(renameat(t.fd, "10", t.fd, ".trash") == 0);
    CHECK_FAILS(ckpt_run_view(run, "10", &v, &err), CKPT_MISSING, "has no step '10'");
    CHECK_STR(latest(run), "9 of 1");
    ckpt_run_close(run);
    tree_close(&t);
}

static void *scan_often(void *run)
{
    for (int i = 0; i < 50; i++)
        (void)ckpt_run_scan(run, NULL, NULL);
    return NULL;
}

TEST(steps, several_threads_may_look_at_once)
{
    enum { N = 4 };
    pthread_t thread[N];
    struct log log = {0};
    struct tree t;
    tree_open(&t);
    save(&t, "9");
    save(&t, "10");
    tree_delete(&t, in_step("10", marker));
    tree_text(&t, in_step("10", "config.yaml"), "model: {model_config: {}}\n");
    tree_text(&t, "latest.txt", "7");
    struct ckpt_run *run = open_with(&t, &log, NULL);
    for (int i = 0; i < N; i++)
        TREE_MUST(pthread_create(&thread[i], NULL, scan_often, run) == 0);
    for (int i = 0; i < N; i++)
        TREE_MUST(pthread_join(thread[i], NULL) == 0);
    CHECK_STR(latest(run), "9 of 1");
    ckpt_run_close(run);
    tree_close(&t);
}

TESTS(T(first, half_a_save_over_an_old_one_is_an_error_that_names_both),
      T(first, a_pause_alone_is_a_warning), T(first, a_fresh_copy_opens_without_a_word),
      T(again, a_touched_shard_is_reopened),
      T(again, a_shard_written_again_is_a_save_under_way_until_the_marker_changes),
      T(again, a_marker_that_is_gone_comes_back_with_the_save),
      T(marker, a_view_of_the_old_save_goes_on_from_its_descriptors),
      T(marker, a_view_of_which_a_part_is_new_is_stale_from_then_on),
      T(marker, a_new_marker_beside_the_old_shards_changes_nothing),
      T(steps, the_latest_does_not_go_back_when_files_cannot_be_opened),
      T(steps, a_pointer_to_a_missing_step_is_a_warning),
      T(steps, many_are_looked_at_when_they_change_and_in_turn),
      T(steps, one_that_was_removed_is_missing_at_once), T(steps, several_threads_may_look_at_once))
