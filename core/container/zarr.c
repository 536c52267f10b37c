/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing .zarray (Zarr storage specification, version 2), and what both versions share. */
#include "container/zarr.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/ckd.h"
#include "base/json.h"
#include "base/mem.h"

static const struct {
    const char *name;
    enum ckpt_dtype dtype;
} dtypes[] = {
    {"<f8", CKPT_F64},
    {"<f4", CKPT_F32},
    {"<f2", CKPT_F16},
    {"bfloat16", CKPT_BF16},
    {"<V2", CKPT_BF16},
    {"|V2", CKPT_BF16},
    {"<i8", CKPT_I64},
    {"<i4", CKPT_I32},
    {"<i2", CKPT_I16},
    {"|i1", CKPT_I8},
    {"|u1", CKPT_U8},
    {"|b1", CKPT_BOOL},
    {"<u8", CKPT_U64},
    {"<u4", CKPT_U32},
    {"<u2", CKPT_U16},
    {"<c8", CKPT_C64},
    {"float8_e4m3fn", CKPT_F8_E4M3},
    {"float8_e5m2", CKPT_F8_E5M2},
    {"float8_e4m3fnuz", CKPT_F8_E4M3FNUZ},
    {"float8_e5m2fnuz", CKPT_F8_E5M2FNUZ},
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

int ckpt_zarr_sizes(const json_t *j, const char *key, uint64_t least, uint64_t *ret,
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

/* Refuse encodings with which decoded chunks are no raw arrays, and compressors but zstd. */
static int parse_coding(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const json_t *compressor = json_object_get(j, "compressor");
    const json_t *filters = json_object_get(j, "filters");
    const char *order = ckpt_json_str(j, "order");

    if (compressor && !json_is_null(compressor)) {
        const char *id = ckpt_json_str(compressor, "id");
        if (!id || strcmp(id, "zstd") != 0)
            return ckpt_fail(err, CKPT_UNSUPPORTED,
                             "its chunks are compressed (%.50s), which is not supported",
                             id ? id : "?");
        z->zstd = true;
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

int ckpt_zarr_measure(struct ckpt_zarr *z, uint32_t chunk_rank, struct ckpt_err *err)
{
    uint64_t numel;

    if (chunk_rank != z->rank)
        return ckpt_fail(err, CKPT_FORMAT, "'shape' has %u dimensions, 'chunks' %u", z->rank,
                         chunk_rank);
    for (uint32_t d = 0; d < z->rank; d++)
        z->count[d] = z->dim[d] / z->chunk[d] + (z->dim[d] % z->chunk[d] != 0);
    if (!ckpt_shape_numel(z->chunk, z->rank, &numel) ||
        ckd_mul(&z->nbyte, numel, (uint64_t)ckpt_dtype_size(z->dtype)) || z->nbyte > INT64_MAX)
        return ckpt_fail(err, CKPT_LIMIT, "a chunk would be larger than any file");
    return 0;
}

static int parse_shape(const json_t *j, struct ckpt_zarr *z, struct ckpt_err *err)
{
    uint32_t rank;

    return ckpt_zarr_sizes(j, "shape", 0, z->dim, &z->rank, err) < 0 ||
                   ckpt_zarr_sizes(j, "chunks", 1, z->chunk, &rank, err) < 0
               ? -1
               : ckpt_zarr_measure(z, rank, err);
}

/* ---- the fill value ---- */

static int fail_fill(const struct ckpt_zarr *z, struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_UNSUPPORTED, "its 'fill_value' is no value of %s that is supported",
                     ckpt_dtype_name(z->dtype));
}

/* A number, or a word for one that JSON has not. */
static bool number_of(const json_t *value, double *ret)
{
    static const struct {
        const char *word;
        double number;
    } words[] = {
        {"NaN", (double)NAN}, {"Infinity", (double)INFINITY}, {"-Infinity", (double)-INFINITY}};

    if (json_is_number(value) || json_is_boolean(value)) {
        *ret = json_is_boolean(value) ? json_is_true(value) : json_number_value(value);
        return true;
    }
    for (size_t i = 0; json_is_string(value) && i < sizeof words / sizeof words[0]; i++)
        if (strcmp(words[i].word, json_string_value(value)) == 0) {
            *ret = words[i].number;
            return true;
        }
    return false;
}

int ckpt_zarr_parse_fill(const json_t *value, struct ckpt_zarr *z, struct ckpt_err *err)
{
    const size_t size = ckpt_dtype_size(z->dtype);
    double number = 0;

    memset(z->fill, 0, sizeof z->fill);
    if (!value || json_is_null(value))
        return 0;
    if (json_is_array(value)) { /* a complex number */
        double re = 1, im = 1;
        return json_array_size(value) == 2 && number_of(json_array_get(value, 0), &re) &&
                       number_of(json_array_get(value, 1), &im) && re == 0 && im == 0
                   ? 0
                   : fail_fill(z, err);
    }
    if (!number_of(value, &number))
        return fail_fill(z, err);
    if (number == 0)
        return 0;
    if (ckpt_dtype_is_castable(z->dtype)) {
        ckpt_dtype_cast(z->fill, z->dtype, &number, CKPT_F64, 1);
        return 0;
    }
    if (ckpt_dtype_is_float(z->dtype) || z->dtype == CKPT_C64 ||
        !(json_is_integer(value) || json_is_boolean(value)))
        return fail_fill(z, err);
    const uint64_t bits = (uint64_t)(json_is_boolean(value) ? 1 : json_integer_value(value));
    for (size_t i = 0; i < size; i++)
        z->fill[i] = (unsigned char)(bits >> (8 * i));
    return 0;
}

/* ---- the whole ---- */

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
    if (parse_coding(j, &z, err) < 0 || parse_dtype(j, &z, err) < 0 ||
        parse_separator(j, &z, err) < 0 || parse_shape(j, &z, err) < 0 ||
        ckpt_zarr_parse_fill(json_object_get(j, "fill_value"), &z, err) < 0)
        return -1;
    *ret = z;
    return 0;
}

void ckpt_zarr_chunk_name(const struct ckpt_zarr *z, const uint64_t *index, struct ckpt_str *out)
{
    if (z->prefixed)
        ckpt_str_putc(out, 'c');
    else if (z->rank == 0)
        ckpt_str_putc(out, '0');
    for (uint32_t d = 0; d < z->rank; d++) {
        if (d > 0 || z->prefixed)
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
