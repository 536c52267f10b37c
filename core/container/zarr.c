/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing .zarray (Zarr storage specification, version 2). */
#include "container/zarr.h"

#include <inttypes.h>
#include <string.h>

#include "base/ckd.h"
#include "base/json.h"
#include "base/mem.h"

static const struct {
    const char *name;
    enum ckpt_dtype dtype;
} dtypes[] = {
    {"<f8", CKPT_F64},  {"<f4", CKPT_F32},  {"<f2", CKPT_F16}, {"bfloat16", CKPT_BF16},
    {"<V2", CKPT_BF16}, {"|V2", CKPT_BF16}, {"<i8", CKPT_I64}, {"<i4", CKPT_I32},
    {"<i2", CKPT_I16},  {"|i1", CKPT_I8},   {"|u1", CKPT_U8},  {"|b1", CKPT_BOOL},
};

static int parse_dtype(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const char *name = ckpt_json_str(j, "dtype");

    for (size_t i = 0; name && i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            z->dtype = dtypes[i].dtype;
            z->opaque = name[1] == 'V';
            return 0;
        }
    return name ? ckpt_fail(err, CKPT_UNSUPPORTED, "dtype '%.50s' is not supported", name)
                : ckpt_fail(err, CKPT_FORMAT, "it has no 'dtype'");
}

/* A list of sizes, each at least `least`. */
static int parse_sizes(const json_t *j, const char *key, uint64_t least, uint64_t *ret,
                       uint32_t *ret_rank, struct ckpt_err *err)
{
    const json_t *list = json_object_get(j, key), *v;
    size_t i;

    if (!json_is_array(list))
        return ckpt_fail(err, CKPT_FORMAT, "'%s' is not a list", key);
    if (json_array_size(list) > CKPT_MAX_RANK)
        return ckpt_fail(err, CKPT_LIMIT, "'%s' has %zu dimensions, at most %d are supported", key,
                         json_array_size(list), CKPT_MAX_RANK);
    json_array_foreach(list, i, v) {
        if (!json_is_integer(v) || json_integer_value(v) < (json_int_t)least)
            return ckpt_fail(err, CKPT_FORMAT, "'%s' holds a value that is not a size", key);
        ret[i] = (uint64_t)json_integer_value(v);
    }
    *ret_rank = (uint32_t)json_array_size(list);
    return 0;
}

/* Refuse encodings with which chunk files are not raw arrays. */
static int check_coding(const json_t *j, struct ckpt_err *err)
{
    const json_t *compressor = json_object_get(j, "compressor");
    const json_t *filters = json_object_get(j, "filters");
    const char *order = ckpt_json_str(j, "order");

    if (compressor && !json_is_null(compressor)) {
        const char *id = ckpt_json_str(compressor, "id");
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its chunks are compressed (%.50s), which is not supported",
                         id ? id : "?");
    }
    if (filters && !json_is_null(filters) && json_array_size(filters) > 0) {
        const char *id = ckpt_json_str(json_array_get(filters, 0), "id");
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "its chunks went through a filter (%.50s), which is not supported",
                         id ? id : "?");
    }
    if (order && strcmp(order, "C") != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "order '%.10s' is not supported, only 'C'", order);
    return 0;
}

static int parse_separator(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const char *s = ckpt_json_str(j, "dimension_separator");

    z->separator = s ? s[0] : '.';
    if (s && strcmp(s, ".") != 0 && strcmp(s, "/") != 0)
        return ckpt_fail(err, CKPT_FORMAT, "'dimension_separator' is '%.10s'", s);
    return 0;
}

/* Is this a chunk size that Megatron's ShardedTensor.max_allowed_chunks makes: the dimension
 * divided by the number of its shards, rounded down? A damaged shape or chunk size rarely is. */
static bool could_be_chunk(uint64_t dim, uint64_t chunk)
{
    const uint64_t shards = dim / chunk;

    return dim == 0 || (shards > 0 && dim / shards == chunk);
}

static int parse_shape(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    uint32_t rank;
    uint64_t numel;

    if (parse_sizes(j, "shape", 0, z->dim, &z->rank, err) < 0 ||
        parse_sizes(j, "chunks", 1, z->chunk, &rank, err) < 0)
        return -1;
    if (rank != z->rank)
        return ckpt_fail(err, CKPT_FORMAT, "'shape' has %u dimensions, 'chunks' %u", z->rank, rank);
    for (uint32_t d = 0; d < rank; d++) {
        if (!could_be_chunk(z->dim[d], z->chunk[d]))
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "dimension %" PRIu32 " of %" PRIu64 " in chunks of %" PRIu64
                             ": Megatron does not write such an array",
                             d, z->dim[d], z->chunk[d]);
        z->count[d] = z->dim[d] / z->chunk[d] + (z->dim[d] % z->chunk[d] != 0);
    }
    if (!ckpt_shape_numel(z->chunk, rank, &numel) ||
        ckd_mul(&z->nbyte, numel, (uint64_t)ckpt_dtype_size(z->dtype)) || z->nbyte > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a chunk would be larger than any file");
    return 0;
}

int ckpt_zarr_parse(const char *text, size_t len, struct ckpt_zarr *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    struct ckpt_zarr z = {0};

    if (ckpt_json_parse(text, len, ".zarray", &j, err) < 0)
        return -1;
    const json_t *version = json_object_get(j, "zarr_format");
    if (!json_is_integer(version))
        return ckpt_fail(err, CKPT_FORMAT, "it has no 'zarr_format'");
    if (json_integer_value(version) != 2)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "zarr format %" JSON_INTEGER_FORMAT " is not supported, only 2",
                         json_integer_value(version));
    if (check_coding(j, err) < 0 || parse_dtype(j, &z, err) < 0 ||
        parse_separator(j, &z, err) < 0 || parse_shape(j, &z, err) < 0)
        return -1;
    *ret = z;
    return 0;
}

void ckpt_zarr_chunk_name(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_str *out)
{
    if (z->rank == 0)
        ckpt_str_putc(out, '0');
    for (uint32_t d = 0; d < z->rank; d++) {
        if (d > 0)
            ckpt_str_putc(out, z->separator);
        ckpt_str_put_u64(out, index[d]);
    }
}

void ckpt_zarr_chunk_box(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_box *ret)
{
    ret->rank = z->rank;
    for (uint32_t d = 0; d < z->rank; d++) {
        ret->lo[d] = index[d] * z->chunk[d];
        ret->n[d] = z->dim[d] - ret->lo[d] < z->chunk[d] ? z->dim[d] - ret->lo[d] : z->chunk[d];
    }
}

bool ckpt_zarr_next(const struct ckpt_zarr *z, uint64_t *index)
{
    for (uint32_t d = z->rank; d-- > 0; index[d] = 0)
        if (++index[d] < z->count[d])
            return true;
    return false;
}
