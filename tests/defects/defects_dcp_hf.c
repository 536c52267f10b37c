/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of DCP saves in Hugging Face storage: shards, their sharding info, and Automodel's mappings.
 */
#include "directory.h"

#define DIR "model/"
#define META "model/.hf_metadata/"
#define FILES META "fqn_to_file_index_mapping.json"
#define DTYPES META "fqn_to_dtype_mapping.json"
#define S1 "shard-00001-model-00001-of-00001.safetensors"
#define S2 "shard-00002-model-00001-of-00001.safetensors"
#define S3 "shard-00003-model-00001-of-00001.safetensors"

/* A shard with rows of "w" [rows, 2] from row lo on (U8), and sharding info as it stands in the
 * header (quotes escaped). */
static void shard_with(struct tree *t, const char *name, const char *dtype, unsigned rows,
                       const char *metadata)
{
    char header[4096], path[256];
    unsigned len = rows * 2 * (strcmp(dtype, "U8") == 0 ? 1 : 4);

    (void)snprintf(header, sizeof header,
                   "{\"w\":{\"dtype\":\"%s\",\"shape\":[%u,2],\"data_offsets\":[0,%u]},"
                   "\"__metadata__\":{%s}}",
                   dtype, rows, len, metadata);
    (void)snprintf(path, sizeof path, DIR "%s", name);
    tree_st(t, path, header, len);
}

static void shard_info(struct tree *t, const char *name, unsigned rows, const char *info)
{
    char metadata[2048];

    (void)snprintf(metadata, sizeof metadata,
                   "\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"%s\"", info);
    shard_with(t, name, "U8", rows, metadata);
}

static void shard_at(struct tree *t, const char *name, unsigned rows, const char *offsets)
{
    char info[256];

    (void)snprintf(info, sizeof info, "{\\\"w\\\": {\\\"saved_offsets\\\": %s}}", offsets);
    shard_info(t, name, rows, info);
}

static void sound(struct tree *t)
{
    tree_text(t, META "config.json", "{\"model_type\":\"llama\"}");
    tree_text(t, FILES, "{\"w\": 2}");
    tree_text(t, DTYPES, "{\"w\": \"BF16\"}");
    shard_at(t, S1, 3, "[0, 0]");
    shard_at(t, S2, 2, "[3, 0]");
}

static void nothing(struct tree *t) { (void)t; }

static void empty_last(struct tree *t) { shard_at(t, S3, 0, "[5, 0]"); }

static void extra_info(struct tree *t)
{
    shard_info(t, S2, 2,
               "{\\\"w\\\": {\\\"saved_offsets\\\": [3, 0], \\\"more\\\": 1}, \\\"v\\\": 7}");
}

static void no_first(struct tree *t) { tree_delete(t, DIR S1); }

static void no_middle(struct tree *t)
{
    shard_at(t, S3, 1, "[5, 0]");
    tree_delete(t, DIR S2);
}

static void empty_beyond(struct tree *t) { shard_at(t, S3, 0, "[6, 0]"); }

static void stale(struct tree *t) { shard_at(t, S3, 2, "[2, 0]"); }

static void stale_twin(struct tree *t) { shard_at(t, S3, 2, "[3, 0]"); }

static void stale_count(struct tree *t)
{
    shard_at(t, "shard-00003-model-00001-of-00002.safetensors", 1, "[5, 0]");
}

static void file_absent(struct tree *t)
{
    tree_delete(t, DIR S1);
    tree_delete(t, DIR S2);
    shard_at(t, "shard-00001-model-00001-of-00002.safetensors", 3, "[0, 0]");
}

static void two_files(struct tree *t)
{
    tree_delete(t, DIR S1);
    tree_delete(t, DIR S2);
    shard_at(t, "shard-00001-model-00001-of-00002.safetensors", 3, "[0, 0]");
    shard_at(t, "shard-00002-model-00002-of-00002.safetensors", 2, "[3, 0]");
}

static void other_dtype(struct tree *t)
{
    shard_with(t, S2, "F32", 2,
               "\"DCP_SHARDING_INFO\":\"{\\\"w\\\": {\\\"saved_offsets\\\": [3, 0]}}\"");
}

static void other_rank(struct tree *t)
{
    tree_st(t, DIR S2,
            "{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"__metadata__\":{"
            "\"DCP_SHARDING_INFO\":\"{\\\"w\\\": {\\\"saved_offsets\\\": [3]}}\"}}",
            4);
}

static void no_info(struct tree *t) { shard_with(t, S2, "U8", 2, "\"format\":\"pt\""); }

static void no_metadata(struct tree *t)
{
    tree_st(t, DIR S2, "{\"w\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4);
}

static void version(struct tree *t)
{
    shard_with(t, S2, "U8", 2, "\"DCP_VERSION\":\"2.0\",\"DCP_SHARDING_INFO\":\"{}\"");
}

static void info_garbage(struct tree *t) { shard_info(t, S2, 2, "{w"); }

static void info_array(struct tree *t) { shard_info(t, S2, 2, "[]"); }

static void info_other(struct tree *t) { shard_info(t, S2, 2, "{\\\"v\\\": {}}"); }

static void info_number(struct tree *t) { shard_info(t, S2, 2, "{\\\"w\\\": 3}"); }

static void offsets_short(struct tree *t) { shard_at(t, S2, 2, "[3]"); }

static void offsets_long(struct tree *t) { shard_at(t, S2, 2, "[3, 0, 0]"); }

static void offsets_negative(struct tree *t) { shard_at(t, S2, 2, "[-1, 0]"); }

static void offsets_float(struct tree *t) { shard_at(t, S2, 2, "[3.0, 0]"); }

static void offsets_huge(struct tree *t) { shard_at(t, S2, 2, "[9223372036854775807, 0]"); }

static void offsets_large(struct tree *t) { shard_at(t, S2, 2, "[9000000000000000000, 0]"); }

static void offsets_wide(struct tree *t)
{
    shard_at(t, S2, 2, "[4000000000000000000, 4000000000000000000]");
}

static void truncated(struct tree *t) { tree_truncate(t, DIR S2, 1); }

static void fifo(struct tree *t)
{
    tree_delete(t, DIR S2);
    tree_fifo(t, DIR S2);
}

static void link_out(struct tree *t)
{
    tree_delete(t, DIR S2);
    tree_link(t, "/etc/passwd", DIR S2);
}

static void mapped_missing(struct tree *t) { tree_text(t, FILES, "{\"w\": 1, \"v.weight\": 1}"); }

static void mapped_tied(struct tree *t)
{
    tree_text(t, FILES, "{\"w\": 1, \"lm_head.weight\": 1}");
}

static void mapped_zero(struct tree *t) { tree_text(t, FILES, "{\"w\": 0}"); }

static void mapped_text(struct tree *t) { tree_text(t, FILES, "{\"w\": \"1\"}"); }

static void mapped_array(struct tree *t) { tree_text(t, FILES, "[]"); }

static void mapped_huge(struct tree *t) { tree_text(t, FILES, "{\"w\": 9223372036854775807}"); }

static void dtypes_number(struct tree *t) { tree_text(t, DTYPES, "{\"w\": 16}"); }

static void config_array(struct tree *t) { tree_text(t, META "config.json", "[]"); }

static void index_empty(struct tree *t)
{
    tree_text(t, DIR "consolidated/model.safetensors.index.json", "{}");
}

static void no_shards(struct tree *t)
{
    tree_delete(t, DIR S1);
    tree_delete(t, DIR S2);
}

static const struct lie lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"sound_empty_last", empty_last, CKPT_OK, NULL, NULL},
    {"sound_extra_info", extra_info, CKPT_OK, NULL, NULL},
    {"sound_mapped_tied", mapped_tied, CKPT_OK, NULL, NULL},
    {"no_first", no_first, CKPT_MISSING, "'shard-00001-model-*'", "'w': rows 0..3 of 5"},
    {"no_middle", no_middle, CKPT_MISSING, "'shard-00002-model-*'", "'w': rows 3..5 of 6"},
    {"no_last_but_an_empty_one", empty_beyond, CKPT_MISSING, "'w'", "rows 5..6 of 6"},
    {"no_shards", no_shards, CKPT_MISSING, NULL, "has no shard-"},
    {"stale", stale, CKPT_CONFLICT, S3, "an earlier save"},
    {"stale_twin", stale_twin, CKPT_CONFLICT, S3, "an earlier save"},
    {"stale_count", stale_count, CKPT_CONFLICT, "-of-00002", "different saves"},
    {"file_absent", file_absent, CKPT_MISSING, "shard-*-model-00002-of-00002", "nothing of file 2"},
    {"two_files", two_files, CKPT_CONFLICT, "-model-00002-of-00002", "belongs to file 1"},
    {"other_dtype", other_dtype, CKPT_CONFLICT, S2, "'w' is U8"},
    {"other_rank", other_rank, CKPT_CONFLICT, S2, "2 dimensions"},
    {"no_info", no_info, CKPT_FORMAT, S2, "no DCP_SHARDING_INFO"},
    {"no_metadata", no_metadata, CKPT_FORMAT, S2, "no DCP_SHARDING_INFO"},
    {"version", version, CKPT_UNSUPPORTED, S2, "DCP_VERSION is '2.0'"},
    {"info_garbage", info_garbage, CKPT_FORMAT, S2, "not valid JSON"},
    {"info_array", info_array, CKPT_FORMAT, S2, "not a JSON object"},
    {"info_other", info_other, CKPT_FORMAT, S2, "does not name tensor 'w'"},
    {"info_number", info_number, CKPT_FORMAT, S2, "'w'"},
    {"offsets_short", offsets_short, CKPT_FORMAT, S2, "'w'"},
    {"offsets_long", offsets_long, CKPT_FORMAT, S2, "'w'"},
    {"offsets_negative", offsets_negative, CKPT_FORMAT, S2, "offset 0"},
    {"offsets_float", offsets_float, CKPT_FORMAT, S2, "offset 0"},
    {"offsets_huge", offsets_huge, CKPT_FORMAT, S2, "offset 0"},
    {"offsets_large", offsets_large, CKPT_MISSING, "'w'", "are in no shard"},
    {"offsets_wide", offsets_wide, CKPT_LIMIT, "'w'", "2^64 elements"},
    {"truncated", truncated, CKPT_FORMAT, S2, "is truncated"},
    {"fifo", fifo, CKPT_FORMAT, S2, "is a FIFO"},
    {"link_out", link_out, CKPT_UNSUPPORTED, S2, "leads out of"},
    {"mapped_missing", mapped_missing, CKPT_MISSING, "'v.weight'", "no shard has"},
    {"mapped_zero", mapped_zero, CKPT_FORMAT, "fqn_to_file_index_mapping.json", "'w'"},
    {"mapped_text", mapped_text, CKPT_FORMAT, "fqn_to_file_index_mapping.json", "'w'"},
    {"mapped_array", mapped_array, CKPT_FORMAT, "fqn_to_file_index_mapping.json", "JSON object"},
    {"mapped_huge", mapped_huge, CKPT_FORMAT, "fqn_to_file_index_mapping.json", "'w'"},
    {"dtypes_number", dtypes_number, CKPT_FORMAT, "fqn_to_dtype_mapping.json", "'w'"},
    {"config_array", config_array, CKPT_FORMAT, "config.json", "JSON object"},
    {"index_empty", index_empty, CKPT_FORMAT, "consolidated", "no weight_map"},
};

int main(int argc, char **argv)
{
    return tell_all(argc, argv, &ckpt_reader_dcp_hf, sound, lies, sizeof lies / sizeof lies[0]);
}
