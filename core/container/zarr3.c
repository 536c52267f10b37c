/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing zarr.json (Zarr core specification, version 3) and the codecs of chunks. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "container/zarr.h"

static const struct {
    const char *name;
    enum ckpt_dtype dtype;
} dtypes[] = {
    {"float64", CKPT_F64},
    {"float32", CKPT_F32},
    {"float16", CKPT_F16},
    {"bfloat16", CKPT_BF16},
    {"complex64", CKPT_C64},
    {"int64", CKPT_I64},
    {"int32", CKPT_I32},
    {"int16", CKPT_I16},
    {"int8", CKPT_I8},
    {"uint64", CKPT_U64},
    {"uint32", CKPT_U32},
    {"uint16", CKPT_U16},
    {"uint8", CKPT_U8},
    {"bool", CKPT_BOOL},
    {"float8_e4m3fn", CKPT_F8_E4M3},
    {"float8_e5m2", CKPT_F8_E5M2},
    {"float8_e4m3fnuz", CKPT_F8_E4M3FNUZ},
    {"float8_e5m2fnuz", CKPT_F8_E5M2FNUZ},
};

static int parse_dtype(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const char *name = ckpt_json_str(j, "data_type");

    for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            z->dtype = dtypes[i].dtype;
            return 0;
        }
    return name ? ckpt_fail(err, CKPT_UNSUPPORTED, "data_type '%.50s' is not supported", name)
                : ckpt_fail(err, CKPT_UNSUPPORTED, "its 'data_type' is no name");
}

/* The name of what is a name, or an object with a name; NULL: it is neither. */
static const char *name_of(const json_t *j)
{
    return json_is_string(j) ? json_string_value(j) : ckpt_json_str(j, "name");
}

/* The configuration of a member that must have this name; NULL: it has none. */
static int parse_named(const json_t *j, const char *key, const char *expected,
                       const json_t **ret_configuration, struct ckpt_err *err)
{
    const json_t *member = json_object_get(j, key);
    const char *name = name_of(member);

    if (!name)
        return ckpt_fail(err, CKPT_FORMAT, "it has no '%s'", key);
    if (strcmp(name, expected) != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "%s '%.50s' is not supported, only '%s'", key, name,
                         expected);
    *ret_configuration = json_object_get(member, "configuration");
    return 0;
}

static int parse_grid(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const json_t *c = NULL;
    uint32_t rank;

    return ckpt_zarr_sizes(j, "shape", 0, z->dim, &z->rank, err) < 0 ||
                   parse_named(j, "chunk_grid", "regular", &c, err) < 0 ||
                   ckpt_zarr_sizes(c, "chunk_shape", 1, z->chunk, &rank, err) < 0
               ? -1
               : ckpt_zarr_measure(z, rank, err);
}

static int parse_names(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const json_t *encoding = json_object_get(j, "chunk_key_encoding");
    const char *name = name_of(encoding);
    const char *separator = ckpt_json_str(json_object_get(encoding, "configuration"), "separator");

    if (!name)
        return ckpt_fail(err, CKPT_FORMAT, "it has no 'chunk_key_encoding'");
    z->prefixed = strcmp(name, "default") == 0;
    if (!z->prefixed && strcmp(name, "v2") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "chunk_key_encoding '%.50s' is not supported",
                         name);
    z->separator = separator ? separator[0] : z->prefixed ? '/' : '.';
    if (separator && strcmp(separator, ".") != 0 && strcmp(separator, "/") != 0)
        return ckpt_fail(err, CKPT_FORMAT, "the 'separator' of its chunks' names is '%.10s'",
                         separator);
    return 0;
}

/* ---- codecs ---- */

enum codec { CODEC_BYTES, CODEC_ZSTD, CODEC_CRC32C, CODEC_SHARDS };

static int parse_codec(const json_t *codec, enum codec *ret, struct ckpt_err *err)
{
    static const char *const names[] = {"bytes", "zstd", "crc32c", "sharding_indexed"};
    const char *name = name_of(codec);
    const char *endian = ckpt_json_str(json_object_get(codec, "configuration"), "endian");

    for (size_t i = 0; name && i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) != 0)
            continue;
        *ret = (enum codec)i;
        return *ret == CODEC_BYTES && endian && strcmp(endian, "little") != 0
                   ? ckpt_fail(err, CKPT_UNSUPPORTED, "endian '%.10s' is not supported", endian)
                   : 0;
    }
    return ckpt_fail(err, CKPT_UNSUPPORTED, "codec '%.50s' is not supported", name ? name : "?");
}

/* Parse a list of codecs that begins with `first`, after which `second` may come; *ret_second: it
 * does. */
static int parse_codecs(const json_t *list, enum codec first, enum codec second, bool *ret_second,
                        struct ckpt_err *err)
{
    enum codec found[2];
    const size_t n = json_array_size(list);

    if (!n)
        return ckpt_fail(err, CKPT_FORMAT, "a list of its codecs is not there, or empty");
    for (size_t i = 0; i < n && i < 2; i++)
        if (parse_codec(json_array_get(list, i), &found[i], err) < 0)
            return -1;
    if (n > 2 || found[0] != first || (n == 2 && found[1] != second))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "such a sequence of %zu codecs is not supported: of chunks only bytes "
                         "and zstd, or shards of such, whose index may have crc32c",
                         n);
    *ret_second = n == 2;
    return 0;
}

static int parse_shards(const json_t *codec, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const json_t *c = json_object_get(codec, "configuration");
    const char *location = ckpt_json_str_or(c, "index_location", "end");
    uint64_t numel;
    uint32_t rank;

    if (ckpt_zarr_sizes(c, "chunk_shape", 1, z->inner, &rank, err) < 0)
        return -1;
    if (rank != z->rank)
        return ckpt_fail(err, CKPT_FORMAT, "its chunks have %u dimensions, inner chunks %u",
                         z->rank, rank);
    z->ninner = 1;
    for (uint32_t d = 0; d < rank; d++) {
        if (z->chunk[d] % z->inner[d])
            return ckpt_fail(err, CKPT_FORMAT,
                             "chunks of %" PRIu64 " in dimension %u do not consist of inner chunks "
                             "of %" PRIu64,
                             z->chunk[d], d, z->inner[d]);
        z->ninner *= z->chunk[d] / z->inner[d]; /* at most the elements of a chunk */
    }
    if (strcmp(location, "end") != 0 && strcmp(location, "start") != 0)
        return ckpt_fail(err, CKPT_FORMAT, "'index_location' is '%.20s'", location);
    (void)ckpt_shape_numel(z->inner, rank, &numel); /* no more than a chunk has */
    z->inner_nbyte = numel * ckpt_dtype_size(z->dtype);
    z->sharded = true;
    z->index_first = strcmp(location, "start") == 0;
    return parse_codecs(json_object_get(c, "codecs"), CODEC_BYTES, CODEC_ZSTD, &z->zstd, err) < 0
               ? -1
               : parse_codecs(json_object_get(c, "index_codecs"), CODEC_BYTES, CODEC_CRC32C,
                              &z->index_checked, err);
}

static int parse_coding(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const json_t *list = json_object_get(j, "codecs"), *first = json_array_get(list, 0);
    const json_t *transformers = json_object_get(j, "storage_transformers");
    enum codec codec;

    if (json_array_size(transformers))
        return ckpt_fail(err, CKPT_UNSUPPORTED, "'storage_transformers' are not supported");
    if (!first)
        return ckpt_fail(err, CKPT_FORMAT, "it has no 'codecs'");
    if (parse_codec(first, &codec, err) < 0)
        return -1;
    if (codec == CODEC_SHARDS && json_array_size(list) == 1)
        return parse_shards(first, z, err);
    return parse_codecs(list, CODEC_BYTES, CODEC_ZSTD, &z->zstd, err);
}

int ckpt_zarr3_parse(const char *text, size_t len, struct ckpt_zarr *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    struct ckpt_zarr z = {0};
    uint64_t version;

    if (ckpt_json_parse(text, len, CKPT_ZARR3_HEAD, &j, err) < 0)
        return -1;
    if (!ckpt_json_u64(j, "zarr_format", &version) || version != 3)
        return ckpt_fail(err, CKPT_FORMAT, "its 'zarr_format' is not 3");
    if (strcmp(ckpt_json_str_or(j, "node_type", ""), "array") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "its 'node_type' is not 'array'");
    if (parse_dtype(j, &z, err) < 0 || parse_grid(j, &z, err) < 0 || parse_names(j, &z, err) < 0 ||
        parse_coding(j, &z, err) < 0 ||
        ckpt_zarr_parse_fill(json_object_get(j, "fill_value"), &z, err) < 0)
        return -1;
    *ret = z;
    return 0;
}
