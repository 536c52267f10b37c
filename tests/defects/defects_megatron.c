/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a Megatron directory: zarr arrays, the mark of a finished save, configurations. */
#include "directory.h"

#define W "decoder.final_layernorm.weight/"
#define E "embedding.word_embeddings.weight/"
#define MARK "metadata.json"

static void array(struct tree *t, const char *folder, const char *shape, const char *chunks,
                  const char *more)
{
    char text[1024], path[256];

    (void)snprintf(text, sizeof text,
                   "{\"zarr_format\":2,\"shape\":%s,\"chunks\":%s,\"fill_value\":null%s}", shape,
                   chunks, more);
    (void)snprintf(path, sizeof path, "%s.zarray", folder);
    tree_text(t, path, text);
}

#define U1 ",\"dtype\":\"|u1\",\"compressor\":null,\"filters\":null,\"order\":\"C\""

static void sound(struct tree *t)
{
    tree_text(t, MARK, "{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1}");
    array(t, E, "[5, 2]", "[2, 2]", U1);
    tree_text(t, E "0.0", "abcd");
    tree_text(t, E "1.0", "efgh");
    tree_text(t, E "2.0", "ijkl"); /* the last row is nobody's */
    array(t, W, "[2]", "[2]", U1);
    tree_text(t, W "0", "xy");
}

static void nothing(struct tree *t) { (void)t; }

static void bfloat16(struct tree *t) { array(t, W, "[1]", "[1]", ",\"dtype\":\"bfloat16\""); }

static void two_bytes(struct tree *t) { array(t, W, "[1]", "[1]", ",\"dtype\":\"<V2\""); }

static void slash(struct tree *t)
{
    array(t, E, "[5, 2]", "[2, 2]", U1 ",\"dimension_separator\":\"/\"");
    tree_delete(t, E "0.0");
    tree_delete(t, E "1.0");
    tree_delete(t, E "2.0");
    tree_text(t, E "0/0", "abcd");
    tree_text(t, E "1/0", "efgh");
    tree_text(t, E "2/0", "ijkl");
}

static void scalar(struct tree *t)
{
    array(t, W, "[]", "[]", U1);
    tree_text(t, W "0", "x");
}

static void empty(struct tree *t)
{
    array(t, W, "[0, 3]", "[1, 3]", U1);
    tree_delete(t, W "0");
}

static void other_state(struct tree *t)
{
    tree_text(t, "optimizer.state.exp_avg.x/.zarray", "no JSON");
    tree_text(t, "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4.pt", "x");
    tree_text(t, "optimizer.sync/lock", "");
}

static void lost_chunk(struct tree *t) { tree_delete(t, E "1.0"); }

static void surplus_chunk(struct tree *t) { tree_text(t, E "3.0", "mnop"); }

static void surplus_of_none(struct tree *t) { array(t, W, "[0]", "[2]", U1); }

static void partial_file(struct tree *t) { tree_text(t, E "0.0.2f6c.partial", "ab"); }

static void odd_chunk(struct tree *t) { array(t, E, "[5, 2]", "[3, 2]", U1); }

static void lost_last(struct tree *t) { tree_delete(t, W "0"); }

static void short_chunk(struct tree *t) { tree_text(t, E "1.0", "efg"); }

static void long_chunk(struct tree *t) { tree_text(t, E "1.0", "efghi"); }

static void fifo(struct tree *t)
{
    tree_delete(t, E "0.0");
    tree_fifo(t, E "0.0");
}

static void link_out(struct tree *t)
{
    tree_delete(t, E "0.0");
    tree_link(t, "/etc/hostname", E "0.0");
}

static void compressed(struct tree *t)
{
    array(t, E, "[5, 2]", "[2, 2]", ",\"dtype\":\"|u1\",\"compressor\":{\"id\":\"blosc\"}");
}

static void filtered(struct tree *t)
{
    array(t, E, "[5, 2]", "[2, 2]", ",\"dtype\":\"|u1\",\"filters\":[{\"id\":\"delta\"}]");
}

static void fortran(struct tree *t)
{
    array(t, E, "[5, 2]", "[2, 2]", ",\"dtype\":\"|u1\",\"order\":\"F\"");
}

static void big_endian(struct tree *t) { array(t, E, "[5, 2]", "[2, 2]", ",\"dtype\":\">f4\""); }

static void no_dtype(struct tree *t) { array(t, E, "[5, 2]", "[2, 2]", ""); }

static void version_3(struct tree *t) { tree_text(t, E ".zarray", "{\"zarr_format\": 3}"); }

static void no_version(struct tree *t) { tree_text(t, E ".zarray", "{}"); }

static void garbage(struct tree *t) { tree_text(t, E ".zarray", "{\"zarr"); }

static void array_list(struct tree *t) { tree_text(t, E ".zarray", "[]"); }

static void chunk_of_none(struct tree *t) { array(t, E, "[5, 2]", "[0, 2]", U1); }

static void negative(struct tree *t) { array(t, E, "[-3, 2]", "[2, 2]", U1); }

static void real(struct tree *t) { array(t, E, "[3.0, 2]", "[2, 2]", U1); }

static void ranks_differ(struct tree *t) { array(t, E, "[5, 2]", "[2]", U1); }

static void many_ranks(struct tree *t)
{
    array(t, E, "[1,1,1,1,1,1,1,1,1,1,1,1,1]", "[1,1,1,1,1,1,1,1,1,1,1,1,1]", U1);
}

static void huge_chunk(struct tree *t)
{
    array(t, E, "[9223372036854775807, 9]", "[9223372036854775807, 9]", U1);
}

static void huge_shape(struct tree *t)
{
    array(t, E, "[9223372036854775807, 9223372036854775807]", "[2, 2]", U1);
}

static void many_chunks(struct tree *t) { array(t, E, "[1000000000000, 2]", "[2, 2]", U1); }

static void separator(struct tree *t)
{
    array(t, E, "[5, 2]", "[2, 2]", U1 ",\"dimension_separator\":\"..\"");
}

static void no_mark(struct tree *t) { tree_delete(t, MARK); }

static void other_backend(struct tree *t) { tree_text(t, MARK, "{\"sharded_backend\":\"tar\"}"); }

static void adapter(struct tree *t)
{
    array(t, "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight/", "[0]", "[1]",
          U1);
}

static void no_model(struct tree *t)
{
    tree_delete(t, E ".zarray");
    tree_delete(t, W ".zarray");
}

static void common_garbage(struct tree *t) { tree_text(t, "common.pt", "no archive"); }

static void common_fifo(struct tree *t) { tree_fifo(t, "common.pt"); }

static void config_garbage(struct tree *t) { tree_text(t, "run_config.yaml", "model: [1,"); }

static void config_list(struct tree *t) { tree_text(t, "run_config.yaml", "- 1\n"); }

static void config_bomb(struct tree *t)
{
    tree_text(t, "run_config.yaml",
              "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
              "c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
              "e: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e]\n"
              "model: [*f,*f,*f,*f,*f,*f,*f,*f]\n");
}

static void config_odd(struct tree *t)
{
    tree_text(t, "run_config.yaml", "model: 7\n"); /* then all of it is the config */
}

static void tokenizer_odd(struct tree *t)
{
    tree_text(t, "run_config.yaml", "model: {}\n");
    tree_text(t, "tokenizer/tokenizer.json", "{\"model\": {\"vocab\": {\"a\": -1, \"b\": \"c\"}}}");
}

static void tokenizer_garbage(struct tree *t) { tree_text(t, "tokenizer/tokenizer.json", "{"); }

static const struct lie lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"bfloat16", bfloat16, CKPT_OK, NULL, NULL},
    {"two_bytes", two_bytes, CKPT_OK, NULL, NULL},
    {"slash", slash, CKPT_OK, NULL, NULL},
    {"scalar", scalar, CKPT_OK, NULL, NULL},
    {"empty", empty, CKPT_OK, NULL, NULL},
    {"other_state", other_state, CKPT_OK, NULL, NULL},
    {"tokenizer_odd", tokenizer_odd, CKPT_OK, NULL, NULL},
    {"config_odd", config_odd, CKPT_OK, NULL, NULL},
    {"partial_file", partial_file, CKPT_OK, NULL, NULL},
    {"surplus_chunk", surplus_chunk, CKPT_CONFLICT, "embedding.word_embeddings.weight",
     "holds 4 chunks, by the shape in its '.zarray' it has 3"},
    {"surplus_of_none", surplus_of_none, CKPT_CONFLICT, "decoder.final_layernorm.weight",
     "it has 0"},
    {"odd_chunk", odd_chunk, CKPT_UNSUPPORTED, E ".zarray", "Megatron does not write"},
    {"lost_chunk", lost_chunk, CKPT_MISSING, E "1.0", "a missing chunk has no value"},
    {"lost_last", lost_last, CKPT_MISSING, W "0", "a missing chunk has no value"},
    {"short_chunk", short_chunk, CKPT_FORMAT, E "1.0", "has 3 bytes"},
    {"long_chunk", long_chunk, CKPT_FORMAT, E "1.0", "has 5 bytes"},
    {"fifo", fifo, CKPT_FORMAT, E "0.0", "is a FIFO"},
    {"link_out", link_out, CKPT_UNSUPPORTED, E "0.0", "leads out of"},
    {"compressed", compressed, CKPT_UNSUPPORTED, E ".zarray", "blosc"},
    {"filtered", filtered, CKPT_UNSUPPORTED, E ".zarray", "delta"},
    {"fortran", fortran, CKPT_UNSUPPORTED, E ".zarray", "order 'F'"},
    {"big_endian", big_endian, CKPT_UNSUPPORTED, E ".zarray", "dtype '>f4'"},
    {"no_dtype", no_dtype, CKPT_FORMAT, E ".zarray", "no 'dtype'"},
    {"version_3", version_3, CKPT_UNSUPPORTED, E ".zarray", "zarr format 3"},
    {"no_version", no_version, CKPT_FORMAT, E ".zarray", "no 'zarr_format'"},
    {"garbage", garbage, CKPT_FORMAT, E ".zarray", "not valid JSON"},
    {"array_list", array_list, CKPT_FORMAT, E ".zarray", "no 'zarr_format'"},
    {"chunk_of_none", chunk_of_none, CKPT_FORMAT, E ".zarray", "'chunks'"},
    {"negative", negative, CKPT_FORMAT, E ".zarray", "'shape'"},
    {"real", real, CKPT_FORMAT, E ".zarray", "'shape'"},
    {"ranks_differ", ranks_differ, CKPT_FORMAT, E ".zarray", "2 dimensions, 'chunks' 1"},
    {"many_ranks", many_ranks, CKPT_LIMIT, E ".zarray", "13 dimensions"},
    {"huge_chunk", huge_chunk, CKPT_LIMIT, E ".zarray", "larger than any file"},
    {"huge_shape", huge_shape, CKPT_LIMIT, "embedding.word_embeddings.weight", "2^64"},
    {"many_chunks", many_chunks, CKPT_MISSING, E "3.0", "a missing chunk has no value"},
    {"separator", separator, CKPT_FORMAT, E ".zarray", "dimension_separator"},
    {"no_mark", no_mark, CKPT_MISSING, "metadata.json", "not finished"},
    {"other_backend", other_backend, CKPT_UNSUPPORTED, "metadata.json", "neither"},
    {"adapter", adapter, CKPT_OK, NULL, NULL}, /* the reader shows it; a model wants both halves */
    {"no_model", no_model, CKPT_MISSING, NULL, "no tensor of a model"},
    {"common_garbage", common_garbage, CKPT_FORMAT, "common.pt", ""},
    {"common_fifo", common_fifo, CKPT_OK, NULL, NULL},
    {"config_garbage", config_garbage, CKPT_FORMAT, "run_config.yaml", "not valid YAML"},
    {"config_list", config_list, CKPT_FORMAT, "run_config.yaml", "is not a mapping"},
    {"config_bomb", config_bomb, CKPT_LIMIT, "run_config.yaml", "nodes"},
    {"tokenizer_garbage", tokenizer_garbage, CKPT_FORMAT, "tokenizer.json", "not valid JSON"},
};

int main(int argc, char **argv)
{
    return tell_all(argc, argv, &ckpt_reader_megatron, sound, lies, sizeof lies / sizeof lies[0]);
}
