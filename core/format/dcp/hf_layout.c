/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the parts of a checkpoint of HF-sharded files. */
#include "format/dcp/hf_layout.h"

#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"
#include "container/config.h"

#define HF_METADATA ".hf_metadata"
#define INDEX "model.safetensors.index.json"
#define DIFFUSERS_INDEX "diffusion_pytorch_model.safetensors.index.json"

enum { MAX_MAPPING_BYTES = 512 * 1024 * 1024 };

/* Folders that may contain shards, and for each the folders that may contain the model's other
 * files, in order of preference. */
static const struct place {
    const char *shards;
    struct {
        const char *path;
        bool model_only;
    } model[3];
} places[] = {
    {"", {{HF_METADATA, true}, {"consolidated", true}, {"", false}}},
    {"model", {{"model/" HF_METADATA, true}, {"model/consolidated", true}, {"model", false}}},
    {"sharded", {{"", false}}},
    {"model/sharded", {{"model", false}}},
};

static const struct place *find_place(struct ckpt_dir *dir)
{
    struct ckpt_hfs_name name;
    struct ckpt_entry e;

    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub =
            ckpt_reader_folder(dir, places[i].shards);
        ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
        if (sub)
            (void)ckpt_entries_read(sub, &entries, NULL);
        while (ckpt_entries_next(&entries, &e))
            if (e.kind == CKPT_ENTRY_FILE && ckpt_hfs_name_parse(e.name, &name))
                return &places[i];
    }
    return NULL;
}

const char *ckpt_hfs_layout_shards(struct ckpt_dir *dir)
{
    const struct place *p = find_place(dir);
    return p ? p->shards : NULL;
}

/* Read a JSON object from a file; *ret stays NULL if there is no such file. */
static int read_object(struct ckpt_dir *dir, const char *below, const char *name, size_t max_len,
                       json_t **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s%s%s", below, *below ? "/" : "", name);

    return path ? ckpt_config_read_if(dir, path, max_len, ret, err) : ckpt_nomem(err);
}

static int read_config(struct ckpt_dir *dir, const struct place *p, struct ckpt_facts *facts,
                       json_t **ret, struct ckpt_err *err)
{
    facts->files = CKPT_FILES_CONFIG;
    for (size_t i = 0; i < 3 && p->model[i].path && !*ret; i++) {
        const char *path = p->model[i].path;
        if (read_object(dir, path, "config.json", CKPT_CONFIG_MAX_BYTES, ret, err) < 0)
            return -1;
        facts->files_at = *ret ? path : NULL;
        if (*ret && p->model[i].model_only)
            facts->files = CKPT_FILES_COMPLETE;
    }
    return 0;
}

static int check_mapping(const json_t *mapping, bool (*ok)(const json_t *value), const char *name,
                         const char *expected, struct ckpt_err *err)
{
    const char *tensor;
    json_t *value;

    json_object_foreach((json_t *)mapping, tensor, value) {
        if (!ok(value))
            return ckpt_fail(err, CKPT_FORMAT, "%s: '%s' has not %s", name, tensor, expected);
    }
    return 0;
}

static bool is_file_number(const json_t *v)
{
    return json_is_integer(v) && json_integer_value(v) > 0 && json_integer_value(v) <= 1000000000;
}

static bool is_string(const json_t *v) { return json_is_string(v); }

static int read_mappings(struct ckpt_dir *dir, const char *below, struct ckpt_hfs_layout *l,
                         struct ckpt_facts *facts, struct ckpt_err *err)
{
    static const char files[] = "fqn_to_file_index_mapping.json",
                      dtypes[] = "fqn_to_dtype_mapping.json";

    if (read_object(dir, below, files, MAX_MAPPING_BYTES, &l->file_index, err) < 0 ||
        read_object(dir, below, dtypes, MAX_MAPPING_BYTES, &facts->dtypes, err) < 0 ||
        check_mapping(l->file_index, is_file_number, files, "the number of a file", err) < 0 ||
        check_mapping(facts->dtypes, is_string, dtypes, "the name of a dtype", err) < 0)
        return ckpt_err_in(err, "'%s/%s'", ckpt_dir_path(dir), below);
    facts->dtypes_file = dtypes;
    return 0;
}

/* Read the split of the finished model that is beside the shards. */
static int read_index(struct ckpt_dir *dir, const char *below, struct ckpt_facts *facts,
                      struct ckpt_err *err)
{
    static const char *const names[] = {INDEX, DIFFUSERS_INDEX};

    for (size_t i = 0; i < 2; i++) {
        ckpt_cleanup(ckpt_freep) char *path =
            ckpt_asprintf("%s%s%s", below, *below ? "/" : "", names[i]);
        if (!path)
            return ckpt_nomem(err);
        if (!ckpt_dir_has_file(dir, path))
            continue;
        facts->index_name = i ? DIFFUSERS_INDEX : NULL;
        return ckpt_weight_map_read(dir, path, ckpt_reader_refuse_index, &facts->weight_map, err);
    }
    return 0;
}

static int read_split(struct ckpt_dir *dir, const struct place *p, struct ckpt_hfs_layout *l,
                      struct ckpt_facts *facts, struct ckpt_err *err)
{
    for (size_t i = 0; i < 3 && p->model[i].path; i++) {
        const char *path = p->model[i].path;
        if (ckpt_has_suffix(path, HF_METADATA)) {
            if (read_mappings(dir, path, l, facts, err) < 0)
                return -1;
        } else if (!facts->weight_map && read_index(dir, path, facts, err) < 0) {
            return -1;
        }
    }
    return 0;
}

int ckpt_hfs_layout_read(struct ckpt_dir *dir, struct ckpt_hfs_layout *ret,
                         struct ckpt_facts *facts, json_t **ret_config, struct ckpt_err *err)
{
    const struct place *p = find_place(dir);

    if (!p)
        return ckpt_fail(err, CKPT_MISSING, "'%s' has no shard-*-model-*.safetensors",
                         ckpt_dir_path(dir));
    ret->shards = p->shards;
    if (read_config(dir, p, facts, ret_config, err) < 0 || read_split(dir, p, ret, facts, err) < 0)
        return -1;
    /* before the model is consolidated, the option diffusers_compatible leaves no other trace than
     * this */
    if (!facts->weight_map && json_object_get(*ret_config, "_diffusers_version"))
        facts->index_name = DIFFUSERS_INDEX;
    return 0;
}

/* ---- one file ---- */

#define VERSION "1.0"

bool ckpt_hfs_name_parse(const char *name, struct ckpt_hfs_name *ret)
{
    struct ckpt_hfs_name n;
    const char *s = name;

    if (!ckpt_take_text(&s, "shard-") || !ckpt_take_u64(&s, &n.rank) ||
        !ckpt_take_text(&s, "-model-") || !ckpt_take_u64(&s, &n.file) ||
        !ckpt_take_text(&s, "-of-") || !ckpt_take_u64(&s, &n.nfile) ||
        strcmp(s, ".safetensors") != 0 || n.rank == 0 || n.file == 0 || n.file > n.nfile)
        return false;
    *ret = n;
    return true;
}

void ckpt_hfs_shard_release(struct ckpt_hfs_shard *s)
{
    ckpt_source_unref(s->source);
    ckpt_st_release(&s->st);
    s->source = NULL;
}

/* Read the offsets of t. Each of them plus the tensor's size must fit into 63 bits. */
static int read_offsets(const json_t *entry, const struct ckpt_st_tensor *t, uint64_t *lo,
                        struct ckpt_err *err)
{
    const json_t *list = json_object_get(entry, "saved_offsets");
    uint64_t end;

    if (!json_is_array(list) || json_array_size(list) != t->rank)
        return ckpt_fail(
            err, CKPT_FORMAT,
            "tensor '%s': DCP_SHARDING_INFO does not have one offset for each of its %u "
            "dimensions",
            t->name, t->rank);
    for (uint32_t d = 0; d < t->rank; d++) {
        const json_t *v = json_array_get(list, d);
        lo[d] = (uint64_t)json_integer_value(v);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || ckd_add(&end, lo[d], t->dim[d]) ||
            end > INT64_MAX)
            return ckpt_fail(err, CKPT_FORMAT,
                             "tensor '%s': DCP_SHARDING_INFO: offset %u is not a possible index",
                             t->name, d);
    }
    return 0;
}

static int place_tensors(struct ckpt_hfs_shard *s, const json_t *info, struct ckpt_err *err)
{
    const size_t n = s->st.ntensor;

    if (!(s->lo = ckpt_arena_alloc(&s->st.arena, (n + 1) * sizeof *s->lo)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        const struct ckpt_st_tensor *t = &s->st.tensor[i];
        const json_t *entry = json_object_get(info, t->name);
        uint64_t *lo;
        if (!entry)
            return ckpt_fail(err, CKPT_FORMAT, "DCP_SHARDING_INFO does not name tensor '%s'",
                             t->name);
        if (!(lo = ckpt_arena_alloc(&s->st.arena, (t->rank + 1) * sizeof *lo)))
            return ckpt_nomem(err);
        if (read_offsets(entry, t, lo, err) < 0)
            return -1;
        s->lo[i] = lo;
    }
    return 0;
}

static int read_info(struct ckpt_hfs_shard *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *info = NULL;
    const char *text = ckpt_st_metadata(&s->st, "DCP_SHARDING_INFO");
    const char *version = ckpt_st_metadata(&s->st, "DCP_VERSION");

    if (!text)
        return ckpt_fail(err, CKPT_FORMAT, "its metadata has no DCP_SHARDING_INFO");
    if (version && strcmp(version, VERSION) != 0)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "DCP_VERSION is '%s', known is '%s'", version,
                         VERSION);
    if (ckpt_json_parse(text, strlen(text), "DCP_SHARDING_INFO", &info, err) < 0)
        return -1;
    if (!json_is_object(info))
        return ckpt_fail(err, CKPT_FORMAT, "DCP_SHARDING_INFO is not a JSON object");
    return place_tensors(s, info, err);
}

int ckpt_hfs_shard_read(struct ckpt_hfs_shard *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *name = NULL;

    if (ckpt_st_read(s->source, &s->st, err) < 0)
        return -1;
    if (read_info(s, err) < 0) {
        name = ckpt_source_name(s->source);
        return ckpt_err_in(err, "'%s'", name);
    }
    ckpt_st_forget_metadata(&s->st); /* long, and used up */
    return 0;
}
