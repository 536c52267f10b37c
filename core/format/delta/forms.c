/* SPDX-License-Identifier: Apache-2.0 */
/* How slime and SkyRL write versions (format/delta/reader.c describes both): the names of files,
 * and the index. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/str.h"
#include "format/changes.h"
#include "format/delta/fold.h"

static int dump(json_t *index, char **ret, size_t *ret_len, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *owned = index;

    return owned ? ckpt_json_dump(owned, CKPT_JSON_LINE, false, ret, ret_len, err)
                 : ckpt_nomem(err);
}

/* ---- slime ---- */

/* The names have the number of files, which is known at the end. */
static void slime_file(size_t i, size_t n, char ret[64])
{
    if (n)
        (void)snprintf(ret, 64, "model-%05zu-of-%05zu.safetensors", i, n);
    else
        (void)snprintf(ret, 64, ".model-%05zu.partial", i);
}

static bool slime_is_file(const char *name)
{
    return (ckpt_has_prefix(name, "model-") && ckpt_has_suffix(name, ".safetensors")) ||
           (ckpt_has_prefix(name, ".model-") && ckpt_has_suffix(name, ".partial"));
}

static int slime_index(const struct ckpt_changes *c, char **ret, size_t *ret_len,
                       struct ckpt_err *err)
{
    json_t *map = json_object();
    char version[32], base[32], file[64];

    for (size_t i = 0; i < c->ntensor; i++) {
        slime_file(c->tensor[i].file, c->nfile, file);
        ckpt_json_set(&map, c->tensor[i].tensor.name, json_string(file));
    }
    (void)snprintf(version, sizeof version, "%06" PRIu64, c->version);
    (void)snprintf(base, sizeof base, "%06" PRIu64, c->base_version);
    return dump(json_pack("{s:{s:s, s:s, s:s, s:s, s:s}, s:o}", "metadata", "version", version,
                          "base_version", base, "delta_encoding",
                          c->overwrite ? "overwrite" : "xor", "compression_format", "zstd",
                          "checksum_format", "xxh3-128", "weight_map", map),
                ret, ret_len, err);
}

const struct ckpt_changes_writer ckpt_changes_slime = {
    .form = {.name = "slime",
             .example = "weight_v000001",
             .index = "model.safetensors.index.json",
             .has_overwrite = true,
             .has_sums = true,
             .file_name = slime_file,
             .is_file = slime_is_file,
             .index_text = slime_index},
    .make = ckpt_delta_make,
};

/* ---- SkyRL ---- */

static void skyrl_file(size_t i, size_t n, char ret[64])
{
    (void)n;
    (void)snprintf(ret, 64, "delta-rank00000-file%06zu.safetensors", i);
}

static bool skyrl_is_file(const char *name)
{
    return ckpt_has_prefix(name, "delta-rank") && ckpt_has_suffix(name, ".safetensors");
}

static json_t *record_of(const struct ckpt_changed *c)
{
    const struct ckpt_tensor_info *t = &c->tensor;
    json_t *shape = json_array();
    char file[64];

    for (uint32_t d = 0; d < t->rank; d++)
        ckpt_json_append(&shape, json_integer((json_int_t)t->shape[d]));
    skyrl_file(c->file, 0, file);
    return json_pack("{s:s, s:s, s:o, s:I, s:I, s:s, s:s, s:s, s:s}", "name", t->name, "dtype",
                     t->torch_dtype, "shape", shape, "uncompressed_num_bytes",
                     (json_int_t)t->nbytes, "compressed_num_bytes", (json_int_t)c->len,
                     "payload_file", file, "payload_key", t->name, "checksum", c->checksum,
                     "checksum_algorithm", "xxh3-128");
}

static int skyrl_index(const struct ckpt_changes *c, char **ret, size_t *ret_len,
                       struct ckpt_err *err)
{
    json_t *files = json_array(), *records = json_array();
    char name[64];

    for (size_t i = 0; i < c->nfile; i++) {
        skyrl_file(i, 0, name);
        ckpt_json_append(&files, json_string(name));
    }
    for (size_t i = 0; i < c->ntensor; i++)
        ckpt_json_append(&records, record_of(&c->tensor[i]));
    return dump(json_pack("{s:I, s:I, s:o, s:I, s:I, s:o}", "version", (json_int_t)c->version,
                          "base_version", (json_int_t)c->base_version, "tensors", records,
                          "total_uncompressed_num_bytes", (json_int_t)c->nbytes,
                          "total_compressed_num_bytes", (json_int_t)c->written, "payload_files",
                          files),
                ret, ret_len, err);
}

const struct ckpt_changes_writer ckpt_changes_skyrl = {
    .form = {.name = "skyrl",
             .example = "delta-00000001",
             .index = "manifest.json",
             .file_name = skyrl_file,
             .is_file = skyrl_is_file,
             .index_text = skyrl_index},
    .make = ckpt_delta_make,
};
