/* SPDX-License-Identifier: Apache-2.0 */
#include "view/shards.h"

#include "small_catalog.h"

TEST(index, it_is_spelled_as_python_does)
{
    struct small_catalog c = small_catalog_new();
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    struct ckpt_shards shards;
    struct ckpt_text text;
    struct ckpt_err err = {0};
    char buf[1024] = {0};
    const uint32_t by_name[] = {1, 0, 2};

    (void)small_add(&c, "b\"\x7f\xc3\xa9", CKPT_F32, 3, 0);
    (void)small_add(&c, "a", CKPT_BF16, 2, 0);
    (void)small_add(&c, "\xf0\x9f\x98\x80", CKPT_U8, 1, 0);
    CHECK_OK(ckpt_shards_split(c.cat, 1, false, NULL, &shards, &err));
    struct ckpt_index index = {c.cat, &shards, by_name};
    CHECK_OK(ckpt_index_text(&index, &arena, &text, &err));
    CHECK(text.len < sizeof buf);
    CHECK_OK(ckpt_text_pread(&text, buf, (size_t)text.len, 0, &err));
    CHECK_STR(buf,
              "{\n  \"metadata\": {\n    \"total_parameters\": 6,\n    \"total_size\": 17\n  },\n"
              "  \"weight_map\": {\n"
              "    \"a\": \"model-00002-of-00003.safetensors\",\n"
              "    \"b\\\"\\u007f\\u00e9\": \"model-00001-of-00003.safetensors\",\n"
              "    \"\\ud83d\\ude00\": \"model-00003-of-00003.safetensors\"\n"
              "  }\n}\n");
    ckpt_shards_release(&shards);
    small_catalog_free(&c);
}

TESTS(T(index, it_is_spelled_as_python_does))
