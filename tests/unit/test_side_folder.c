/* SPDX-License-Identifier: Apache-2.0 */
/* Which folders of a model directory are shown with its files, and why others are not. */
#include "model/side_folder.h"

#include "base/mem.h"
#include "test.h"
#include "tree.h"

/* The limits of side_folder.c. */
enum { MOST_FILES = 128, MOST_MIB = 256 };

/* A file of holes. */
static void put_large(const struct tree *t, const char *name, off_t len)
{
    tree_text(t, name, "");
    int fd = openat(t->fd, name, O_WRONLY | O_CLOEXEC);
    TREE_MUST(fd >= 0 && ftruncate(fd, len) == 0);
    (void)close(fd);
}

/* Why the folder "side" is left out, or NULL; *ret is how many files were listed. */
static const char *why(const struct tree *t, bool is_module, size_t *ret)
{
    ckpt_cleanup(ckpt_side_folder_release) struct ckpt_side_folder folder = {0};
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    struct ckpt_err err = {0};

    if (ckpt_dir_open(t->path, CKPT_LINKS_BENEATH, &dir, &err) < 0 ||
        ckpt_side_folder_read(dir, "side", is_module, &folder, &err) < 0)
        fail_msg("%s", err.text);
    *ret = folder.files.len;
    return folder.why;
}

TEST(side_folder, small_files_are_shown_and_no_more_than_a_limit)
{
    struct tree t;
    size_t n;

    tree_open(&t);
    for (int i = 0; i < MOST_FILES; i++) {
        char name[64];
        (void)snprintf(name, sizeof name, "side/%s%d.txt", i % 2 ? "sub/" : "", i);
        tree_text(&t, name, "x");
    }
    CHECK(!why(&t, false, &n));
    CHECK_EQ(n, MOST_FILES);
    tree_text(&t, "side/one more", "x");
    CHECK_STR(why(&t, false, &n), "more than 128 files");
    CHECK_STR(why(&t, true, &n), "more than 128 files");
    tree_close(&t);
}

TEST(side_folder, many_bytes_are_shown_of_a_module_only)
{
    struct tree t;
    size_t n;

    tree_open(&t);
    put_large(&t, "side/a", (off_t)MOST_MIB << 19);
    put_large(&t, "side/sub/b", (off_t)MOST_MIB << 19);
    CHECK(!why(&t, false, &n));
    CHECK_EQ(n, 2);
    put_large(&t, "side/sub/b", ((off_t)MOST_MIB << 19) + 1);
    CHECK_STR(why(&t, false, &n), "more than 256 MiB");
    CHECK(!why(&t, true, &n));
    /* a link that leads nowhere has no bytes */
    tree_delete(&t, "side/a");
    tree_link(&t, "nothing", "side/c");
    CHECK(!why(&t, false, &n));
    CHECK_EQ(n, 2);
    tree_close(&t);
}

TEST(side_folder, deep_folders_and_models_of_their_own_are_left_out)
{
    struct tree t;
    size_t n;

    tree_open(&t);
    tree_text(&t, "side/x/y", "z");
    CHECK(!why(&t, false, &n));
    CHECK_EQ(n, 1);
    tree_text(&t, "side/x/y2/z", "z");
    CHECK_STR(why(&t, false, &n), "more than two folders deep");
    CHECK_STR(why(&t, true, &n), "more than two folders deep");
    tree_close(&t);
    tree_open(&t);
    tree_st(&t, "side/model.safetensors",
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    tree_text(&t, "side/config.json", "{\"model_type\":\"llama\"}");
    CHECK_STR(why(&t, false, &n), "a model of its own");
    CHECK(!why(&t, true, &n));
    tree_text(&t, "side/config.json", "{\"pooling\":1}");
    CHECK(!why(&t, false, &n));
    tree_close(&t);
}

TESTS(T(side_folder, small_files_are_shown_and_no_more_than_a_limit),
      T(side_folder, many_bytes_are_shown_of_a_module_only),
      T(side_folder, deep_folders_and_models_of_their_own_are_left_out))
