/* SPDX-License-Identifier: Apache-2.0 */
/* The table of inodes, and the splitting of -o lists. */
#include "cmdline.h"
#include "mount/nodes.h"
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct ckptfs_id file(const char *step, const char *path, uint64_t generation)
{
    return (struct ckptfs_id){
        .kind = CKPTFS_FILE, .generation = generation, .step = step, .path = path, .size = 7};
}

TEST(nodes, an_identity_has_one_number_for_ever)
{
    struct ckptfs_nodes t;
    struct ckptfs_id a = file("100", "x", 1), b = file("100", "x", 2), c = file("10", "0x", 1);

    CHECK(ckptfs_nodes_init(&t) == 0);
    const struct ckptfs_node *n = ckptfs_nodes_ref(&t, &a);
    uint64_t ino = n->ino;
    CHECK(ckptfs_nodes_ref(&t, &a) == n);
    CHECK(ino == ckptfs_ino(&a));
    CHECK(ckptfs_nodes_ref(&t, &b)->ino != ino);
    CHECK(ckptfs_nodes_ref(&t, &c)->ino != ino);
    ckptfs_nodes_forget(&t, ino, 2);
    CHECK(!ckptfs_nodes_get(&t, ino));
    CHECK(ckptfs_nodes_ref(&t, &a)->ino == ino);
    ckptfs_nodes_release(&t);
}

TEST(nodes, forgetting_counts_look_ups)
{
    struct ckptfs_nodes t;
    struct ckptfs_id a = file("100", "x", 1);

    CHECK(ckptfs_nodes_init(&t) == 0);
    uint64_t ino = ckptfs_nodes_ref(&t, &a)->ino;
    (void)ckptfs_nodes_ref(&t, &a);
    ckptfs_nodes_forget(&t, ino, 1);
    CHECK(ckptfs_nodes_get(&t, ino));
    ckptfs_nodes_forget(&t, ino, 5); /* more than there are */
    CHECK(!ckptfs_nodes_get(&t, ino));
    ckptfs_nodes_forget(&t, ino, 1);
    CHECK(ckptfs_nodes_count(&t) == 0);
    ckptfs_nodes_forget(&t, 1, 100);
    CHECK(ckptfs_nodes_get(&t, 1)->id.kind == CKPTFS_ROOT);
    ckptfs_nodes_release(&t);
}

TEST(nodes, the_table_grows_and_shrinks)
{
    enum { MANY = 20000 };
    struct ckptfs_nodes t;
    char name[32];

    CHECK(ckptfs_nodes_init(&t) == 0);
    for (int i = 0; i < MANY; i++) {
        (void)snprintf(name, sizeof name, "f%d", i);
        struct ckptfs_id id = file("1", name, 1);
        CHECK(ckptfs_nodes_ref(&t, &id));
    }
    CHECK(ckptfs_nodes_count(&t) == MANY);
    for (int i = 0; i < MANY; i++) {
        (void)snprintf(name, sizeof name, "f%d", i);
        struct ckptfs_id id = file("1", name, 1);
        CHECK(strcmp(ckptfs_nodes_get(&t, ckptfs_ino(&id))->id.path, name) == 0);
        ckptfs_nodes_forget(&t, ckptfs_ino(&id), 1);
    }
    CHECK(ckptfs_nodes_count(&t) == 0);
    ckptfs_nodes_release(&t);
}

static uint64_t ino_of(const char *step, const char *path)
{
    const struct ckptfs_id id = file(step, path, 1);

    return ckptfs_ino(&id);
}

TEST(nodes, programs_that_sort_by_inode_read_parts_in_their_order)
{
    static const char *const parts[] = {
        "config.json",          "model-00001-of-00163.safetensors",
        "model-00002-of-00163", "0/model-00010-of-00163.safetensors",
        "x/model-163",          "model-1048575.safetensors",
    };

    for (size_t i = 0; i + 1 < sizeof parts / sizeof parts[0]; i++)
        CHECK(ino_of("9", parts[i]) < ino_of("1", parts[i + 1]));
    /* too large a number is the largest, and numbers stay what they were: positive, no root's */
    CHECK(ino_of("", "99999999999999999999999") >> 43 == (1 << 20) - 1);
    CHECK(ino_of("", "99999999999999999999999") != ino_of("", "99999999999999999999998"));
    CHECK(ino_of("", "99999999999999999999999") <= INT64_MAX && ino_of("", "0") > 1);
}

TEST(options, commas_split_and_backslashes_protect)
{
    char text[] = "a,,b=1,c=x\\,y\\\\z=w,d=";
    char *rest = text, *word, *value;

    CHECK(ckptfs_next_option(&rest, &word, &value));
    CHECK(strcmp(word, "a") == 0 && !value);
    CHECK(ckptfs_next_option(&rest, &word, &value));
    CHECK(strcmp(word, "b") == 0 && strcmp(value, "1") == 0);
    CHECK(ckptfs_next_option(&rest, &word, &value));
    CHECK(strcmp(word, "c") == 0 && strcmp(value, "x,y\\z=w") == 0);
    CHECK(ckptfs_next_option(&rest, &word, &value));
    CHECK(strcmp(word, "d") == 0 && strcmp(value, "") == 0);
    CHECK(!ckptfs_next_option(&rest, &word, &value));
}

/* The word at *at of a list such as "precision bf16:bfloat16", without its value; false at the end.
 */
static bool next_word(const char **at, char word[64])
{
    *at += strspn(*at, " ");
    const size_t len = strcspn(*at, " :");
    if (!len)
        return false;
    assert_true(len < 64);
    memcpy(word, *at, len);
    word[len] = '\0';
    *at += strcspn(*at, " ");
    return true;
}

/* How often a command gives a meaning to another program's word, and has it as an option. */
static size_t meanings(uint32_t bit, const char *word)
{
    size_t n = 0;

    for (size_t i = 0; i < ckptfs_noptions; i++)
        if (ckptfs_options[i].of & bit)
            n += (ckpt_words_find(ckptfs_options[i].also, word) != NULL) +
                 (ckpt_words_find(ckptfs_options[i].word, word) != NULL);
    for (const struct ckptfs_hint *h = ckptfs_hints; h->of; h++)
        if (h->of & bit)
            n += ckpt_words_find(h->words, word) != NULL;
    return n;
}

static void check_words(uint32_t bit, const char *words)
{
    char word[64];

    for (const char *at = words; at && next_word(&at, word);)
        if (meanings(bit, word) != 1)
            fail_msg("'%s' means %zu things to command %#x", word, meanings(bit, word), bit);
}

TEST(options, another_programs_word_means_one_thing)
{
    UNUSED_STATE;
    for (const struct ckptfs_command *k = ckptfs_commands; k->bit; k++) {
        for (size_t i = 0; i < ckptfs_noptions; i++)
            if (ckptfs_options[i].of & k->bit)
                check_words(k->bit, ckptfs_options[i].also);
        for (const struct ckptfs_hint *h = ckptfs_hints; h->of; h++)
            if (h->of & k->bit)
                check_words(k->bit, h->words);
    }
}

TEST(options, hints_name_options_that_exist)
{
    UNUSED_STATE;
    for (const struct ckptfs_hint *h = ckptfs_hints; h->of; h++)
        for (const char *at = h->text; (at = strstr(at, "--"));) {
            char word[64];
            at += 2;
            const size_t len = strcspn(at, " ;,.:=");
            bool known = false;
            (void)snprintf(word, sizeof word, "%.*s", (int)len, at);
            for (size_t i = 0; i < ckptfs_noptions; i++)
                known |= ckpt_words_find(ckptfs_options[i].word, word) != NULL;
            if (!known)
                fail_msg("--%s is no option: %s", word, h->text);
        }
}

TEST(options, words_of_other_programs_are_understood)
{
    static const struct {
        uint32_t of;
        const char *argv[8];
        const char *said;
    } cases[] = {
        {CKPTFS_TOOL, {"ckpt", "export", "R", "--output", "D"}, "DEST, the second argument"},
        {CKPTFS_TOOL, {"ckpt", "export", "R", "D", "--iteration=3"}, "did you mean --step=N ("},
        {CKPTFS_TOOL, {"ckpt", "ls", "R", "--precision", "bf16"}, "did you mean --dtype=WORD"},
        {CKPTFS_TOOL, {"ckpt", "ls", "R", "-o", "precision=bf16"}, "did you mean --dtype=WORD"},
        {CKPTFS_MOUNT, {"ckptfs", "R", "M", "-o", "precision=bf16"}, "did you mean --dtype=WORD"},
        {CKPTFS_MOUNT, {"ckptfs", "R", "M", "--num-workers=4"}, "did you mean --threads=N"},
        {CKPTFS_MOUNT, {"ckptfs", "R", "M", "--iteration=4"}, "a mount shows every step"},
        {CKPTFS_TOOL, {"ckpt", "digest", "R", "--num-workers=4"}, "did you mean --jobs=N"},
        {CKPTFS_TOOL, {"ckpt", "plan", "R", "--num-workers=4"}, "did you mean --threads=N"},
        {CKPTFS_TOOL, {"ckpt", "export", "R", "D", "--threads=4"}, "; did you mean --jobs=N"},
        {CKPTFS_TOOL, {"ckpt", "plan", "R", "--tp-size=4"}, "did you mean --layout=tp=N"},
        {CKPTFS_TOOL, {"ckpt", "export", "R", "D", "--force"}, "nothing is overwritten"},
        {CKPTFS_TOOL, {"ckpt", "ls", "R", "-i", "x"}, "-i: no such option; RUN, the first"},
        {CKPTFS_TOOL, {"ckpt", "export", "R", "-o", "my/dir"}, "and not by a file"},
        {CKPTFS_TOOL, {"ckpt", "export", "R", "D", "--stepp=3"}, "did you mean --step ("},
        {CKPTFS_TOOL, {"ckpt", "convert", "R", "D"}, "no such command; did you mean export"},
        {CKPTFS_TOOL, {"ckpt", "mount", "R", "D"}, "no such command; did you mean ckptfs"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ckptfs_cmdline line = {.of = cases[i].of};
        struct ckpt_err err = {0};
        char *argv[8];
        memcpy(argv, cases[i].argv, sizeof argv);
        CHECK_FAILS(ckptfs_cmdline_parse(&line, argv, &err), CKPT_USAGE, cases[i].said);
        ckptfs_cmdline_release(&line);
    }
}

TESTS(T(options, another_programs_word_means_one_thing), T(options, hints_name_options_that_exist),
      T(options, words_of_other_programs_are_understood),
      T(nodes, an_identity_has_one_number_for_ever), T(nodes, forgetting_counts_look_ups),
      T(nodes, the_table_grows_and_shrinks),
      T(nodes, programs_that_sort_by_inode_read_parts_in_their_order),
      T(options, commas_split_and_backslashes_protect))
