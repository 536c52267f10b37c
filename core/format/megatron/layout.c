/* SPDX-License-Identifier: Apache-2.0 */
/* Recognising the formats by the files that Megatron writes. */
#include "format/megatron/load.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "format/reader.h"

enum { MAX_MARK = 64 * 1024, SNIFF_BYTES = 256 * 1024 };

#define VERL_MODEL "model/dist_ckpt"

/* verl's are the last two, in its older and newer layout. */
static const char *const places[] = {"", "weights", "model_weights", "dist_ckpt", VERL_MODEL};

/* The format by metadata.json, which names the back end and exists when the save is finished. */
static enum ckpt_megatron_format by_mark(const struct ckpt_dir *dir)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *mark = NULL;
    size_t len;

    if (!ckpt_dir_has_file(dir, "metadata.json") ||
        ckpt_dir_read_file(dir, "metadata.json", MAX_MARK, &text, &len, NULL) < 0 ||
        ckpt_json_parse(text, len, "metadata.json", &mark, NULL) < 0)
        return CKPT_MEGATRON_NONE;
    const char *backend = ckpt_json_str(mark, "sharded_backend");
    if (!backend)
        return CKPT_MEGATRON_NONE;
    return strcmp(backend, "torch_dist") == 0 ? CKPT_MEGATRON_DIST
           : strcmp(backend, "zarr") == 0     ? CKPT_MEGATRON_ZARR
                                              : CKPT_MEGATRON_OTHER;
}

static bool any_word(const char *text, size_t len, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memmem(text, len, words[i], strlen(words[i])))
            return true;
    return false;
}

/* The format by the names of modules in a DCP. torch_dcp and fsdp_dtensor have Megatron's modules
 * below "model."; torch_dist does not, and without metadata.json it is not finished. */
static enum ckpt_megatron_format by_modules(const struct ckpt_dir *dir)
{
    static const char *const modules[] = {"embedding.word_embeddings.weight",
                                          ".self_attention.linear_", "decoder.layers.mlp.linear_fc",
                                          ".mlp.linear_fc1.layer_norm_weight",
                                          "decoder.final_layernorm.weight"};
    static const char *const below[] = {"model.embedding.", "model.decoder.", "model.module.",
                                        "model.output_layer."};
    ckpt_cleanup(ckpt_freep) char *head = malloc(SNIFF_BYTES);
    size_t n = head ? ckpt_dir_read_head(dir, ".metadata", head, SNIFF_BYTES) : 0;

    if (!any_word(head, n, modules, sizeof modules / sizeof modules[0]))
        return CKPT_MEGATRON_NONE;
    return any_word(head, n, below, sizeof below / sizeof below[0]) ? CKPT_MEGATRON_DCP
                                                                    : CKPT_MEGATRON_UNFINISHED;
}

static bool has_arrays(const struct ckpt_dir *dir)
{
    static const char *const names[] = {"embedding.word_embeddings.weight/.zarray",
                                        "module.embedding.word_embeddings.weight/.zarray",
                                        "model.embedding.word_embeddings.weight/.zarray"};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (ckpt_dir_has_file(dir, names[i]))
            return true;
    return false;
}

static enum ckpt_megatron_format format_of(const struct ckpt_dir *dir)
{
    const enum ckpt_megatron_format marked = by_mark(dir);
    const bool common = ckpt_dir_has_file(dir, "common.pt");
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    bool ranks = false, data = false;
    struct ckpt_entry e;

    if (marked != CKPT_MEGATRON_NONE)
        return marked;
    if (ckpt_entries_read(dir, &entries, NULL) < 0)
        return CKPT_MEGATRON_NONE;
    while (ckpt_entries_next(&entries, &e)) {
        ranks |= e.kind == CKPT_ENTRY_DIR &&
                 (ckpt_has_prefix(e.name, "mp_rank_") || ckpt_has_prefix(e.name, "tp_rank_")) &&
                 strspn(e.name + strlen("mp_rank_"), "0123456789") >= 2;
        data |= e.kind == CKPT_ENTRY_FILE && ckpt_has_suffix(e.name, ".distcp");
    }
    if (ranks)
        return CKPT_MEGATRON_RANKS;
    if ((common && (data || ckpt_dir_has_file(dir, ".metadata"))) || has_arrays(dir))
        return CKPT_MEGATRON_UNFINISHED;
    return by_modules(dir);
}

struct ckpt_megatron_layout ckpt_megatron_layout_of(struct ckpt_dir *dir)
{
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = ckpt_reader_folder(dir, places[i]);
        const enum ckpt_megatron_format format = sub ? format_of(sub) : CKPT_MEGATRON_NONE;
        if (format != CKPT_MEGATRON_NONE)
            return (struct ckpt_megatron_layout){format, places[i]};
    }
    return (struct ckpt_megatron_layout){CKPT_MEGATRON_NONE, ""};
}

int ckpt_megatron_beside(struct ckpt_dir *dir, const struct ckpt_megatron_layout *layout,
                         const char *part, struct ckpt_dir **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("%s/dist_ckpt", part);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *at = NULL;

    *ret = NULL;
    if (!folder)
        return ckpt_nomem(err);
    if (strcmp(layout->below, VERL_MODEL) != 0 || !ckpt_dir_has_dir(dir, folder))
        return 0;
    if (ckpt_dir_open_below(dir, folder, &at, err) < 0)
        return -1;
    if (by_mark(at) == CKPT_MEGATRON_DIST)
        *ret = ckpt_steal(&at);
    return 0;
}
