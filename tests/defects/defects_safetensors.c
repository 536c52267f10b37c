/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a safetensors file. */
#include "defects.h"

#include "base/mem.h"
#include "base/str.h"
#include "container/safetensors.h"
#include "tree.h"

static unsigned char *bytes_of(struct ckpt_str *s, size_t *ret_len)
{
    *ret_len = s->len;
    return (unsigned char *)s->ptr;
}

/* A file of 8 bytes of length and `text` behind it. */
static unsigned char *with_length(uint64_t length, const char *text, size_t ntext, size_t *ret_len)
{
    struct ckpt_str s = {0};

    for (int i = 0; i < 8; i++)
        ckpt_str_putc(&s, (char)(length >> 8 * i));
    ckpt_str_append(&s, text, ntext);
    return bytes_of(&s, ret_len);
}

static unsigned char *empty(size_t *len) { return with_length(0, "", 0, len); }

static unsigned char *nothing(size_t *len)
{
    *len = 0;
    return calloc(1, 1);
}

static unsigned char *seven_bytes(size_t *len)
{
    *len = 7;
    return calloc(7, 1);
}

static unsigned char *one(size_t *len) { return with_length(1, "{", 1, len); }

static unsigned char *longer(size_t *len) { return with_length(100, "{}", 2, len); }

static unsigned char *length_2_63(size_t *len) { return with_length(1ULL << 63, "{}", 2, len); }

static unsigned char *length_max(size_t *len) { return with_length(UINT64_MAX, "{}", 2, len); }

static unsigned char *above_limit(size_t *len)
{
    return with_length(CKPT_ST_MAX_HEADER + 1ULL, "{}", 2, len);
}

static unsigned char *nul_text(size_t *len) { return with_length(4, "{}\0\0", 4, len); }

static unsigned char *nul_name(size_t *len)
{
    static const char text[] =
        "{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}x";
    return with_length(sizeof text - 2, text, sizeof text - 1, len);
}

static unsigned char *bad_utf8(size_t *len)
{
    static const char text[] =
        "{\"a\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}x";
    return with_length(sizeof text - 2, text, sizeof text - 1, len);
}

static unsigned char *long_name(size_t *len)
{
    struct ckpt_str s = {0};

    ckpt_str_puts(&s, "{\"");
    for (int i = 0; i < 100 * 1000; i++)
        ckpt_str_putc(&s, 'n');
    ckpt_str_puts(&s, "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
    unsigned char *file = tree_st_bytes(s.ptr, 1, len);
    ckpt_str_release(&s);
    return file;
}

static unsigned char *repeated(const char *begin, const char *unit, int n, size_t *len)
{
    struct ckpt_str s = {0};

    ckpt_str_puts(&s, begin);
    for (int i = 0; i < n; i++)
        ckpt_str_puts(&s, unit);
    unsigned char *file = tree_st_bytes(s.ptr, 0, len);
    ckpt_str_release(&s);
    return file;
}

static unsigned char *bomb(size_t *len) { return repeated("", "[", 5000000, len); }

static unsigned char *bomb_in_tensor(size_t *len)
{
    return repeated("{\"a\":", "{\"a\":", 100000, len);
}

static unsigned char *rank_100(size_t *len)
{
    struct ckpt_str s = {0};

    ckpt_str_puts(&s, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1");
    for (int i = 1; i < 100; i++)
        ckpt_str_puts(&s, ",1");
    ckpt_str_puts(&s, "],\"data_offsets\":[0,1]}}");
    unsigned char *file = tree_st_bytes(s.ptr, 1, len);
    ckpt_str_release(&s);
    return file;
}

/* `last` replaces the last tensor. */
static unsigned char *million(const char *last, size_t *len)
{
    struct ckpt_str s = {0};

    ckpt_str_putc(&s, '{');
    for (int i = 0; i < 999999; i++)
        ckpt_str_printf(&s, "\"t%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]},", i,
                        i, i + 1);
    ckpt_str_puts(&s, last);
    ckpt_str_putc(&s, '}');
    unsigned char *file = tree_st_bytes(s.ptr, 1000000, len);
    ckpt_str_release(&s);
    return file;
}

static unsigned char *million_sound(size_t *len)
{
    return million("\"z\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[999999,1000000]}", len);
}

static unsigned char *million_overlap(size_t *len)
{
    return million("\"z\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[500000,500001]}", len);
}

#define A(dtype, shape, offsets)                                                                   \
    "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define AB(offsets_a, offsets_b)                                                                   \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets_a "},"                      \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" offsets_b "}}"

static const struct lie {
    const char *name;
    const char *header; /* with ndata bytes behind it; or */
    size_t ndata;
    unsigned char *(*make)(size_t *ret_len);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", A("U8", "[2,2]", "[0,4]"), 4, NULL, CKPT_OK, NULL},
    {"sound_no_tensors", "{}", 0, NULL, CKPT_OK, NULL},
    {"sound_scalar", A("F64", "[]", "[0,8]"), 8, NULL, CKPT_OK, NULL},
    {"sound_empty_tensor", A("F64", "[3,0]", "[0,0]"), 0, NULL, CKPT_OK, NULL},
    {"sound_spaces_first", "  {}", 0, NULL, CKPT_OK, NULL},
    {"sound_any_order", AB("[4,8]", "[0,4]"), 8, NULL, CKPT_OK, NULL},
    {"sound_million", NULL, 0, million_sound, CKPT_OK, NULL},

    {"file_of_nothing", NULL, 0, nothing, CKPT_FORMAT, "has 0 bytes"},
    {"file_of_seven_bytes", NULL, 0, seven_bytes, CKPT_FORMAT, "has 7 bytes"},
    {"length_0", NULL, 0, empty, CKPT_FORMAT, "not valid JSON"},
    {"length_1", NULL, 0, one, CKPT_FORMAT, "not valid JSON"},
    {"length_above_file", NULL, 0, longer, CKPT_FORMAT, "claims 100 bytes, the file has 2"},
    {"length_2_63", NULL, 0, length_2_63, CKPT_FORMAT, "claims 9223372036854775808 bytes"},
    {"length_max", NULL, 0, length_max, CKPT_FORMAT, "claims 18446744073709551615 bytes"},
    {"length_above_limit", NULL, 0, above_limit, CKPT_FORMAT, "claims 100000001 bytes, at most"},

    {"json_garbage", "garbage!", 0, NULL, CKPT_FORMAT, "not valid JSON"},
    {"json_truncated", "{\"a\":{", 0, NULL, CKPT_FORMAT, "not valid JSON"},
    {"json_then_more", "{}{}", 0, NULL, CKPT_FORMAT, "not valid JSON"},
    {"json_then_nul", NULL, 0, nul_text, CKPT_FORMAT, "not valid JSON"},
    {"json_array", "[]", 0, NULL, CKPT_FORMAT, "not a JSON object"},
    {"json_string", "\"text\"", 0, NULL, CKPT_FORMAT, "JSON"},
    {"json_nan", "{\"a\":NaN}", 0, NULL, CKPT_FORMAT, "not valid JSON"},
    {"json_depth_bomb", NULL, 0, bomb, CKPT_LIMIT, "nested deeper"},
    {"json_depth_bomb_of_objects", NULL, 0, bomb_in_tensor, CKPT_LIMIT, "nested deeper"},

    {"data_missing", A("U8", "[4]", "[0,4]"), 3, NULL, CKPT_FORMAT, "is truncated"},
    {"data_trailing", A("U8", "[4]", "[0,4]"), 5, NULL, CKPT_FORMAT, "1 bytes after the last"},
    {"data_without_tensors", "{}", 5, NULL, CKPT_FORMAT, "5 bytes after the last"},
    {"offsets_overlap", AB("[0,4]", "[2,6]"), 6, NULL, CKPT_FORMAT, "'b' overlaps tensor 'a'"},
    {"offsets_same", AB("[0,4]", "[0,4]"), 4, NULL, CKPT_FORMAT, "overlaps tensor"},
    {"offsets_hole", AB("[0,4]", "[5,9]"), 9, NULL, CKPT_FORMAT, "belong to no tensor"},
    {"offsets_hole_at_begin", A("U8", "[4]", "[4,8]"), 8, NULL, CKPT_FORMAT, "bytes 0..4 before"},
    {"offsets_past_end", A("U8", "[4]", "[9007199254740992,9007199254740996]"), 4, NULL,
     CKPT_FORMAT, "belong to no tensor"},
    {"offsets_reversed", A("U8", "[4]", "[4,0]"), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_negative", A("U8", "[4]", "[-4,0]"), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_float", A("U8", "[4]", "[0.0,4.0]"), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_text", A("U8", "[4]", "\"0,4\""), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_one", A("U8", "[4]", "[0]"), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_three", A("U8", "[4]", "[0,4,8]"), 4, NULL, CKPT_FORMAT, "not [begin, end]"},
    {"offsets_2_64", A("U8", "[4]", "[0,18446744073709551616]"), 4, NULL, CKPT_FORMAT, "JSON"},
    {"offsets_too_few_for_shape", A("F32", "[4]", "[0,8]"), 8, NULL, CKPT_FORMAT,
     "span 8 bytes, its shape needs 16"},
    {"offsets_absent", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, NULL, CKPT_FORMAT,
     "not [begin, end]"},

    {"shape_absent", "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, NULL, CKPT_FORMAT,
     "has no shape"},
    {"shape_negative", A("U8", "[-1]", "[0,4]"), 4, NULL, CKPT_FORMAT, "is not a size"},
    {"shape_float", A("U8", "[4.0]", "[0,4]"), 4, NULL, CKPT_FORMAT, "is not a size"},
    {"shape_text", A("U8", "[\"4\"]", "[0,4]"), 4, NULL, CKPT_FORMAT, "is not a size"},
    {"shape_huge", A("U8", "[9223372036854775807]", "[0,4]"), 4, NULL, CKPT_FORMAT, "needs"},
    {"shape_overflows", A("U8", "[4294967296,4294967296]", "[0,0]"), 0, NULL, CKPT_FORMAT,
     "larger than any file"},
    {"shape_overflows_bytes", A("F64", "[4611686018427387904]", "[0,0]"), 0, NULL, CKPT_FORMAT,
     "larger than any file"},
    {"shape_rank_13", A("U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, NULL, CKPT_LIMIT,
     "13 dimensions"},
    {"shape_rank_100", NULL, 0, rank_100, CKPT_LIMIT, "100 dimensions"},

    {"dtype_unknown", A("F7", "[4]", "[0,4]"), 4, NULL, CKPT_UNSUPPORTED, "dtype 'F7'"},
    {"dtype_torch_name", A("bfloat16", "[2]", "[0,4]"), 4, NULL, CKPT_UNSUPPORTED, "'bfloat16'"},
    {"dtype_lower_case", A("u8", "[4]", "[0,4]"), 4, NULL, CKPT_UNSUPPORTED, "dtype 'u8'"},
    {"dtype_number", "{\"a\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, NULL,
     CKPT_FORMAT, "has no dtype"},
    {"tensor_not_an_object", "{\"a\":[1,2]}", 0, NULL, CKPT_FORMAT, "tensor 'a'"},
    {"tensor_null", "{\"a\":null}", 0, NULL, CKPT_FORMAT, "tensor 'a'"},

    {"name_twice",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0, NULL, CKPT_FORMAT, "duplicate"},
    {"name_with_nul", NULL, 0, nul_name, CKPT_FORMAT, "not valid JSON"},
    {"name_not_utf8", NULL, 0, bad_utf8, CKPT_FORMAT, "byte 0xff"},
    {"name_of_100_kB", NULL, 0, long_name, CKPT_LIMIT, "100000 bytes"},
    {"metadata_not_an_object", "{\"__metadata__\":[]}", 0, NULL, CKPT_FORMAT, "__metadata__"},
    {"metadata_of_numbers", "{\"__metadata__\":{\"a\":1}}", 0, NULL, CKPT_FORMAT,
     "'a' is not a string"},
    {"dtype_twice",
     "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", 0, NULL,
     CKPT_FORMAT, "duplicate object key 'dtype'"},
    {"metadata_key_twice", "{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"1\"}}", 0, NULL,
     CKPT_FORMAT, "duplicate object key 'a'"},
    {"metadata_twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, NULL, CKPT_FORMAT,
     "duplicate"},
    {"metadata_null", "{\"__metadata__\":null}", 0, NULL, CKPT_FORMAT, "__metadata__"},
    {"million_with_one_overlap", NULL, 0, million_overlap, CKPT_FORMAT, "overlaps tensor"},
};

static void try(struct judge *j, const struct lie *lie)
{
    size_t len;
    unsigned char *file =
        lie->make ? lie->make(&len) : tree_st_bytes(lie->header, lie->ndata, &len);
    struct ckpt_source *s;
    struct ckpt_st st = {0};
    struct ckpt_err err = {0};

    TREE_MUST(ckpt_source_mem_new("x.safetensors", file, len, &s, &err) == 0);
    clock_t begin = clock();
    int result = ckpt_st_read(s, &st, &err);
    judge(j, lie->name, result, &err, lie->code, "'x.safetensors'", lie->needle, begin);
    ckpt_st_release(&st);
    ckpt_source_unref(s);
    free(file);
}

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++)
        if (wanted(&j, lies[i].name))
            try(&j, &lies[i]);
    return verdict(&j);
}
