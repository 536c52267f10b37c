/* SPDX-License-Identifier: Apache-2.0 */
/* The groups of an optimizer among the values of a state dict. */
#include "format/groups.h"

#include <stdlib.h>

#include "test.h"

/* The groups found in these values are those. */
static void check(void **state_, const char *values, const char *groups)
{
    json_t *in = json_loads(values, 0, NULL), *want = json_loads(groups, 0, NULL),
           *got = json_array();
    struct ckpt_err err = {0};

    CHECK(in && want && got);
    CHECK_OK(ckpt_groups_of_torch(in, got, &err));
    char *text = json_dumps(got, JSON_SORT_KEYS);
    CHECK(text);
    if (!json_equal(got, want))
        fail_msg("got %s", text);
    free(text);
    json_decref(in);
    json_decref(want);
    json_decref(got);
}

TEST(groups, of_a_nested_state_dict_are_by_number)
{
    check(
        state_,
        "{\"optim.param_groups.0.lr\": 0.5, \"optim.param_groups.0.betas\": {\"$tuple\": [0.5, "
        "0.75]}, \"optim.param_groups.0.params\": [\"a.b\", \"c\"], \"optim.param_groups.1.eps\": "
        "1, \"optim.param_groups.1.params\": [0, 1], \"optim.param_groups.1.fused\": null}",
        "[{\"lr\": 0.5, \"betas\": [0.5, 0.75], \"params\": [\"a.b\", \"c\"]}, {\"eps\": 1.0, "
        "\"fused\": null}]");
}

TEST(groups, of_a_flattened_state_dict_are_parameters_that_are_alike)
{
    check(state_,
          "{\"optimizer.param_groups.a.weight.lr\": 0.5, \"optimizer.param_groups.0.bias.lr\": "
          "0.25, \"optimizer.param_groups.b.weight.lr\": 0.5}",
          "[{\"lr\": 0.5, \"params\": [\"a.weight\", \"b.weight\"]}, {\"lr\": 0.25, \"params\": "
          "[\"0.bias\"]}]");
}

TEST(groups, have_the_learning_rates_of_a_scheduler)
{
    check(state_,
          "{\"param_groups.0.max_lr\": 0.5, \"param_groups.0.min_lr\": null, "
          "\"param_groups.1.max_lr\": 0.5, \"param_groups.1.initial_lr\": 0.25, "
          "\"param_groups.1.min_lr\": 0.125, \"param_groups.2.initial_lr\": 0.25, "
          "\"param_groups.2.max_lr\": 0.5, \"param_groups.3.max_lr\": null}",
          "[{\"initial_lr\": 0.5, \"min_lr\": null}, {\"initial_lr\": 0.25, \"min_lr\": 0.125}, "
          "{\"initial_lr\": 0.25}, {}]");
}

TEST(groups, take_no_values_of_other_kinds)
{
    check(state_,
          "{\"param_groups.0.lr\": {\"$float\": \"nan\"}, \"param_groups.0.betas\": [0.5], "
          "\"param_groups.0.eps\": \"1\", \"param_groups.0.amsgrad\": 1, \"param_groups.0.other\": "
          "2, \"param_groups.\": 1, \"param_groups.1\": 1, \"my_param_groups.0.lr\": 1, "
          "\"param_groups\": []}",
          "[{}]");
}

TESTS(T(groups, of_a_nested_state_dict_are_by_number),
      T(groups, of_a_flattened_state_dict_are_parameters_that_are_alike),
      T(groups, have_the_learning_rates_of_a_scheduler), T(groups, take_no_values_of_other_kinds), )
