/* SPDX-License-Identifier: Apache-2.0 */
/* The order of a state dict from the two orders that a .metadata has. */
#include "format/dcp/metadata.h"

#include "test.h"

#define CHECK_ORDER(n, planned, ...)                                                               \
    do {                                                                                           \
        const uint32_t want[] = {__VA_ARGS__};                                                     \
        UNUSED_STATE;                                                                              \
        uint32_t got[n];                                                                           \
        assert_int_equal(ckpt_dcp_order(planned, sizeof(planned) / sizeof *(planned), n, got), 0); \
        assert_memory_equal(got, want, sizeof want);                                               \
    } while (0)

/* Numbers are places in state_dict_metadata. Two ranks hold a, b, c, d alike: rank 0 writes a and
 * c, rank 1 the others, so the metadata says a, c, b, d, the plan a, b, c, d. */
TEST(order, of_ranks_with_the_same_tensors_is_that_of_the_plan)
{
    const uint32_t planned[] = {0, 2, 1, 3};
    CHECK_ORDER(4, planned, 0, 2, 1, 3);
}

/* Stage 0 has a, b, c, stage 1 d, e; each stage two ranks, which share the writing. ChainMap puts
 * stage 1 first. */
TEST(order, of_stages_is_that_of_the_ranks)
{
    const uint32_t planned[] = {3, 4, 0, 2, 1};
    const uint32_t three[] = {4, 5, 2, 3, 0, 1};
    CHECK_ORDER(5, planned, 0, 2, 1, 3, 4);
    CHECK_ORDER(6, three, 0, 1, 2, 3, 4, 5);
}

TEST(order, of_a_plan_that_lacks_or_repeats_tensors_is_that_of_the_metadata)
{
    const uint32_t lacks[] = {2, 0}, repeats[] = {2, 2, 0}, beyond[] = {3, 1, 0};
    CHECK_ORDER(3, lacks, 0, 1, 2);
    CHECK_ORDER(3, repeats, 0, 1, 2);
    CHECK_ORDER(3, beyond, 0, 1, 2);
}

TESTS(T(order, of_ranks_with_the_same_tensors_is_that_of_the_plan),
      T(order, of_stages_is_that_of_the_ranks),
      T(order, of_a_plan_that_lacks_or_repeats_tensors_is_that_of_the_metadata))
