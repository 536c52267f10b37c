/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of nanotron's slice metadata: shape, pairs, version. */
#include "defects.h"

#include <stdlib.h>

#include "base/str.h"
#include "format/nanotron/shards.h"

static const struct shape {
    const char *name, *text;
    enum ckpt_code code;
} shapes[] = {
    {"shape_sound", "(64, 32)", CKPT_OK},
    {"shape_scalar", "()", CKPT_OK},
    {"shape_numpy_last", "(32, np.int64(5))", CKPT_OK},
    {"shape_empty", "", CKPT_FORMAT},
    {"shape_list", "[64, 32]", CKPT_FORMAT},
    {"shape_number", "64", CKPT_FORMAT},
    {"shape_in_parentheses", "(64)", CKPT_FORMAT},
    {"shape_open", "(64, 32", CKPT_FORMAT},
    {"shape_only_open", "(", CKPT_FORMAT},
    {"shape_two_commas", "(64,, 32)", CKPT_FORMAT},
    {"shape_comma_first", "(, 64)", CKPT_FORMAT},
    {"shape_no_comma", "(64 32)", CKPT_FORMAT},
    {"shape_negative", "(-64, 32)", CKPT_FORMAT},
    {"shape_plus", "(+64, 32)", CKPT_FORMAT},
    {"shape_float", "(64.0, 32)", CKPT_FORMAT},
    {"shape_hex", "(0x40, 32)", CKPT_FORMAT},
    {"shape_text", "(a, b)", CKPT_FORMAT},
    {"shape_None", "(None, 32)", CKPT_FORMAT},
    {"shape_2_63", "(9223372036854775808,)", CKPT_FORMAT},
    {"shape_2_64", "(18446744073709551616,)", CKPT_FORMAT},
    {"shape_trailing", "(64, 32) ", CKPT_FORMAT},
    {"shape_twice", "(64, 32)(1,)", CKPT_FORMAT},
    {"shape_torch_size", "torch.Size([64, 32])", CKPT_FORMAT},
    {"shape_numpy_open", "(np.int64(64, 32)", CKPT_FORMAT},
    {"shape_numpy_empty", "(np.int64(),)", CKPT_FORMAT},
    {"shape_numpy_float", "(np.float64(64),)", CKPT_FORMAT},
    {"shape_nested", "((64, 32))", CKPT_FORMAT},
    {"shape_rank_13", "(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)", CKPT_LIMIT},
};

/* For a file of [4, 6] of a parameter of [8, 6]. */
static const struct pairs {
    const char *name, *text;
    enum ckpt_code code;
    const char *needle;
} pairs[] = {
    {"pairs_sound", "None,None,None|None,None,None#4,8,None|None,None,None", CKPT_OK, NULL},
    {"pairs_sound_step_1", "0,4,1|0,6,1#4,8,1|0,6,1", CKPT_OK, NULL},
    {"pairs_empty", "", CKPT_FORMAT, "at byte 0"},
    {"pairs_garbage", "garbage", CKPT_FORMAT, "at byte 0"},
    {"pairs_no_global", "None,None,None|None,None,None", CKPT_FORMAT, "not slices"},
    {"pairs_rank_1", "0,4,None#4,8,None", CKPT_FORMAT, "not slices"},
    {"pairs_rank_3", "0,4,None|0,6,None|0,1,None#4,8,None|0,6,None|0,1,None", CKPT_FORMAT,
     "not slices"},
    {"pairs_step_2", "0,4,2|0,6,None#4,8,2|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_step_0", "0,4,0|0,6,None#4,8,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_negative", "-4,None,None|0,6,None#4,8,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_reversed", "4,0,None|0,6,None#8,4,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_past_file", "0,5,None|0,6,None#3,8,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_past_whole", "0,4,None|0,6,None#5,9,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_two_sizes", "0,4,None|0,6,None#4,7,None|0,6,None", CKPT_FORMAT, "has two sizes"},
    {"pairs_broadcast", "0,1,None|0,6,None#0,8,None|0,6,None", CKPT_FORMAT, "has two sizes"},
    {"pairs_2_64", "0,18446744073709551616,None|0,6,None#4,8,None|0,6,None", CKPT_FORMAT,
     "not slices"},
    {"pairs_blank", "0, 4,None|0,6,None#4,8,None|0,6,None", CKPT_FORMAT, "not slices"},
    {"pairs_trailing", "0,4,None|0,6,None#4,8,None|0,6,None,", CKPT_FORMAT, "unexpected"},
    {"pairs_semicolon_last", "0,4,None|0,6,None#4,8,None|0,6,None;", CKPT_FORMAT, "not slices"},
    {"pairs_colons", "0:4|0:6#4:8|0:6", CKPT_FORMAT, "not slices"},
};

static const struct version {
    const char *name, *text;
    enum ckpt_code code;
} versions[] = {
    {"version_sound", "1.4", CKPT_OK},
    {"version_old", "0.1", CKPT_OK},
    {"version_equal", "1.5.0", CKPT_OK},
    {"version_newer", "1.6", CKPT_UNSUPPORTED},
    {"version_patch", "1.5.1", CKPT_UNSUPPORTED},
    {"version_by_number", "1.10", CKPT_UNSUPPORTED},
    {"version_2", "2", CKPT_UNSUPPORTED},
    {"version_empty", "", CKPT_FORMAT},
    {"version_text", "latest", CKPT_FORMAT},
    {"version_dot", "1.", CKPT_FORMAT},
    {"version_v", "v1.4", CKPT_FORMAT},
    {"version_rc", "1.4rc1", CKPT_FORMAT},
    {"version_negative", "-1.4", CKPT_FORMAT},
};

static void try_shapes(struct judge *j)
{
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct ckpt_err err = {0};
        uint64_t dim[CKPT_MAX_RANK];
        uint32_t rank;
        if (wanted(j, shapes[i].name))
            judge(j, shapes[i].name, ckpt_nt_shape_parse(shapes[i].text, dim, &rank, &err), &err,
                  shapes[i].code, shapes[i].text, "unsharded_shape", clock());
    }
}

static void try_pairs(struct judge *j, const char *name, const char *text, enum ckpt_code code,
                      const char *needle)
{
    static const uint64_t local[] = {4, 6}, whole[] = {8, 6};
    struct ckpt_box_pair *pair = NULL;
    struct ckpt_err err = {0};
    clock_t begin = clock();
    size_t n;

    if (!wanted(j, name))
        return;
    int result = ckpt_nt_pairs_parse(text, local, whole, 2, &pair, &n, &err);
    judge(j, name, result, &err, code, "local_global_slices_pairs", needle, begin);
    free(pair);
}

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};
    struct ckpt_str many = {0};

    try_shapes(&j);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        try_pairs(&j, pairs[i].name, pairs[i].text, pairs[i].code, pairs[i].needle);
    for (int i = 0; i < 1000 * 1000; i++)
        ckpt_str_puts(&many, i ? ";0,1,1|0,6,1#0,1,1|0,6,1" : "0,1,1|0,6,1#0,1,1|0,6,1");
    try_pairs(&j, "pairs_million", ckpt_str_get(&many), CKPT_LIMIT, "more than 4096 pairs");
    ckpt_str_release(&many);
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        struct ckpt_err err = {0};
        if (wanted(&j, versions[i].name))
            judge(&j, versions[i].name, ckpt_nt_version_check(versions[i].text, &err), &err,
                  versions[i].code, versions[i].text, "version", clock());
    }
    return verdict(&j);
}
