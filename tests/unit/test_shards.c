/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor/fqn.h"
#include "view/shards.h"

#include "made_map.h"
#include "small_catalog.h"

/* A catalogue of U8 tensors "t0", "t1" ... of these sizes; a negative size is one of a block with
 * its neighbours. */
static struct small_catalog sized(const int *size, size_t n)
{
    struct small_catalog c = small_catalog_new();

    for (size_t i = 0; i < n; i++) {
        char name[32];
        (void)snprintf(name, sizeof name, "t%zu", i);
        (void)small_add(&c, name, CKPT_U8, (uint64_t)abs(size[i]), size[i] < 0);
    }
    return c;
}

/* The file number of each tensor as digits: "0012". */
static const char *split_of(const int *size, size_t n, uint64_t max)
{
    static char digits[64];
    struct small_catalog c = sized(size, n);
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    if (ckpt_shards_split(c.cat, max, false, NULL, &s, &err) < 0)
        return "failed";
    for (size_t i = 0; i < n; i++)
        digits[i] = (char)('0' + s.file[i]);
    digits[n] = '\0';
    ckpt_shards_release(&s);
    small_catalog_free(&c);
    return digits;
}

#define SPLIT(max, ...)                                                                            \
    split_of((const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int), max)

TEST(shards, tensors_fill_files_in_order)
{
    CHECK_STR(SPLIT(10, 6, 6, 2, 6, 2, 2), "011222");
    CHECK_STR(SPLIT(10, 5, 5, 5, 5), "0011");
    CHECK_STR(SPLIT(100, 5, 5, 5, 5), "0000");
}

/* As the official splitter: it does not close the file being filled, and is numbered before it. */
TEST(shards, a_tensor_above_the_limit_gets_its_own_file)
{
    CHECK_STR(SPLIT(10, 4, 11, 4, 4), "1012");
    CHECK_STR(SPLIT(10, 11, 12, 13), "012");
    CHECK_STR(SPLIT(10, 3, 11, 3, 12, 3), "20212");
    CHECK_STR(SPLIT(10, 10), "0");
}

TEST(shards, empty_tensors_take_no_room)
{
    CHECK_STR(SPLIT(10, 10, 0, 0, 10, 0), "00011");
    CHECK_STR(SPLIT(1, 0, 0), "00");
}

TEST(shards, a_block_is_one_item)
{
    CHECK_STR(SPLIT(10, 4, -4, -4, 4), "0112"); /* 4 | 4 + 4 | 4 */
    CHECK_STR(SPLIT(12, 4, -4, -4, 4), "0001");
    CHECK_STR(SPLIT(10, 4, -6, -6, 4), "1001"); /* the block is above the limit */
}

TEST(shards, neighbouring_blocks_are_told_apart_by_number)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    for (int i = 0; i < 6; i++)
        (void)small_add(&c, (const char[]){(char)('a' + i), 0}, CKPT_U8, 3, 1 + i / 2 % 2);
    CHECK_OK(ckpt_shards_split(c.cat, 6, false, NULL, &s, &err));
    CHECK_EQ(s.nfile, 3);
    for (int i = 0; i < 6; i++)
        CHECK_EQ(s.file[i], i / 2);
    ckpt_shards_release(&s);
    small_catalog_free(&c);
}

TEST(shards, names_count_from_one)
{
    struct small_catalog c = sized((const int[]){1, 1, 1}, 3);
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_shards_split(c.cat, 1, false, NULL, &s, &err));
    CHECK_STR(s.name[0], "model-00001-of-00003.safetensors");
    CHECK_STR(s.name[2], "model-00003-of-00003.safetensors");
    CHECK_EQ(s.total_bytes, 3);
    CHECK_EQ(s.total_numel, 3);
    ckpt_shards_release(&s);
    CHECK_OK(ckpt_shards_split(c.cat, 3, false, NULL, &s, &err));
    CHECK_EQ(s.nfile, 1);
    CHECK_STR(s.name[0], "model.safetensors");
    ckpt_shards_release(&s);
    small_catalog_free(&c);
}

TEST(shards, no_tensors_make_no_file)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    CHECK_OK(ckpt_shards_split(c.cat, 1, true, NULL, &s, &err));
    CHECK_EQ(s.nfile, 0);
    ckpt_shards_release(&s);
    small_catalog_free(&c);
}

TEST(shards, more_than_63_bits_of_bytes_are_refused)
{
    struct small_catalog c = small_catalog_new();
    const uint64_t dim = UINT64_C(1) << 62;
    struct ckpt_shards s;
    struct ckpt_err err = {0};
    size_t i;

    CHECK_OK(ckpt_catalog_add(c.cat, "a", CKPT_U8, &dim, 1, &i, &err));
    CHECK_OK(ckpt_catalog_add(c.cat, "b", CKPT_U8, &dim, 1, &i, &err));
    CHECK_FAILS(ckpt_shards_split(c.cat, 1, false, NULL, &s, &err), CKPT_LIMIT, "'b'");
    small_catalog_free(&c);
}

/* The official library could not read it: 600 names of 200 kB. */
TEST(shards, a_header_does_not_grow_beyond_what_the_library_reads)
{
    enum { LEN = 200000, N = 600 };
    struct small_catalog c = small_catalog_new();
    char *name = malloc(LEN + 8);
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    memset(name, 'x', LEN);
    for (int i = 0; i < N; i++) {
        (void)snprintf(name + LEN, 8, "%d", i);
        (void)small_add(&c, name, CKPT_U8, 1, 0);
    }
    CHECK_OK(ckpt_shards_split(c.cat, 1000, false, NULL, &s, &err));
    CHECK_EQ(s.nfile, 2);
    CHECK_EQ(s.file[0], 0);
    CHECK_EQ(s.file[N - 1], 1);
    ckpt_shards_release(&s);
    small_catalog_free(&c);
    free(name);
}

static bool before(const char *a, const char *b)
{
    return ckpt_fqn_cmp(a, b) < 0 && ckpt_fqn_cmp(b, a) > 0;
}

TEST(shards, names_are_ordered_as_a_saved_state_dict)
{
    CHECK(before("lm_head.weight", "model.embed_tokens.weight"));
    CHECK(before("layers.2.w", "layers.10.w"));
    CHECK(before("layers.10.w", "layers.x.w"));
    CHECK(before("experts.0.up", "gate.weight"));
    CHECK(before("a.A_log", "a.D"));
    CHECK(before("a.D", "a.conv1d.bias"));
    CHECK(before("w_2", "w_11"));
    CHECK(before("w", "w1"));
    CHECK(before("w9", "wa"));
    CHECK(before("a", "a.b"));
    CHECK(before("a.b", "a_b"));
    CHECK(before("99999999999999999999998", "99999999999999999999999"));
    CHECK_EQ(ckpt_fqn_cmp("a.01", "a.1"), 0);
    CHECK_EQ(ckpt_fqn_cmp("", ""), 0);
    CHECK(before("", "."));
    CHECK(before("a.0", "a."));
}

TEST(shards, sorting_moves_blocks_as_a_whole)
{
    struct small_catalog c = small_catalog_new();
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    (void)small_add(&c, "z.10", CKPT_U8, 2, 0);
    (void)small_add(&c, "b.0", CKPT_U8, 2, 7);
    (void)small_add(&c, "zz", CKPT_U8, 2, 7);
    (void)small_add(&c, "z.9", CKPT_U8, 2, 0);
    CHECK_OK(ckpt_shards_split(c.cat, 4, true, NULL, &s, &err));
    CHECK_EQ(s.nfile, 2);
    CHECK(s.file[0] == 1 && s.file[1] == 0 && s.file[2] == 0 && s.file[3] == 1);
    ckpt_shards_release(&s);
    small_catalog_free(&c);
}

static int map_split(const char *json, struct ckpt_shards *s, struct ckpt_err *err)
{
    struct small_catalog c = sized((const int[]){1, 1, 1, 1}, 4);
    struct ckpt_weight_map *map = made_map(json_loads(json, 0, NULL));
    int result = ckpt_shards_by_map(c.cat, map, s, err);

    ckpt_weight_map_unref(map);
    small_catalog_free(&c);
    return result;
}

TEST(shards, a_map_decides_and_the_rest_goes_to_its_last_file)
{
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    CHECK_OK(map_split("{\"t3\": \"b.safetensors\", \"t1\": \"a.safetensors\", "
                       "\"not ours\": \"z.safetensors\"}",
                       &s, &err));
    CHECK_EQ(s.nfile, 2);
    CHECK_STR(s.name[0], "a.safetensors");
    CHECK_STR(s.name[1], "b.safetensors");
    CHECK(s.file[0] == 1 && s.file[1] == 0 && s.file[2] == 1 && s.file[3] == 1);
    CHECK_EQ(s.total_bytes, 4);
    ckpt_shards_release(&s);
}

TEST(shards, a_map_may_name_files_in_folders)
{
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    CHECK_OK(map_split("{\"t0\": \"z.safetensors\", \"t1\": \"a/b/x.safetensors\", "
                       "\"t2\": \"a/y.safetensors\", \"t3\": \"a/b/x.safetensors\"}",
                       &s, &err));
    CHECK_EQ(s.nfile, 3);
    CHECK_STR(s.name[0], "a/b/x.safetensors");
    CHECK_STR(s.name[1], "a/y.safetensors");
    CHECK(s.file[0] == 2 && s.file[1] == 0 && s.file[2] == 1 && s.file[3] == 0);
    ckpt_shards_release(&s);
}

TEST(shards, a_map_with_strange_files_is_refused)
{
    struct ckpt_shards s;
    struct ckpt_err err = {0};

    static const char *const strange[] = {"../a.safetensors",
                                          "/a.safetensors",
                                          ".safetensors",
                                          "config.json",
                                          "a/../b.safetensors",
                                          "a//b.safetensors",
                                          "./b.safetensors",
                                          ".hidden/b.safetensors",
                                          "a/.safetensors",
                                          "a.safetensors/",
                                          "",
                                          "a/b.bin"};
    char json[100];

    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++) {
        (void)snprintf(json, sizeof json, "{\"t0\": \"%s\"}", strange[i]);
        err = (struct ckpt_err){0};
        CHECK_FAILS(map_split(json, &s, &err), CKPT_FORMAT,
                    "in the model's directory or in a folder");
    }
    CHECK_FAILS(map_split("{\"t0\": \"pytorch_model.bin\"}", &s, &err), CKPT_FORMAT, "t0");
    CHECK_FAILS(map_split("{\"x\": \"a.safetensors\"}", &s, &err), CKPT_MISSING, "none");
    CHECK_FAILS(map_split("{}", &s, &err), CKPT_MISSING, "none");
    CHECK_FAILS(map_split("[]", &s, &err), CKPT_MISSING, "none");
}

static uint64_t size_of(const char *text)
{
    uint64_t size = 0;
    return ckpt_shards_parse_size(text, &size) ? size : 0;
}

TEST(shards, sizes_are_decimal)
{
    CHECK_EQ(size_of("5GB"), 5000000000);
    CHECK_EQ(size_of("50gb"), CKPT_DEFAULT_SHARD_SIZE);
    CHECK_EQ(size_of("1.5 MB"), 1500000);
    CHECK_EQ(size_of("200KB"), 200000);
    CHECK_EQ(size_of("2Tb"), 2000000000000);
    CHECK_EQ(size_of("12345"), 12345);
    static const char *const bad[] = {"",       "GB",    "5",   "5GiB",  "5B",
                                      "-5GB",   "0",     "0MB", "1e3GB", "5 G",
                                      "x5GB",   "5..GB", ".GB", "9e9TB", "99999999999TB",
                                      "0x10KB", "+5GB",  " 5",  "infGB"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_EQ(size_of(bad[i]), strcmp(bad[i], "5") == 0 ? 5 : 0);
}

TESTS(T(shards, sizes_are_decimal), T(shards, tensors_fill_files_in_order),
      T(shards, a_tensor_above_the_limit_gets_its_own_file), T(shards, empty_tensors_take_no_room),
      T(shards, a_block_is_one_item), T(shards, neighbouring_blocks_are_told_apart_by_number),
      T(shards, names_count_from_one), T(shards, no_tensors_make_no_file),
      T(shards, more_than_63_bits_of_bytes_are_refused),
      T(shards, a_header_does_not_grow_beyond_what_the_library_reads),
      T(shards, names_are_ordered_as_a_saved_state_dict),
      T(shards, sorting_moves_blocks_as_a_whole),
      T(shards, a_map_decides_and_the_rest_goes_to_its_last_file),
      T(shards, a_map_may_name_files_in_folders), T(shards, a_map_with_strange_files_is_refused))
