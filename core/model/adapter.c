/* SPDX-License-Identifier: Apache-2.0 */
/* Converting names of a PeftModel's state dict to those of adapter_model.safetensors. */
#include "model/adapter.h"

#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "model/names.h"
#include "model/wrappers.h"

#define ROOT "base_model.model."
#define FILE_NAME "adapter_model.safetensors"

/* Parts of names that LoRA adds, after which the adapter's name may follow. */
static const char *const lora_parts[] = {"lora_A",
                                         "lora_B",
                                         "lora_embedding_A",
                                         "lora_embedding_B",
                                         "lora_magnitude_vector",
                                         "trainable_tokens_delta"};
static const struct ckpt_texts lora_words = {lora_parts, sizeof lora_parts / sizeof *lora_parts};

static bool is(const char *word, size_t len, const char *text)
{
    return strlen(text) == len && memcmp(word, text, len) == 0;
}

/* Is one of the words a part of the name? */
static bool has_any(const char *name, const struct ckpt_texts *words)
{
    for (const char *p = name; p; p = strchr(p, '.'), p = p ? p + 1 : NULL)
        if (ckpt_texts_have(words, p, strcspn(p, ".")))
            return true;
    return false;
}

static bool has_word(const char *name, const char *word)
{
    return has_any(name, &(struct ckpt_texts){&word, 1});
}

static bool is_lora(const char *name) { return has_any(name, &lora_words); }

struct adapter {
    const struct ckpt_catalog *cat;
    const struct ckpt_type *type;
    struct ckpt_arena *arena; /* of the names */
    const char **name;        /* NULL: the tensor is not the adapter's */
};

static void adapter_release(struct adapter *a) { free(a->name); }

/* A copy of the text in the arena; the text is released. */
static int keep_text(const struct adapter *a, struct ckpt_str *s, const char **ret,
                     struct ckpt_err *err)
{
    *ret = s->failed ? NULL : ckpt_arena_strdup(a->arena, ckpt_str_get(s));
    ckpt_str_release(s);
    return *ret ? 0 : ckpt_nomem(err);
}

static void put_part(struct ckpt_str *s, const char *part, size_t len)
{
    ckpt_str_puts(s, s->len ? "." : "");
    ckpt_str_append(s, part, len);
}

/* The name in adapter_model.safetensors of a name below ROOT. */
static int canonical(const struct adapter *a, const char *name, const char **ret,
                     struct ckpt_err *err)
{
    struct ckpt_str s = {0};
    bool last = false;

    for (const char *p = name; *p && !last;) {
        size_t len = strcspn(p, "."), next;
        const bool saved = is(p, len, "modules_to_save"),
                   lora = ckpt_texts_have(&lora_words, p, len);
        if (!saved)
            put_part(&s, p, len);
        last = is(p, len,
                  "lora_magnitude_vector"); /* it is a module in memory, but a tensor in the file */
        p += len + (p[len] == '.');
        next = strcspn(p, ".");
        if ((saved || lora) && !is(p, next, "weight") && !is(p, next, "bias"))
            p += next + (p[next] == '.');
    }
    return keep_text(a, &s, ret, err);
}

/* Find ROOT at the beginning of the name or after a prefix, the last if it is there twice; NULL: it
 * is not there. */
static const char *find_root(const char *name)
{
    const char *root = NULL;

    for (const char *p = name; (p = strstr(p, ROOT)); p++)
        root = p == name || p[-1] == '.' ? p : root;
    return root;
}

/* The base's own name of a name below ROOT. */
static int base_name(const struct adapter *a, const char *name, const char **ret,
                     struct ckpt_err *err)
{
    struct ckpt_str s = {0};

    for (const char *p = name + strlen(ROOT); *p;) {
        const size_t len = strcspn(p, ".");
        if (!is(p, len, "base_layer") && !is(p, len, "original_module"))
            put_part(&s, p, len);
        p += len + (p[len] == '.');
    }
    return keep_text(a, &s, ret, err);
}

/* Is it the weight of an input or output embedding, below LoRA's wrapper? With an adapter of that
 * embedding, PEFT saves the embedding too (save_embedding_layers). */
static int is_adapted_embedding(const struct adapter *a, const char *name, bool *ret,
                                struct ckpt_err *err)
{
    const char *root = find_root(name), *plain;

    *ret = false;
    if (!root || !has_word(root, "base_layer"))
        return 0;
    if (base_name(a, root, &plain, err) < 0)
        return -1;
    *ret = ckpt_texts_have(&a->type->embedding, plain, strlen(plain)) ||
           ckpt_texts_have(&a->type->output, plain, strlen(plain));
    return 0;
}

/* Evidence for whether a checkpoint is an adapter or a whole PeftModel: numbers of tensors. */
struct evidence {
    size_t lora;     /* LoRA's own tensors */
    size_t adapted;  /* weights below LoRA's wrappers, except embeddings */
    size_t original; /* original weights of modules of which the adapter saves a copy */
    size_t other; /* weights of other modules, which for an adapter are those of modules_to_save */
};

static int collect_one(const struct adapter *a, const char *name, struct evidence *e,
                       struct ckpt_err *err)
{
    bool embedding;

    if (is_lora(name)) {
        e->lora++;
        return 0;
    }
    if (is_adapted_embedding(a, name, &embedding, err) < 0)
        return -1;
    /* biases are an adapter's own, too: with bias="all" PEFT saves all that it finds */
    if (!ckpt_has_suffix(name, ".weight"))
        return 0;
    if (has_word(name, "original_module"))
        e->original++;
    else if (!embedding && !has_word(name, "modules_to_save"))
        (*(has_word(name, "base_layer") ? &e->adapted : &e->other))++;
    return 0;
}

static int collect(struct adapter *a, bool *ret_lora, bool *ret_whole, struct ckpt_err *err)
{
    struct evidence e = {0};

    if (ckpt_names_weights(a->cat, a->type, a->arena, &a->name, err) < 0)
        return -1;
    for (size_t i = 0; i < a->cat->tensors.len; i++)
        if (a->name[i] && collect_one(a, a->name[i], &e, err) < 0)
            return -1;
    *ret_lora = e.lora > 0;
    *ret_whole = e.lora && (e.adapted || e.original || e.other > e.lora);
    return 0;
}

static int rename_one(struct adapter *a, size_t i, struct ckpt_err *err)
{
    const char *root = find_root(a->name[i]);

    if (!root)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is beside LoRA tensors but not below '" ROOT
                         "': PEFT's names are expected (view=raw shows the tensors)",
                         a->cat->tensors.ptr[i].name);
    return canonical(a, root, &a->name[i], err);
}

void ckpt_adapter_warn(struct ckpt_catalog *cat, size_t n, const char *first)
{
    ckpt_catalog_warn(cat,
                      "left out: %zu tensors of the adapter's base ('%s' first); lora=merge shows "
                      "the merged model, lora=base the base, lora=adapter this adapter without a "
                      "warning",
                      n, first);
}

/* Rename all tensors. whole: the catalogue has the base's weights too, which are dropped. */
static int rename_all(struct adapter *a, struct ckpt_catalog *cat, bool whole, bool quiet,
                      struct ckpt_err *err)
{
    size_t dropped = 0, first = 0;
    bool embedding = false;

    for (size_t i = 0; i < a->cat->tensors.len; i++) {
        if (!a->name[i])
            continue;
        if (whole && is_adapted_embedding(a, a->name[i], &embedding, err) < 0)
            return -1;
        if (!whole || embedding || is_lora(a->name[i]) || has_word(a->name[i], "modules_to_save")) {
            if (rename_one(a, i, err) < 0)
                return -1;
            continue;
        }
        a->name[i] = NULL;
        if (dropped++ == 0)
            first = i;
    }
    if (dropped && !quiet)
        ckpt_adapter_warn(cat, dropped, a->cat->tensors.ptr[first].name);
    return 0;
}

/* The last component of the name of the module whose matrix A this is ("q_proj"); its length, or 0.
 */
static size_t module_of(const char *name, const char **ret)
{
    const char *end = strstr(name, ".lora_A."), *begin = end;

    while (end && begin > name && begin[-1] != '.')
        begin--;
    *ret = begin;
    return end ? (size_t)(end - begin) : 0;
}

/* Name the modules of the adapter in a config that was made without them. */
static int add_targets(const struct ckpt_catalog *cat, json_t *config, struct ckpt_err *err)
{
    struct ckpt_map seen = {0};
    json_t *targets = json_array();
    int result = 0;

    if (json_object_set_new(config, "target_modules", targets) < 0)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len && result == 0; i++) {
        const char *module;
        const size_t len = module_of(cat->tensors.ptr[i].name, &module);
        uint32_t at;
        bool is_new = false;
        if (len && (ckpt_map_put(&seen, module, len, 0, &at, &is_new) < 0 ||
                    (is_new && json_array_append_new(targets, json_stringn(module, len)) < 0)))
            result = ckpt_nomem(err);
    }
    ckpt_map_release(&seen);
    return result;
}

int ckpt_adapter_apply(struct ckpt_catalog *cat, const struct ckpt_type *type, bool quiet,
                       struct ckpt_facts *facts, bool *ret_found, struct ckpt_err *err)
{
    ckpt_cleanup(adapter_release) struct adapter a = {
        .cat = cat, .type = type, .arena = &cat->arena};
    bool lora = false, whole = false;

    *ret_found = false;
    if (collect(&a, &lora, &whole, err) < 0)
        return -1;
    if (!lora)
        return 0;
    if (rename_all(&a, cat, whole, quiet, err) < 0 || ckpt_catalog_select(cat, a.name, err) < 0 ||
        ckpt_facts_map_all(facts, cat, FILE_NAME, err) < 0 ||
        (facts->adapter_config && add_targets(cat, facts->adapter_config, err) < 0))
        return -1;
    facts->names = CKPT_NAMES_HUB;
    facts->is_adapter = true;
    *ret_found = true;
    return 0;
}

/* ---- an adapter's own files ---- */

/* Has PEFT's file names like this one? Not those of a state dict: with the adapter's name after
 * LoRA's words, with modules of which the adapter has a copy, or with another beginning. */
static bool is_plain(const char *name)
{
    if (find_root(name) != name || has_word(name, "modules_to_save") ||
        has_word(name, "original_module"))
        return false;
    for (const char *p = name; *p;) {
        const size_t len = strcspn(p, ".");
        const bool lora = ckpt_texts_have(&lora_words, p, len);
        p += len + (p[len] == '.');
        const size_t next = strcspn(p, ".");
        if (lora && next && !is(p, next, "weight") && !is(p, next, "bias"))
            return false;
    }
    return true;
}

/* look_at_file learns this from all names of an adapter's file. */
struct file_names {
    bool rooted;  /* some are below ROOT */
    bool wrapped; /* those are below ROOT and `module` */
    bool halved;  /* all have the second word of ROOT alone, before the one that the base has */
    bool whole;   /* it has weights of the base, too */
};

static int look_at_file(struct adapter *a, struct file_names *ret, bool *ret_lora,
                        struct ckpt_err *err)
{
    static const char module[] = ROOT "module.", inner[] = "model.", twice[] = "model.model.";
    struct evidence e = {0};
    bool any_twice = false;

    *ret = (struct file_names){.wrapped = true, .halved = true};
    for (size_t i = 0; i < a->cat->tensors.len; i++) {
        if (!(a->name[i] = ckpt_wrappers_strip(a->arena, a->name[i])))
            return ckpt_nomem(err);
        const char *root = find_root(a->name[i]);
        ret->rooted |= root != NULL;
        ret->wrapped &= !root || ckpt_has_prefix(root, module);
        ret->halved &= ckpt_has_prefix(a->name[i], inner);
        any_twice |= ckpt_has_prefix(a->name[i], twice);
        if (collect_one(a, a->name[i], &e, err) < 0)
            return -1;
    }
    ret->wrapped &= ret->rooted;
    ret->halved &= any_twice;
    ret->whole = e.adapted || e.original;
    *ret_lora = e.lora > 0;
    return 0;
}

/* Put ROOT, and nothing twice, before what the names of the base are. */
static int set_root(struct adapter *a, size_t i, const struct file_names *f, struct ckpt_err *err)
{
    const char *name = a->name[i], *root = find_root(name);
    struct ckpt_str s = {0};

    if (root && !f->wrapped)
        return 0;
    if (root)
        name = root + strlen(ROOT "module.");
    else if (f->rooted)
        return ckpt_fail(err, CKPT_FORMAT,
                         "'%s' is not below '" ROOT "', but other tensors of the adapter are",
                         a->cat->tensors.ptr[i].name);
    else if (f->halved)
        name += strlen("model.");
    ckpt_str_puts(&s, ROOT);
    ckpt_str_puts(&s, name);
    return keep_text(a, &s, &a->name[i], err);
}

/* Does PEFT itself write this name? With bias="all" it saves the bias of a module of which the
 * adapter has a copy twice: under the module's name, and as it is in memory. */
static bool is_second_bias(const struct adapter *a, const char *name)
{
    static const char leaf[] = "modules_to_save.bias";
    const size_t len = strlen(name);
    ckpt_cleanup(ckpt_freep) char *first =
        ckpt_has_suffix(name, leaf) && len > strlen(leaf)
            ? ckpt_asprintf("%.*sbias", (int)(len - strlen(leaf)), name)
            : NULL;

    return first && ckpt_catalog_find(a->cat, first);
}

/* The name in PEFT's file; NULL: the tensor is not the adapter's. */
static int clean_one(struct adapter *a, size_t i, const struct file_names *f, struct ckpt_err *err)
{
    bool embedding = false;

    if (set_root(a, i, f, err) < 0 ||
        (f->whole && is_adapted_embedding(a, a->name[i], &embedding, err) < 0))
        return -1;
    if (f->whole && !embedding && !is_lora(a->name[i]) && !has_word(a->name[i], "modules_to_save"))
        a->name[i] = NULL;
    else if (!is_plain(a->name[i]) && !is_second_bias(a, a->name[i]))
        return rename_one(a, i, err);
    return 0;
}

/* Say what was done. CONFLICT: two names became one. */
static int tell_names(const struct adapter *a, struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = cat->tensors.ptr;
    ckpt_cleanup(ckpt_map_release) struct ckpt_map seen = {0};
    size_t n = 0, first = 0, dropped = 0, first_dropped = 0;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        if (!a->name[i]) {
            if (dropped++ == 0)
                first_dropped = i;
            continue;
        }
        const uint32_t at = ckpt_map_add(&seen, a->name[i], (uint32_t)i);
        if (at == CKPT_NONE)
            return ckpt_nomem(err);
        if (at != i)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "'%s' and '%s' are both '%s' in an adapter's file: are there two "
                             "adapters? (view=raw shows both)",
                             t[at].name, t[i].name, a->name[i]);
        if (strcmp(a->name[i], t[i].name) != 0 && n++ == 0)
            first = i;
    }
    if (n)
        ckpt_catalog_note(cat,
                          "%zu name%s as PEFT writes them, without what wrappers and a state dict "
                          "add: '%s' is shown as '%s'",
                          n, n == 1 ? " is shown" : "s are shown", t[first].name, a->name[first]);
    if (dropped)
        ckpt_catalog_warn(cat,
                          "left out: %zu tensors of the model that the adapter changes ('%s' "
                          "first), which an adapter's file does not have",
                          dropped, t[first_dropped].name);
    return n || dropped ? 1 : 0;
}

int ckpt_adapter_clean(struct ckpt_catalog *cat, const struct ckpt_type *type,
                       struct ckpt_facts *facts, struct ckpt_err *err)
{
    ckpt_cleanup(adapter_release) struct adapter a = {
        .cat = cat, .type = type, .arena = &cat->arena, .name = ckpt_catalog_names(cat)};
    struct file_names f;
    bool lora = false;

    if (!a.name)
        return ckpt_nomem(err);
    if (look_at_file(&a, &f, &lora, err) < 0)
        return -1;
    for (size_t i = 0; lora && i < cat->tensors.len; i++)
        if (clean_one(&a, i, &f, err) < 0)
            return -1;
    const int changed = tell_names(&a, cat, err);
    if (changed <= 0)
        return changed;
    return ckpt_catalog_select(cat, a.name, err) < 0
               ? -1
               : ckpt_facts_map_all(facts, cat, FILE_NAME, err);
}

/* ---- the base ---- */

/* Add tensor i, unless it belongs to the adapter. *skipped counts tensors that are not the
 * PeftModel's. */
static int add_base(const struct adapter *a, size_t i, struct ckpt_catalog *to, size_t *skipped,
                    struct ckpt_err *err)
{
    struct ckpt_tensor t = a->cat->tensors.ptr[i];
    const char *root = a->name[i] ? find_root(a->name[i]) : NULL;

    if (!a->name[i] || is_lora(a->name[i]) || has_word(a->name[i], "modules_to_save"))
        return 0;
    if (!root) {
        (*skipped)++;
        return 0;
    }
    if (base_name(a, root, &t.name, err) < 0)
        return -1;
    return ckpt_catalog_copy(to, &t, 0, err);
}

int ckpt_adapter_base(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_arena_release) struct ckpt_arena arena = {0};
    ckpt_cleanup(adapter_release) struct adapter a = {.cat = cat, .type = type, .arena = &arena};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *base = NULL;
    bool lora = false, whole = false;
    size_t skipped = 0;

    *ret = NULL;
    if (collect(&a, &lora, &whole, err) < 0)
        return -1;
    if (!lora || !whole)
        return 0;
    if (ckpt_catalog_new_like(cat, &base, err) < 0)
        return -1;
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (add_base(&a, i, base, &skipped, err) < 0)
            return -1;
    if (skipped)
        ckpt_catalog_warn(base, "left out: %zu tensors that are not below '" ROOT "'", skipped);
    *ret = ckpt_steal(&base);
    return 0;
}

int ckpt_adapter_divide(struct ckpt_catalog *cat, struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *own = NULL;
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);

    if (!name)
        return ckpt_nomem(err);
    if (ckpt_catalog_new_like(cat, &own, err) < 0)
        return -1;
    for (size_t i = 0; i < cat->tensors.len; i++) {
        if (!has_word(name[i], "adapter") && !has_word(name[i], "lora_A") &&
            !has_word(name[i], "lora_B"))
            continue;
        if (ckpt_catalog_copy(own, &cat->tensors.ptr[i], 0, err) < 0)
            return -1;
        name[i] = NULL;
    }
    if (ckpt_catalog_select(cat, name, err) < 0)
        return -1;
    *ret = ckpt_steal(&own);
    return 0;
}
