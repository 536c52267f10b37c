/* SPDX-License-Identifier: Apache-2.0 */
/* The options that say as what a view is laid out: values that are none, and keys that a format
 * lacks. */
#include <ckptfs/ckptfs.h>

#include "base/mem.h"
#include "format/writer.h"
#include "model/options.h"

#include "test.h"

/* Set options ("view=dcp ranks=2") and check that they go together. */
static int check(const char *words, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *opt = NULL;
    char copy[256], *save = NULL;

    (void)snprintf(copy, sizeof copy, "%s", words);
    if (ckpt_options_new(&opt, err) < 0)
        return -1;
    for (char *word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        char *value = strchr(word, '=');
        if (value)
            *value++ = '\0';
        if (ckpt_options_set(opt, word, value, err) < 0)
            return -1;
    }
    return ckpt_options_check(opt, err);
}

TEST(output, values_that_are_no_numbers_of_ranks)
{
    struct ckpt_err err = {0};
    static const char *const bad[] = {
        "", "0", "-1", "4x", "1.5", " 2", "0x2", "18446744073709551617", "1048577"};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ckpt_cleanup(ckpt_options_freep) struct ckpt_options *opt = NULL;
        CHECK_OK(ckpt_options_new(&opt, &err));
        CHECK_FAILS(ckpt_options_set(opt, "tp", bad[i], &err), CKPT_USAGE, "from 1 to 1048576");
    }
    CHECK_FAILS(check("tp", &err), CKPT_USAGE, "tp");
    CHECK_FAILS(check("names=both", &err), CKPT_USAGE, "is not one of hub|memory");
    CHECK_FAILS(check("names", &err), CKPT_USAGE, "is not one of hub|memory");
    CHECK_FAILS(check("view=megatron_old", &err), CKPT_USAGE, "not one of hf|raw|memory|dcp");
}

TEST(output, keys_that_a_format_lacks)
{
    struct ckpt_err err = {0};
    static const struct {
        const char *words, *says;
    } bad[] = {
        {"tp=2", "option tp: view=hf shows whole tensors"},
        {"tp=1", "view=nanotron, view=megatron, view=megatron_legacy"},
        {"view=raw ranks=2", "option ranks: view=raw"},
        {"names=hub", "option names: view=hf"},
        {"view=memory names=memory", "option names: view=memory"},
        {"fuse_qkv", "option fuse_qkv: it goes with the option optimizer"},
        {"view=torchtitan fuse_qkv", "option fuse_qkv: it goes with the option optimizer"},
        {"view=dcp optimizer fuse_qkv", "option fuse_qkv does not apply to view=dcp"},
        {"view=dcp optimizer fuse_qkv=no", "option fuse_qkv does not apply to view=dcp"},
        {"view=torchtitan optimizer fuse_qkv=maybe", "option fuse_qkv: 'maybe' is not"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_FAILS(check(bad[i].words, &err), CKPT_USAGE, bad[i].says);
}

/* Each format of the list can be asked for by its name. */
TEST(output, every_format_is_an_option)
{
    struct ckpt_err err = {0};
    size_t n = 0;

    for (const struct ckpt_writer *const *w = ckpt_writers; *w; w++, n++) {
        ckpt_cleanup(ckpt_options_freep) struct ckpt_options *opt = NULL;
        char words[64];
        (void)snprintf(words, sizeof words, "view=%s", (*w)->name);
        CHECK_OK(ckpt_options_new(&opt, &err));
        CHECK_OK(ckpt_options_set(opt, "view", (*w)->name, &err));
        CHECK(opt->output.writer == *w);
        CHECK_OK(check(words, &err));
    }
    CHECK_EQ(n, 8);
}

/* Two layouts have two sets of bytes. */
TEST(output, views_of_two_layouts_have_two_generations)
{
    struct ckpt_err err = {0};
    static const char *const words[][2] = {
        {"view", "dcp"},      {"ranks", "2"},      {"names", "memory"},
        {"view", "dcp_hf"},   {"view", "hf"},      {"view", "torchtitan"},
        {"optimizer", "yes"}, {"fuse_qkv", "yes"}, {"fuse_qkv", "no"}};
    enum { N = sizeof words / sizeof *words };
    ckpt_cleanup(ckpt_options_freep) struct ckpt_options *opt = NULL;
    uint64_t seen[N + 1];

    CHECK_OK(ckpt_options_new(&opt, &err));
    seen[0] = ckpt_options_hash(opt);
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(ckpt_options_set(opt, words[i][0], words[i][1], &err));
        seen[i + 1] = ckpt_options_hash(opt);
        for (size_t k = 0; k <= i; k++)
            CHECK(seen[i + 1] != seen[k]);
    }
}

TESTS(T(output, values_that_are_no_numbers_of_ranks), T(output, keys_that_a_format_lacks),
      T(output, every_format_is_an_option), T(output, views_of_two_layouts_have_two_generations), )
