/* SPDX-License-Identifier: Apache-2.0 */
/* What a program that confines itself may read: the run, what its links lead to, and nothing else.
 */
#include <ckptfs/ckptfs.h>

#include "base/err.h"
#include "base/mem.h"
#include "model/options.h"
#include "test.h"
#include "tree.h"

enum { MOST_PLACES = 16, DEEPEST = 16 /* folders below a run, of places.c */ };

struct visited {
    char *place[MOST_PLACES];
    size_t n, most; /* so many are taken */
};

static int visit(void *ctx, const char *place)
{
    struct visited *v = ctx;

    if (v->n == v->most)
        return 1;
    v->place[v->n++] = strdup(place);
    return 0;
}

static int find(const struct tree *t, const char *run, bool follow, struct visited *v,
                struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *opt = NULL;
    char path[5000];

    (void)snprintf(path, sizeof path, "%s/%s", t->path, run);
    if (ckpt_options_new(&opt, err) < 0 ||
        (follow && ckpt_options_set(opt, "follow_symlinks", NULL, err) < 0))
        return -1;
    return ckpt_options_places(opt, path, visit, v, err);
}

/* Is the file or folder among them? */
static bool has(const struct visited *v, const struct tree *t, const char *name)
{
    char path[5000];
    ckpt_cleanup(ckpt_freep) char *real = NULL;

    (void)snprintf(path, sizeof path, "%s/%s", t->path, name);
    real = realpath(path, NULL);
    for (size_t i = 0; real && i < v->n; i++)
        if (strcmp(v->place[i], real) == 0)
            return true;
    return false;
}

static void forget(struct visited *v)
{
    while (v->n)
        free(v->place[--v->n]);
}

TEST(places, links_are_followed_if_they_are_to_be)
{
    struct visited v = {.most = MOST_PLACES};
    struct ckpt_err err = {0};
    struct tree t;

    tree_open(&t);
    nt_checkpoint(&t, "run/10/");
    tree_text(&t, "far/file", "x");
    tree_text(&t, "other/file", "x");
    tree_link(&t, "../../far", "run/10/link");
    tree_link(&t, "../other", "far/second");
    tree_link(&t, "../../nothing", "run/10/nowhere");
    CHECK_OK(find(&t, "run", false, &v, &err));
    CHECK_EQ(v.n, 1);
    CHECK(has(&v, &t, "run"));
    forget(&v);
    CHECK_OK(find(&t, "run", true, &v, &err));
    CHECK_EQ(v.n, 3);
    CHECK(has(&v, &t, "run") && has(&v, &t, "far") && has(&v, &t, "other"));
    forget(&v);
    v.most = 2; /* the caller ends the search */
    CHECK_EQ(find(&t, "run", true, &v, &err), -1);
    forget(&v);
    tree_close(&t);
}

TEST(places, links_are_looked_for_in_nested_folders_but_not_for_ever)
{
    struct visited v = {.most = MOST_PLACES};
    struct ckpt_err err = {0};
    char deep[256] = "run/";
    struct tree t;

    tree_open(&t);
    tree_text(&t, "near", "x");
    tree_text(&t, "far", "x");
    for (int i = 1; i <= DEEPEST; i++) {
        char link[300], to[5000];
        (void)strcat(deep, "d/");
        (void)snprintf(link, sizeof link, "%slink", deep);
        (void)snprintf(to, sizeof to, "%s/%s", t.path, i < DEEPEST ? "near" : "far");
        if (i >= DEEPEST - 1)
            tree_link(&t, to, link);
    }
    CHECK_OK(find(&t, "run", true, &v, &err));
    CHECK(has(&v, &t, "near") && !has(&v, &t, "far"));
    forget(&v);
    tree_close(&t);
}

TEST(places, a_run_that_does_not_exist_is_the_folder_in_which_it_may_appear)
{
    struct visited v = {.most = MOST_PLACES};
    struct ckpt_err err = {0};
    struct tree t;

    tree_open(&t);
    tree_text(&t, "a/file", "x");
    CHECK_OK(find(&t, "a/b/c", false, &v, &err));
    CHECK_EQ(v.n, 1);
    CHECK(has(&v, &t, "a"));
    forget(&v);
    tree_close(&t);
}

TEST(places, the_folder_above_is_one_if_it_has_the_model_s_config)
{
    struct visited v = {.most = MOST_PLACES};
    struct ckpt_err err = {0};
    struct tree t;

    tree_open(&t);
    tree_text(&t, "plain/run/file", "x");
    tree_text(&t, "model/run/file", "x");
    tree_text(&t, "model/config.json", "{\"model_type\":\"llama\"}");
    CHECK_OK(find(&t, "plain/run", false, &v, &err));
    CHECK_EQ(v.n, 1);
    CHECK(has(&v, &t, "plain/run"));
    forget(&v);
    CHECK_OK(find(&t, "model/run", false, &v, &err));
    CHECK_EQ(v.n, 2);
    CHECK(has(&v, &t, "model/run") && has(&v, &t, "model"));
    forget(&v);
    tree_text(&t, "model/run/pytorch_model.bin", "x"); /* weights alone, two folders below */
    CHECK_OK(find(&t, "model/run/pytorch_model.bin", false, &v, &err));
    CHECK(has(&v, &t, "model"));
    forget(&v);
    tree_close(&t);
}

TESTS(T(places, the_folder_above_is_one_if_it_has_the_model_s_config),
      T(places, links_are_followed_if_they_are_to_be),
      T(places, links_are_looked_for_in_nested_folders_but_not_for_ever),
      T(places, a_run_that_does_not_exist_is_the_folder_in_which_it_may_appear))
