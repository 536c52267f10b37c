/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a step of Orbax's whose arrays are in files: the tree, descriptions of zarr 2 and 3, and
 * chunks. */
#include "directory.h"

#define TREE "items/_METADATA"
#define W "items/params.w/"
#define V "items/params.v/"

static void tree(struct tree *t, const char *more)
{
    char text[2048];

    (void)snprintf(text, sizeof text,
                   "{\"tree_metadata\": {\"w\": {\"key_metadata\": [{\"key\": \"params\", "
                   "\"key_type\": 2}, {\"key\": \"w\", \"key_type\": 2}], \"value_metadata\": "
                   "{\"value_type\": \"jax.Array\"}}, \"v\": {\"key_metadata\": [{\"key\": "
                   "\"params\"}, {\"key\": \"v\"}], \"value_metadata\": {\"value_type\": "
                   "\"np.ndarray\"}}, \"n\": {\"key_metadata\": [{\"key\": \"params\"}, {\"key\": "
                   "\"n\"}], \"value_metadata\": {\"skip_deserialize\": true}}}, \"use_ocdbt\": "
                   "false, \"use_zarr3\": true%s}",
                   more);
    tree_text(t, TREE, text);
}

static void head(struct tree *t, const char *folder, const char *shape, const char *chunk,
                 const char *dtype, const char *codecs)
{
    char text[2048], path[256];

    (void)snprintf(text, sizeof text,
                   "{\"zarr_format\": 3, \"node_type\": \"array\", \"shape\": %s, \"data_type\": "
                   "\"%s\", \"fill_value\": 7, \"codecs\": %s, \"chunk_grid\": {\"name\": "
                   "\"regular\", \"configuration\": {\"chunk_shape\": %s}}, "
                   "\"chunk_key_encoding\": {\"name\": \"default\"}}",
                   shape, dtype, codecs, chunk);
    (void)snprintf(path, sizeof path, "%szarr.json", folder);
    tree_text(t, path, text);
}

#define BYTES "[{\"name\": \"bytes\"}]"
#define SHARDS(INNER, INDEX)                                                                       \
    "[{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": " INNER                \
    ", \"codecs\": [{\"name\": \"bytes\"}], \"index_codecs\": " INDEX "}}]"

static void sound(struct tree *t)
{
    tree_text(t, "_CHECKPOINT_METADATA", "{\"commit_timestamp_nsecs\": 5}");
    tree(t, ", \"store_array_data_equal_to_fill_value\": true");
    head(t, W, "[3, 2]", "[2, 2]", "uint8", BYTES);
    tree_text(t, W "c/0/0", "abcd");
    tree_text(t, W "c/1/0", "efgh");
    head(t, V, "[]", "[]", "int8", BYTES);
    tree_text(t, V "c", "x");
}

static void nothing(struct tree *t) { (void)t; }
static void lost_chunk(struct tree *t) { tree_delete(t, W "c/1/0"); }
static void fill(struct tree *t)
{
    tree(t, "");
    tree_delete(t, W "c/1/0");
}
static void lost_scalar(struct tree *t) { tree_delete(t, V "c"); }
static void lost_head(struct tree *t) { tree_delete(t, W "zarr.json"); }
static void short_chunk(struct tree *t) { tree_text(t, W "c/1/0", "efg"); }
static void long_chunk(struct tree *t) { tree_text(t, W "c/1/0", "efghi"); }
static void no_tree(struct tree *t) { tree_delete(t, TREE); }
static void tree_garbage(struct tree *t) { tree_text(t, TREE, "{\"tree"); }
static void tree_list(struct tree *t) { tree_text(t, TREE, "{\"tree_metadata\": []}"); }
static void no_keys(struct tree *t) { tree_text(t, TREE, "{\"tree_metadata\": {\"a\": {}}}"); }
static void odd_key(struct tree *t)
{
    tree_text(t, TREE, "{\"tree_metadata\": {\"a\": {\"key_metadata\": [{\"key\": null}]}}}");
}
static void key_leaves(struct tree *t)
{
    tree_text(t, TREE,
              "{\"use_zarr3\": true, \"tree_metadata\": {\"a\": {\"key_metadata\": [{\"key\": "
              "\"../..\"}]}}}");
}
static void same_name(struct tree *t)
{
    tree_text(t, TREE,
              "{\"use_zarr3\": true, \"tree_metadata\": {\"a\": {\"key_metadata\": [{\"key\": "
              "\"params\"}, {\"key\": \"w\"}]}, \"b\": {\"key_metadata\": [{\"key\": \"params\"}, "
              "{\"key\": \"w\"}]}}}");
}
static void no_database(struct tree *t) { tree(t, ", \"use_ocdbt\": true"); }
static void version_2(struct tree *t) { tree_text(t, W "zarr.json", "{\"zarr_format\": 2}"); }
static void a_group(struct tree *t)
{
    tree_text(t, W "zarr.json", "{\"zarr_format\": 3, \"node_type\": \"group\"}");
}
static void big_head(struct tree *t)
{
    static const char zeros[70000];

    tree_put(t, W "zarr.json", zeros, sizeof zeros);
}

static void int4(struct tree *t) { head(t, W, "[3, 2]", "[2, 2]", "int4", BYTES); }
static void odd_fill(struct tree *t) { head(t, W, "[3, 2]", "[2, 2]", "float8_e5m2", BYTES); }
static void gzip(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint8", "[{\"name\": \"bytes\"}, {\"name\": \"gzip\"}]");
}
static void transposed(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint8", "[{\"name\": \"transpose\"}, {\"name\": \"bytes\"}]");
}
static void big_endian(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint16",
         "[{\"name\": \"bytes\", \"configuration\": {\"endian\": \"big\"}}]");
}
static void no_codecs(struct tree *t) { head(t, W, "[3, 2]", "[2, 2]", "uint8", "[]"); }
static void three_codecs(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint8",
         "[{\"name\": \"bytes\"}, {\"name\": \"zstd\"}, {\"name\": \"crc32c\"}]");
}
static void ranks_differ(struct tree *t) { head(t, W, "[3, 2]", "[2]", "uint8", BYTES); }
static void chunk_of_none(struct tree *t) { head(t, W, "[3, 2]", "[0, 2]", "uint8", BYTES); }
static void many_chunks(struct tree *t) { head(t, W, "[4000000, 2000]", "[1, 1]", "uint8", BYTES); }
static void huge_shape(struct tree *t)
{
    head(t, W, "[4611686018427387904, 16]", "[2, 2]", "uint8", BYTES);
}
static void huge_chunk(struct tree *t)
{
    head(t, W, "[3, 2]", "[4611686018427387904, 2]", "uint8", BYTES);
}
static void more_than_zstd_can(struct tree *t)
{
    head(t, W, "[3, 2]", "[1099511627776, 2]", "uint8",
         "[{\"name\": \"bytes\"}, {\"name\": \"zstd\"}]");
}
static void not_zstd(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint8", "[{\"name\": \"bytes\"}, {\"name\": \"zstd\"}]");
}
static void inner_odd(struct tree *t)
{
    head(t, W, "[3, 2]", "[2, 2]", "uint8", SHARDS("[2, 3]", BYTES));
}
static void inner_many(struct tree *t)
{
    head(t, W, "[3, 2]", "[1048576, 1048576]", "uint8", SHARDS("[1, 1]", BYTES));
}

static void shard(struct tree *t, const char *codecs, uint64_t off, uint64_t len)
{
    unsigned char bytes[4 + 32] = "abcd";
    const uint64_t index[] = {0, 2, off, len};

    for (size_t i = 0; i < 32; i++)
        bytes[4 + i] = (unsigned char)(index[i / 8] >> (i % 8 * 8));
    head(t, W, "[2, 2]", "[2, 2]", "uint8", codecs);
    tree_delete(t, W "c/1/0");
    tree_put(t, W "c/0/0", bytes, sizeof bytes);
}

static void shard_sound(struct tree *t) { shard(t, SHARDS("[1, 2]", BYTES), 2, 2); }
static void shard_absent(struct tree *t)
{
    shard(t, SHARDS("[1, 2]", BYTES), UINT64_MAX, UINT64_MAX);
}
static void shard_past_end(struct tree *t) { shard(t, SHARDS("[1, 2]", BYTES), 35, 2); }
static void shard_wraps(struct tree *t) { shard(t, SHARDS("[1, 2]", BYTES), UINT64_MAX - 1, 4); }
static void shard_short(struct tree *t) { shard(t, SHARDS("[1, 2]", BYTES), 2, 1); }
static void shard_checksum(struct tree *t)
{
    shard(t, SHARDS("[1, 2]", "[{\"name\": \"bytes\"}, {\"name\": \"crc32c\"}]"), 2, 2);
}

static const struct lie lies[] = {
    {"sound", nothing, CKPT_OK, NULL, NULL},
    {"fill", fill, CKPT_OK, NULL, NULL},
    {"shard_sound", shard_sound, CKPT_OK, NULL, NULL},
    {"shard_absent", shard_absent, CKPT_OK, NULL, NULL},
    {"lost_chunk", lost_chunk, CKPT_MISSING, "params.w/c/1/0", "stored every chunk"},
    {"lost_scalar", lost_scalar, CKPT_MISSING, "params.v/c", "stored every chunk"},
    {"lost_head", lost_head, CKPT_MISSING, "params.w/zarr.json", "array 'params.w'"},
    {"short_chunk", short_chunk, CKPT_FORMAT, "params.w/c/1/0", "stored in 3 bytes"},
    {"long_chunk", long_chunk, CKPT_FORMAT, "params.w/c/1/0", "stored in 5 bytes"},
    {"no_tree", no_tree, CKPT_UNSUPPORTED, "_METADATA", "lists arrays"},
    {"tree_garbage", tree_garbage, CKPT_FORMAT, "_METADATA", "not valid JSON"},
    {"tree_list", tree_list, CKPT_FORMAT, "_METADATA", "tree_metadata"},
    {"no_keys", no_keys, CKPT_FORMAT, "_METADATA", "key_metadata"},
    {"odd_key", odd_key, CKPT_FORMAT, "_METADATA", "neither text nor a number"},
    {"key_leaves", key_leaves, CKPT_FORMAT, "../..", "not a path below"},
    {"same_name", same_name, CKPT_CONFLICT, "w", ""},
    {"no_database", no_database, CKPT_MISSING, "manifest.ocdbt", ""},
    {"version_2", version_2, CKPT_FORMAT, "params.w/zarr.json", "zarr_format"},
    {"a_group", a_group, CKPT_UNSUPPORTED, "params.w/zarr.json", "node_type"},
    {"big_head", big_head, CKPT_LIMIT, "params.w/zarr.json", "70000 bytes"},
    {"int4", int4, CKPT_UNSUPPORTED, "params.w/zarr.json", "'int4'"},
    {"odd_fill", odd_fill, CKPT_UNSUPPORTED, "params.w/zarr.json", "fill_value"},
    {"gzip", gzip, CKPT_UNSUPPORTED, "params.w/zarr.json", "'gzip'"},
    {"transposed", transposed, CKPT_UNSUPPORTED, "params.w/zarr.json", "'transpose'"},
    {"big_endian", big_endian, CKPT_UNSUPPORTED, "params.w/zarr.json", "endian 'big'"},
    {"no_codecs", no_codecs, CKPT_FORMAT, "params.w/zarr.json", "codecs"},
    {"three_codecs", three_codecs, CKPT_UNSUPPORTED, "params.w/zarr.json", "3 codecs"},
    {"ranks_differ", ranks_differ, CKPT_FORMAT, "params.w/zarr.json", "2 dimensions, 'chunks' 1"},
    {"chunk_of_none", chunk_of_none, CKPT_FORMAT, "params.w/zarr.json", "chunk_shape"},
    {"many_chunks", many_chunks, CKPT_LIMIT, "params.w", "more than 1048576 chunks"},
    {"huge_shape", huge_shape, CKPT_LIMIT, "params.w", "2^64"},
    {"huge_chunk", huge_chunk, CKPT_LIMIT, "params.w/zarr.json", "larger than any file"},
    {"more_than_zstd_can", more_than_zstd_can, CKPT_FORMAT, "params.w/c/0/0", "cannot be"},
    {"not_zstd", not_zstd, CKPT_FORMAT, "params.w/c/0/0", "damaged"},
    {"inner_odd", inner_odd, CKPT_FORMAT, "params.w/zarr.json", "do not consist"},
    {"inner_many", inner_many, CKPT_FORMAT, "params.w/c/0/0", "shorter than its index"},
    {"shard_past_end", shard_past_end, CKPT_FORMAT, "params.w/c/0/0", "of a shard of 36"},
    {"shard_wraps", shard_wraps, CKPT_FORMAT, "params.w/c/0/0", "of a shard of 36"},
    {"shard_short", shard_short, CKPT_FORMAT, "params.w/c/0/0", "stored in 1 bytes"},
    {"shard_checksum", shard_checksum, CKPT_FORMAT, "params.w/c/0/0", ""},
};

int main(int argc, char **argv)
{
    return tell_all(argc, argv, &ckpt_reader_orbax, sound, lies, sizeof lies / sizeof lies[0]);
}
