/* SPDX-License-Identifier: Apache-2.0 */
/* The table of inodes, and the splitting of -o lists. */
#include "cmdline.h"
#include "mount/nodes.h"
#include "test.h"

#include <stdio.h>
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

TESTS(T(nodes, an_identity_has_one_number_for_ever), T(nodes, forgetting_counts_look_ups),
      T(nodes, the_table_grows_and_shrinks), T(options, commas_split_and_backslashes_protect))
