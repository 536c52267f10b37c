/* SPDX-License-Identifier: Apache-2.0 */
/* YAML as PyYAML writes it. */
#include "test.h"

#include "container/config.h"

static void check(const char *yaml, const char *want)
{
    struct ckpt_err err = {0};
    json_t *j;
    char *got;
    if (ckpt_yaml_parse(yaml, strlen(yaml), "t", &j, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &got, NULL, &err), 0);
    assert_string_equal(got, want);
    free(got);
    json_decref(j);
}

TEST(yaml, plain_scalars_have_the_types_of_pyyaml)
{
    UNUSED_STATE;
    check("[null, ~, Null, '', \"null\", nil]", "[null,null,null,\"\",\"null\",\"nil\"]");
    check("[true, True, FALSE, 'true', tRue]", "[true,true,false,\"true\",\"tRue\"]");
    check("[1, -3, +4, '5', 1f1b, 1.0.0]", "[1,-3,4,\"5\",\"1f1b\",\"1.0.0\"]");
    check("[1.0e-06, 0.1, 3., -.5, 1e-05]", "[1e-06,0.1,3.0,-0.5,1e-05]");
    check("[99999999999999999999]", "[\"99999999999999999999\"]");
    check("{1: a, true: b, null: c}", "{\"1\":\"a\",\"true\":\"b\",\"null\":\"c\"}");
}

TEST(yaml, block_style_of_a_real_config_is_read)
{
    UNUSED_STATE;
    check("general:\n  step: 10\nmodel:\n  init_method:\n    std: 0.025\n  dtype: bfloat16\n"
          "data_stages:\n- data:\n    seed: 1\n  name: first stage\nprofiler: null\n",
          "{\"general\":{\"step\":10},\"model\":{\"init_method\":{\"std\":0.025},\"dtype\":"
          "\"bfloat16\"},\"data_stages\":[{\"data\":{\"seed\":1},\"name\":\"first stage\"}],"
          "\"profiler\":null}");
}

TEST(yaml, aliases_are_copies)
{
    UNUSED_STATE;
    check("a: &x [1, {b: 2}]\nc: *x\nd: &x 3\ne: *x\n",
          "{\"a\":[1,{\"b\":2}],\"c\":[1,{\"b\":2}],\"d\":3,\"e\":3}");
}

TESTS(T(yaml, plain_scalars_have_the_types_of_pyyaml),
      T(yaml, block_style_of_a_real_config_is_read), T(yaml, aliases_are_copies))
