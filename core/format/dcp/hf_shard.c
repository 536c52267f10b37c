/* SPDX-License-Identifier: Apache-2.0 */
/* The name and the header of a shard that DCP's HuggingFaceStorageWriter (torch >= 2.8), or NeMo
 * Automodel's copy of it, wrote. */
#include "format/dcp/hf_shard.h"

#include <string.h>

#include "base/ckd.h"
#include "base/take.h"

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
