/* SPDX-License-Identifier: Apache-2.0 */
/* Files that name the latest step, and steps that are newer than what they say. */
#include "base/err.h"
#include "base/mem.h"
#include "format/reader.h"
#include "test.h"
#include "tree.h"

enum { BEFORE = 32 };

/* Of a name before which there are bytes that are none of its own. */
static bool is_newer(const char *name, const char *latest, enum ckpt_tracker_scheme scheme)
{
    char a[BEFORE + 64] = {0}, b[BEFORE + 64] = {0};

    (void)snprintf(a + BEFORE, sizeof a - BEFORE, "%s", name);
    (void)snprintf(b + BEFORE, sizeof b - BEFORE, "%s", latest);
    return ckpt_tracker_is_newer(a + BEFORE, b + BEFORE, scheme);
}

TEST(tracker, steps_are_compared_as_numbers_if_both_are_named_by_the_scheme)
{
    CHECK(is_newer("iter_0000010", "iter_0000009", CKPT_TRACKER_ITER));
    CHECK(is_newer("iter_10", "iter_0000009", CKPT_TRACKER_ITER));
    CHECK(!is_newer("iter_0000010", "iter_0000010", CKPT_TRACKER_ITER));
    CHECK(!is_newer("iter_0000009", "iter_0000010", CKPT_TRACKER_ITER));
    CHECK(!is_newer("iter_0000010", "release", CKPT_TRACKER_ITER));
    CHECK(!is_newer("step_10", "iter_0000009", CKPT_TRACKER_ITER));
    CHECK(!is_newer("iter_x10", "iter_0000009", CKPT_TRACKER_ITER));
    CHECK(is_newer("global_step_100", "global_step_20", CKPT_TRACKER_GLOBAL_STEP));
    CHECK(!is_newer("global_step_100", "global_step_20", CKPT_TRACKER_ITER));
    CHECK(!ckpt_tracker_is_newer("iter_0000010", NULL, CKPT_TRACKER_ITER));
}

/* The latest step by a tracker with this text, beside a folder of this name. */
static char *latest(const char *text, const char *folder, enum ckpt_tracker_scheme scheme)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};
    char name[80];
    struct tree t;

    tree_open(&t);
    (void)snprintf(name, sizeof name, "%s/", folder);
    tree_dirs(&t, name);
    if (text)
        tree_text(&t, "latest_checkpointed_iteration.txt", text);
    if (ckpt_dir_open(t.path, CKPT_LINKS_BENEATH, &dir, &err) < 0)
        fail_msg("%s", err.text);
    char *found = ckpt_tracker_latest(dir, scheme);
    tree_close(&t);
    return found;
}

TEST(tracker, the_latest_has_the_name_of_the_scheme_that_the_steps_have)
{
    static const struct {
        const char *text, *folder;
        enum ckpt_tracker_scheme scheme;
        const char *want;
    } each[] = {
        {"20", "iter_0000020", CKPT_TRACKER_ITER, "iter_0000020"},
        {"20\n", "iter_0000020", CKPT_TRACKER_ITER, "iter_0000020"},
        {"release", "release", CKPT_TRACKER_ITER, "release"},
        {"20", "global_step_20", CKPT_TRACKER_GLOBAL_STEP, "global_step_20"},
        {"release", "global_step_20", CKPT_TRACKER_GLOBAL_STEP, NULL},
        {"20", "global_step_20", CKPT_TRACKER_ITER, NULL},
        {"20", "iter_0000020", CKPT_TRACKER_GLOBAL_STEP, NULL},
        {"x", "iter_0000020", CKPT_TRACKER_ITER, NULL},
        {NULL, "iter_0000020", CKPT_TRACKER_ITER, NULL},
    };

    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        ckpt_cleanup(ckpt_freep) char *got = latest(each[i].text, each[i].folder, each[i].scheme);
        if (each[i].want) {
            CHECK(got != NULL);
            CHECK_STR(got, each[i].want);
        } else {
            CHECK(got == NULL);
        }
    }
}

TESTS(T(tracker, steps_are_compared_as_numbers_if_both_are_named_by_the_scheme),
      T(tracker, the_latest_has_the_name_of_the_scheme_that_the_steps_have))
