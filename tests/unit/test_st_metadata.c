/* SPDX-License-Identifier: Apache-2.0 */
#include "container/st_metadata.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "test.h"

/* The files of a directory, whose entries are kept one after the other. */
struct kept {
    json_t *files;
    size_t size;
};

/* Keep n entries, {key, value, key, value ...}, of a file. Returns whether they were kept. */
static bool keep(struct kept *k, const char *file, const char *const *entry, size_t n)
{
    struct ckpt_st_meta metadata[8];
    const struct ckpt_st st = {.metadata = metadata, .nmetadata = n};
    struct ckpt_err err = {0};
    bool kept;

    for (size_t i = 0; i < n; i++)
        metadata[i] = (struct ckpt_st_meta){entry[2 * i], entry[2 * i + 1]};
    assert_int_equal(ckpt_st_metadata_keep(&k->files, &k->size, file, &st, &kept, &err), 0);
    return kept;
}

#define KEEP(k, file, ...)                                                                         \
    keep(k, file, (const char *const[]){__VA_ARGS__},                                              \
         sizeof((const char *const[]){__VA_ARGS__}) / (2 * sizeof(char *)))

static void check_json(const json_t *json, const char *want)
{
    struct ckpt_err err = {0};
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    assert_int_equal(ckpt_json_dump(json, CKPT_JSON_COMPACT, false, &text, &len, &err), 0);
    assert_string_equal(text, want);
}

static void check_join(const struct kept *k, const char *want, const char *want_differ)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *joined = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *differ = NULL;
    struct ckpt_err err = {0};

    assert_int_equal(ckpt_st_metadata_join(k->files, &joined, &differ, &err), 0);
    check_json(joined, want);
    check_json(differ, want_differ);
}

TEST(st_metadata, each_file_keeps_its_entries_but_those_of_torchs_shards)
{
    struct kept k = {0};

    CHECK(KEEP(&k, "a", "z", "1", "DCP_VERSION", "1.0", "y", ""));
    CHECK(keep(&k, "b", NULL, 0));
    CHECK(KEEP(&k, "c", "DCP_SHARDING_INFO", "{}"));
    check_json(k.files, "{\"a\":{\"z\":\"1\",\"y\":\"\"},\"b\":{},\"c\":{}}");
    json_decref(k.files);
}

TEST(st_metadata, files_are_joined_where_they_agree)
{
    struct kept k = {0};

    CHECK(KEEP(&k, "a", "z", "1", "same", "s", "differs", "1"));
    CHECK(KEEP(&k, "b", "differs", "2", "same", "s", "only", "b"));
    CHECK(KEEP(&k, "c", "differs", "1"));
    check_join(&k, "{\"z\":\"1\",\"same\":\"s\",\"only\":\"b\"}", "[\"differs\"]");
    json_decref(k.files);
}

TEST(st_metadata, no_files_have_no_entries)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *differ = NULL;
    struct ckpt_err err = {0};
    json_t *joined;

    CHECK_OK(ckpt_st_metadata_join(NULL, &joined, &differ, &err));
    CHECK(joined == NULL && json_array_size(differ) == 0);
}

TEST(st_metadata, all_files_together_are_limited_as_their_text_is_written)
{
    const size_t len = CKPT_ST_MAX_KEPT / 6; /* a byte 1 is written as six */
    ckpt_cleanup(ckpt_freep) char *large = malloc(len + 1);
    struct kept k = {0};

    assert_non_null(large);
    memset(large, 1, len);
    large[len] = '\0';
    CHECK(!KEEP(&k, "a", "key", large));
    CHECK_EQ(k.size, 0);
    large[len / 2] = '\0';
    CHECK(KEEP(&k, "b", "key", large));
    CHECK(!KEEP(&k, "c", "key", large));
    CHECK(KEEP(&k, "d", "key", "value"));
    CHECK_EQ(json_object_size(json_object_get(k.files, "a")), 0);
    CHECK_EQ(json_object_size(json_object_get(k.files, "c")), 0);
    CHECK_EQ(json_object_size(json_object_get(k.files, "d")), 1);
    json_decref(k.files);
}

TESTS(T(st_metadata, each_file_keeps_its_entries_but_those_of_torchs_shards),
      T(st_metadata, files_are_joined_where_they_agree), T(st_metadata, no_files_have_no_entries),
      T(st_metadata, all_files_together_are_limited_as_their_text_is_written))
