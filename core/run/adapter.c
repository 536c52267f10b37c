/* SPDX-License-Identifier: Apache-2.0 */
/* Names of a PeftModel's state dict -> those of adapter_model.safetensors. */
#include "run/adapter.h"

#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/str.h"
#include "run/names.h"

#define ROOT "base_model.model."
#define FILE_NAME "adapter_model.safetensors"

/* Words of LoRA, after which an adapter's name may stand. */
static const char *const lora_words[] = {"lora_A",
                                         "lora_B",
                                         "lora_embedding_A",
                                         "lora_embedding_B",
                                         "lora_magnitude_vector",
                                         "trainable_tokens_delta"};

static bool is(const char *word, size_t len, const char *text)
{
    return strlen(text) == len && memcmp(word, text, len) == 0;
}

static bool is_lora_word(const char *word, size_t len)
{
    for (size_t i = 0; i < sizeof lora_words / sizeof lora_words[0]; i++)
        if (is(word, len, lora_words[i]))
            return true;
    return false;
}

static bool has_word(const char *name, const char *word)
{
    for (const char *p = name; p; p = strchr(p, '.'), p = p ? p + 1 : NULL)
        if (is(p, strcspn(p, "."), word))
            return true;
    return false;
}

static bool is_lora(const char *name)
{
    for (const char *p = name; p; p = strchr(p, '.'), p = p ? p + 1 : NULL)
        if (is_lora_word(p, strcspn(p, ".")))
            return true;
    return false;
}

/* The name in adapter_model.safetensors of one below ROOT. */
static int canonical(const char *name, char **ret, struct ckpt_err *err)
{
    struct ckpt_str s = {0};
    bool last = false;

    for (const char *p = name; *p && !last;) {
        size_t len = strcspn(p, "."), next;
        const bool saved = is(p, len, "modules_to_save"), lora = is_lora_word(p, len);
        if (!saved) {
            ckpt_str_puts(&s, s.len ? "." : "");
            ckpt_str_append(&s, p, len);
        }
        last = is(p, len, "lora_magnitude_vector"); /* a module in memory, a tensor in the file */
        p += len + (p[len] == '.');
        next = strcspn(p, ".");
        if ((saved || lora) && !is(p, next, "weight") && !is(p, next, "bias"))
            p += next + (p[next] == '.');
    }
    return ckpt_str_steal(&s, ret, err);
}

struct adapter {
    struct ckpt_catalog *cat;
    const struct ckpt_type *type;
    size_t ntensor;
    char **name; /* NULL: not the adapter's */
};

static void adapter_release(struct adapter *a)
{
    for (size_t i = 0; a->name && i < a->ntensor; i++)
        free(a->name[i]);
    free(a->name);
}

static int collect(struct adapter *a, bool *ret_lora, bool *ret_whole, struct ckpt_err *err)
{
    if (!(a->name = calloc(a->ntensor + 1, sizeof *a->name)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < a->ntensor; i++) {
        const char *name = a->cat->tensors.ptr[i].name;
        if (!ckpt_names_is_weight(a->type, name))
            continue;
        if (!(a->name[i] = ckpt_names_unwrap(name)))
            return ckpt_nomem(err);
        const bool lora = is_lora(a->name[i]);
        *ret_lora |= lora;
        *ret_whole |= !lora && (has_word(a->name[i], "base_layer") ||
                                has_word(a->name[i], "original_module"));
    }
    return 0;
}

static int rename_one(struct adapter *a, size_t i, struct ckpt_err *err)
{
    const char *root = strstr(a->name[i], ROOT);
    char *name;

    if (!root || (root > a->name[i] && root[-1] != '.'))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' stands beside LoRA keys but not below '" ROOT
                         "': PEFT's names are expected (view=raw shows the tensors)",
                         a->cat->tensors.ptr[i].name);
    if (canonical(root, &name, err) < 0)
        return -1;
    free(a->name[i]);
    a->name[i] = name;
    return 0;
}

/* A whole state dict has the base's weights too. */
static int rename_all(struct adapter *a, bool whole, struct ckpt_err *err)
{
    size_t dropped = 0, first = 0;

    for (size_t i = 0; i < a->ntensor; i++) {
        if (!a->name[i])
            continue;
        if (!whole || is_lora(a->name[i]) || has_word(a->name[i], "modules_to_save")) {
            if (rename_one(a, i, err) < 0)
                return -1;
            continue;
        }
        free(a->name[i]);
        a->name[i] = NULL;
        if (dropped++ == 0)
            first = i;
    }
    if (dropped)
        ckpt_catalog_warn(a->cat, "left out: %zu tensors of the adapter's base ('%s' first)",
                          dropped, a->cat->tensors.ptr[first].name);
    return 0;
}

static int describe(struct ckpt_catalog *cat, struct ckpt_err *err)
{
    json_t *map = json_object();
    json_t *facts =
        map ? json_pack("{s:b, s:b, s:o}", "hf_names", 1, "adapter", 1, "weight_map", map) : NULL;

    if (!facts || json_object_update_new(cat->about, facts) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (json_object_set_new(map, cat->tensors.ptr[i].name, json_string(FILE_NAME)) < 0)
            return ckpt_nomem(err);
    return 0;
}

int ckpt_adapter_apply(struct ckpt_catalog *cat, const struct ckpt_type *type, bool *ret_found,
                       struct ckpt_err *err)
{
    ckpt_cleanup(adapter_release) struct adapter a = {
        .cat = cat, .type = type, .ntensor = cat->tensors.len};
    bool lora = false, whole = false;

    *ret_found = false;
    if (collect(&a, &lora, &whole, err) < 0)
        return -1;
    if (!lora)
        return 0;
    if (rename_all(&a, whole, err) < 0 ||
        ckpt_catalog_select(cat, (const char *const *)a.name, err) < 0 || describe(cat, err) < 0)
        return -1;
    *ret_found = true;
    return 0;
}
