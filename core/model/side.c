/* SPDX-License-Identifier: Apache-2.0 */
/* Choosing the files that a view shows unchanged. */
#include "model/side.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static const char *const tokenizer_files[] = {
    "tokenizer*.json",
    "tokenizer*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.jinja",
    "chat_template*",
    "added_tokens.json",
    "special_tokens_map.json",
    "tekken.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "*.py",
};

/* Weights in any framework's format, and their indices. */
static const char *const weight_files[] = {
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.lock",
    "fqn_to_*_mapping.json",
};

static bool matches(const char *name, const char *const *patterns, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (fnmatch(patterns[i], name, 0) == 0)
            return true;
    return false;
}

static bool wanted(const char *name, enum ckpt_side_rule rule)
{
    if (name[0] == '.')
        return false;
    if (rule == CKPT_SIDE_TOKENIZER)
        return matches(name, tokenizer_files, sizeof tokenizer_files / sizeof tokenizer_files[0]);
    return !matches(name, weight_files, sizeof weight_files / sizeof weight_files[0]);
}

void ckpt_sides_release(struct ckpt_sides *s)
{
    for (size_t i = 0; i < s->files.len; i++) {
        free((char *)s->files.ptr[i].path);
        ckpt_source_unref(s->files.ptr[i].source);
    }
    ckpt_vec_release(&s->files);
    free(s->dangling);
}

static size_t find(const struct ckpt_sides *s, const char *path)
{
    size_t i = 0;

    while (i < s->files.len && strcmp(s->files.ptr[i].path, path) != 0)
        i++;
    return i;
}

bool ckpt_sides_has(const struct ckpt_sides *s, const char *path)
{
    return find(s, path) < s->files.len;
}

void ckpt_sides_remove(struct ckpt_sides *s, const char *path)
{
    size_t i = find(s, path);

    if (i == s->files.len)
        return;
    free((char *)s->files.ptr[i].path);
    ckpt_source_unref(s->files.ptr[i].source);
    s->files.ptr[i] = s->files.ptr[--s->files.len];
}

struct adding {
    struct ckpt_sides *sides;
    struct ckpt_dir *dir;
    struct ckpt_fdpool *pool;
    enum ckpt_side_rule rule;
};

static int add_file(struct adding *a, const char *name, struct ckpt_err *err)
{
    struct ckpt_side_file file = {0};
    struct ckpt_file_id id;

    if (ckpt_sides_has(a->sides, name))
        return 0;
    if (ckpt_source_file_new(a->dir, name, a->pool, &file.source, err) < 0)
        return -1;
    if (ckpt_source_file_id(file.source, &id) && id.mtime_ns > a->sides->mtime_ns)
        a->sides->mtime_ns = id.mtime_ns;
    if (!(file.path = strdup(name)) || ckpt_vec_push(&a->sides->files, file) < 0) {
        free((char *)file.path);
        ckpt_source_unref(file.source);
        return ckpt_nomem(err);
    }
    return 0;
}

/* Note a link that is left out. */
static int note_link(struct ckpt_sides *s, const struct ckpt_dir *dir, const char *name,
                     struct ckpt_err *err)
{
    struct ckpt_err why = {0};
    struct ckpt_dir_found found;

    s->nlink++;
    if (ckpt_dir_look(dir, name, &found, &why) < 0 && why.code == CKPT_UNSUPPORTED) {
        (void)ckpt_err_move(&s->leaving, &why);
        return 0;
    }
    return s->dangling || (s->dangling = strdup(name)) ? 0 : ckpt_nomem(err);
}

static int add_wanted(void *ctx, const struct ckpt_entry *e, struct ckpt_err *err)
{
    struct adding *a = ctx;

    if (e->is_link && e->kind == CKPT_ENTRY_OTHER && wanted(e->name, a->rule))
        return note_link(a->sides, a->dir, e->name, err);
    return e->kind == CKPT_ENTRY_FILE && wanted(e->name, a->rule) ? add_file(a, e->name, err) : 0;
}

static int add_from(struct adding *a, const char *below, const char *name, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;

    if (*below) {
        if (!ckpt_dir_has_dir(a->dir, below))
            return 0;
        if (ckpt_dir_open_below(a->dir, below, &sub, err) < 0)
            return -1;
        a->dir = sub;
    }
    if (!name)
        return ckpt_dir_list(a->dir, add_wanted, a, err);
    return ckpt_dir_has_file(a->dir, name) ? add_file(a, name, err) : 0;
}

int ckpt_sides_add(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                   enum ckpt_side_rule rule, struct ckpt_fdpool *pool, struct ckpt_err *err)
{
    struct adding a = {s, dir, pool, rule};
    return add_from(&a, below, NULL, err);
}

int ckpt_sides_add_one(struct ckpt_sides *s, struct ckpt_dir *dir, const char *below,
                       const char *name, struct ckpt_fdpool *pool, struct ckpt_err *err)
{
    struct adding a = {s, dir, pool, CKPT_SIDE_ALL};
    return add_from(&a, below, name, err);
}
