/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing an adapter's tensors with its config and with the base. */
#include "model/adapter_check.h"

#include <inttypes.h>
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "model/lora.h"

#define ROOT "base_model.model."

/* The names of the two matrices of a pair behind their module's. */
static const struct kind {
    const char *a, *b;
} kinds[] = {{".lora_A.weight", ".lora_B.weight"}, {".lora_embedding_A", ".lora_embedding_B"}};

enum { NKIND = sizeof kinds / sizeof *kinds };

struct check {
    struct ckpt_catalog *cat;
    const struct ckpt_adapter_facts *f;
    struct ckpt_arena arena; /* of the names of modules */
    struct ckpt_map modules; /* that have a pair */
    size_t npair;
    bool targeted; /* the config targets one of them, or does not say it in a way that is known */
    struct ckpt_err *err;
};

static void check_release(struct check *c)
{
    ckpt_map_release(&c->modules);
    ckpt_arena_release(&c->arena);
}

static bool is_lora(const struct ckpt_adapter_facts *f)
{
    return strcmp(ckpt_json_str_or(f->config, "peft_type", ""), "LORA") == 0;
}

static int fail_missing(const struct check *c, const char *what)
{
    return ckpt_fail(c->err, CKPT_MISSING, "%s: the adapter would change nothing", what);
}

/* ---- tensors by themselves ---- */

static int check_empty(const struct check *c)
{
    for (size_t i = 0; i < c->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &c->cat->tensors.ptr[i];
        for (uint32_t d = 0; d < t->rank; d++)
            if (t->dim[d] == 0)
                return ckpt_fail(c->err, CKPT_CONFLICT,
                                 "the adapter's '%s' is empty (%s): the save did not collect its "
                                 "values",
                                 t->name, ckpt_shape_text(t->dim, t->rank).text);
    }
    return 0;
}

/* ---- which modules the config targets ---- */

/* Is this text the module's name, or its end behind a dot? */
static bool ends_with_part(const char *module, const char *text)
{
    const size_t len = strlen(module), n = strlen(text);

    return ckpt_has_suffix(module, text) && (len == n || module[len - n - 1] == '.');
}

static bool lists(const json_t *list, const char *module)
{
    const json_t *text;
    size_t i;

    json_array_foreach((json_t *)list, i, text)
        if (json_is_string(text) && ends_with_part(module, json_string_value(text)))
            return true;
    return false;
}

/* The targets, if they are names of modules: not a pattern, nor parameters. NULL: it cannot be
 * said. */
static const json_t *named_targets(const json_t *config)
{
    const json_t *list = json_object_get(config, "target_modules"), *text;
    size_t i;

    if (!json_is_array(list) || json_array_size(list) == 0 ||
        json_array_size(json_object_get(config, "target_parameters")))
        return NULL;
    json_array_foreach((json_t *)list, i, text)
        if (!json_is_string(text) || strpbrk(json_string_value(text), "*?[(|\\"))
            return NULL;
    return list;
}

/* ---- pairs ---- */

static const struct ckpt_tensor *find(const struct check *c, const char *module, const char *leaf)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf(ROOT "%s%s", module, leaf);
    return name ? ckpt_catalog_find(c->cat, name) : NULL;
}

/* One matrix of a pair is not there. */
static int lacks_half(const struct check *c, const struct ckpt_tensor *t, const char *module,
                      const char *leaf)
{
    if (!c->f->allow_partial)
        return ckpt_fail(c->err, CKPT_MISSING, "the adapter has '%s', but no '%s%s'", t->name,
                         module, leaf);
    ckpt_catalog_warn(c->cat, "the adapter has '%s', but no '%s%s'", t->name, module, leaf);
    return 0;
}

/* Check the number of rows of A, or of columns of B, where it is the rank. Matrices of stacked
 * parameters have a multiple of it, and a pattern may name one of the parameters. */
static int check_rank(const struct check *c, const char *module, const struct ckpt_tensor *t,
                      uint32_t dim)
{
    const bool stacked = json_array_size(json_object_get(c->f->config, "target_parameters")) > 0;
    uint64_t r;

    if (t->rank < 2)
        return ckpt_fail(c->err, CKPT_CONFLICT, "the adapter's '%s' is %s, which is not a matrix",
                         t->name, ckpt_shape_text(t->dim, t->rank).text);
    if (ckpt_lora_is_variant(c->f->config) || (dim > 0 && t->rank > 2))
        return 0;
    if (ckpt_lora_rank(c->f->config, module, &r, c->err) < 0)
        return -1;
    if (r == 0 || t->dim[dim] == r || (stacked && t->dim[dim] % r == 0))
        return 0;
    return ckpt_fail(c->err, CKPT_CONFLICT,
                     "the adapter's '%s' is %s: LoRA of '%s' has rank %" PRIu64
                     ", adapter_config.json says %" PRIu64,
                     t->name, ckpt_shape_text(t->dim, t->rank).text, module, t->dim[dim], r);
}

/* Compare a pair with the weight of the base that it changes, if the base has it as it is used. */
static int check_base(const struct check *c, const char *module, const struct ckpt_tensor *a,
                      const struct ckpt_tensor *b, bool embedding)
{
    ckpt_cleanup(ckpt_freep) char *name = ckpt_asprintf("%s.weight", module);
    const struct ckpt_base *base = c->f->base;
    const struct ckpt_tensor *w =
        name && base && base->cat ? ckpt_catalog_find(base->cat, name) : NULL;

    if (!name)
        return ckpt_nomem(c->err);
    if (!w || w->rank != 2 || a->rank != 2 || b->rank != 2 ||
        !ckpt_dtype_is_castable((enum ckpt_dtype)w->dtype) || ckpt_lora_is_variant(c->f->config) ||
        ckpt_json_bool(c->f->config, "fan_in_fan_out", false))
        return 0;
    if (a->dim[1] == w->dim[embedding ? 0 : 1] && b->dim[0] == w->dim[embedding ? 1 : 0])
        return 0;
    return ckpt_fail(c->err, CKPT_CONFLICT,
                     "LoRA of '%s' is %s and %s, but the base's '%s' is %s: is base '%s' another "
                     "model's?",
                     module, ckpt_shape_text(a->dim, a->rank).text,
                     ckpt_shape_text(b->dim, b->rank).text, name,
                     ckpt_shape_text(w->dim, w->rank).text, ckpt_dir_path(base->dir));
}

static int check_pair(struct check *c, const struct ckpt_tensor *t, const struct kind *kind,
                      bool is_a)
{
    const char *leaf = is_a ? kind->a : kind->b, *below = t->name + strlen(ROOT);
    const char *module = ckpt_arena_strndup(&c->arena, below, strlen(below) - strlen(leaf));
    const struct ckpt_tensor *other = module ? find(c, module, is_a ? kind->b : kind->a) : NULL;
    const json_t *targets = named_targets(c->f->config);

    if (!module)
        return ckpt_nomem(c->err);
    if (!other)
        return lacks_half(c, t, module, is_a ? kind->b : kind->a);
    if (!is_a)
        return 0;
    c->npair++;
    c->targeted |= !targets || lists(targets, module);
    if (ckpt_map_add(&c->modules, module, 0) == CKPT_NONE)
        return ckpt_nomem(c->err);
    return check_rank(c, module, t, 0) < 0 || check_rank(c, module, other, 1) < 0
               ? -1
               : check_base(c, module, t, other, kind != &kinds[0]);
}

static int check_one(struct check *c, const struct ckpt_tensor *t)
{
    if (!ckpt_has_prefix(t->name, ROOT))
        return 0;
    for (size_t k = 0; k < NKIND; k++) {
        const bool is_a = ckpt_has_suffix(t->name, kinds[k].a);
        if ((is_a || ckpt_has_suffix(t->name, kinds[k].b)) && strlen(t->name) > strlen(ROOT))
            return check_pair(c, t, &kinds[k], is_a);
    }
    return 0;
}

static int check_pairs(struct check *c)
{
    const json_t *targets = named_targets(c->f->config);

    for (size_t i = 0; i < c->cat->tensors.len; i++)
        if (check_one(c, &c->cat->tensors.ptr[i]) < 0)
            return -1;
    if (c->npair == 0 || c->targeted)
        return 0;
    return ckpt_fail(c->err, CKPT_CONFLICT,
                     "adapter_config.json targets '%s'%s, but none of the adapter's %zu pairs of "
                     "matrices is of such a module ('%s' first)",
                     json_string_value(json_array_get(targets, 0)),
                     json_array_size(targets) > 1 ? " and others" : "", c->npair,
                     c->cat->tensors.ptr[0].name);
}

/* ---- modules of the base without a pair ---- */

/* Does the config restrict the targets by more than their names? */
static bool is_restricted(const json_t *config)
{
    static const char *const keys[] = {"exclude_modules", "layers_to_transform", "layers_pattern"};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *v = json_object_get(config, keys[i]);
        if (v && !json_is_null(v))
            return true;
    }
    return false;
}

/* The name in memory of the i-th of the base's modules with a weight that LoRA can change: *ret is
 * new, or NULL. Experts are modules on the hub only. */
static int module_at(const struct check *c, const struct ckpt_renames *renames, const char *name,
                     char **ret)
{
    static const char leaf[] = ".weight";
    const struct ckpt_tensor *t = c->f->base->cat ? ckpt_catalog_find(c->f->base->cat, name) : NULL;

    *ret = NULL;
    if (!ckpt_has_suffix(name, leaf) || strstr(name, ".experts.") || (t && t->rank != 2))
        return 0;
    if (renames ? ckpt_renames_apply(renames, name, ret, c->err) < 0 : !(*ret = strdup(name)))
        return renames ? -1 : ckpt_nomem(c->err);
    if (ckpt_has_suffix(*ret, leaf))
        (*ret)[strlen(*ret) - strlen(leaf)] = '\0';
    return 0;
}

/* Count the modules that are targets and have no pair. Nothing is said if the base's names are not
 * the adapter's. */
static int compare_base(struct check *c, const struct ckpt_renames *renames)
{
    const json_t *targets = named_targets(c->f->config);
    const struct ckpt_base *base = c->f->base;
    ckpt_cleanup(ckpt_freep) char *first = NULL;
    size_t found = 0, without = 0;
    const char *name;

    for (size_t i = 0; (name = ckpt_base_name_at(base->cat, base->weight_map, i)); i++) {
        ckpt_cleanup(ckpt_freep) char *module = NULL;
        if (module_at(c, renames, name, &module) < 0)
            return -1;
        if (module && ckpt_map_find(&c->modules, module) != CKPT_NONE)
            found++;
        else if (module && lists(targets, module) &&
                 !lists(json_object_get(c->f->config, "modules_to_save"), module) && without++ == 0)
            first = ckpt_steal(&module);
    }
    if (without && found == c->modules.len)
        ckpt_catalog_warn(c->cat,
                          "the adapter has no matrices for %zu modules of base '%s' that "
                          "adapter_config.json targets ('%s' first)",
                          without, ckpt_dir_path(base->dir), first);
    return 0;
}

static int warn_unpaired(struct check *c)
{
    struct ckpt_renames *renames = NULL;

    if (!c->f->base || c->npair == 0 || !named_targets(c->f->config) || is_restricted(c->f->config))
        return 0;
    if (ckpt_renames_of_type(c->f->type, &renames, c->err) < 0)
        return -1;
    const int result = compare_base(c, renames);
    ckpt_renames_free(renames);
    return result;
}

/* ---- all of it ---- */

static bool has_lora(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (strstr(cat->tensors.ptr[i].name, "lora_") ||
            strstr(cat->tensors.ptr[i].name, "trainable_tokens"))
            return true;
    return false;
}

int ckpt_adapter_check(struct ckpt_catalog *cat, const struct ckpt_adapter_facts *f,
                       struct ckpt_err *err)
{
    ckpt_cleanup(check_release) struct check c = {.cat = cat, .f = f, .err = err};

    if (cat->tensors.len == 0)
        return fail_missing(&c, "the adapter's file has no tensors");
    if (check_empty(&c) < 0)
        return -1;
    if (!is_lora(f))
        return 0;
    if (!has_lora(cat))
        return fail_missing(&c, "adapter_config.json says LORA, but no tensor is one of LoRA's");
    return check_pairs(&c) < 0 ? -1 : warn_unpaired(&c);
}
