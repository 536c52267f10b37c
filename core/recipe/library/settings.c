/* SPDX-License-Identifier: Apache-2.0 */
/* Framework config -> HF config -> dims. */
#include "recipe/library/settings.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

const char *ckpt_settings_type(const struct ckpt_recipe_options *opt)
{
    const char *type = ckpt_json_str(opt->overrides, "_model_type");

    return type || !opt->base_config ? type : ckpt_json_str(opt->base_config, "model_type");
}

/* ---- reading keys ---- */

static json_t *new_ref(const json_t *j) { return j ? json_incref((json_t *)j) : NULL; }

/* Look up `_x`, option.x and about.x; false: the key is of another kind. */
static bool own_key(const struct ckpt_settings *s, const char *key, json_t **ret)
{
    if (strncmp(key, "about.", 6) == 0) {
        *ret = new_ref(ckpt_json_at(s->src->about, key + 6));
        return true;
    }
    if (strncmp(key, "option.", 7) == 0) {
        *ret = json_deep_copy(json_object_get(s->overrides, key + 7));
        return true;
    }
    if (strncmp(key, "source.", 7) == 0) {
        *ret = new_ref(s->source ? ckpt_json_at(s->source, key + 7) : NULL);
        return true;
    }
    if (key[0] != '_')
        return false;
    if (s->type && strcmp(key, "_model_type") == 0) {
        *ret = json_string(s->type);
        return true;
    }
    const json_t *v = ckpt_json_at(s->overrides, key);
    *ret = v ? json_deep_copy(v) : new_ref(json_object_get(s->own, key));
    /* Frameworks have keys with a leading underscore too (nanotron's _use_qkv_packed). */
    return *ret != NULL;
}

json_t *ckpt_settings_before(void *ctx, const char *key)
{
    const struct ckpt_settings *s = ctx;
    json_t *v;

    return own_key(s, key, &v) ? v : new_ref(s->framework ? ckpt_json_at(s->framework, key) : NULL);
}

/* Look up a key for the dims: keys of the HF config, and earlier dims. */
static json_t *hf_key(const struct ckpt_settings *s, const char *key)
{
    uint64_t dim;
    json_t *v = ckpt_json_at(s->hf, key);

    if (v && !json_is_null(v))
        return new_ref(v);
    return ckpt_settings_dim(s, key, &dim) && dim <= INT64_MAX ? json_integer((json_int_t)dim)
                                                               : NULL;
}

json_t *ckpt_settings_after(void *ctx, const char *key)
{
    const struct ckpt_settings *s = ctx;
    json_t *v;

    if (own_key(s, key, &v) || (v = hf_key(s, key)))
        return v;
    return new_ref(s->framework ? ckpt_json_at(s->framework, key) : NULL);
}

static json_t *dim_key(void *ctx, const char *key)
{
    const struct ckpt_settings *s = ctx;
    uint64_t dim;

    if (ckpt_settings_dim(s, key, &dim) && dim <= INT64_MAX)
        return json_integer((json_int_t)dim);
    return hf_key(s, key);
}

/* ---- the HF config ---- */

static int fill_from_recipe(struct ckpt_settings *s, const struct ckpt_recipe *r)
{
    const struct ckpt_expr_env env = {ckpt_settings_before, s, s->src};

    for (size_t i = 0; i < r->config.len; i++) {
        const struct ckpt_config_key *k = &r->config.ptr[i];
        json_t *v = ckpt_expr_eval(k->origin, &env);
        json_t *to = k->key[0] == '_' ? s->own : s->hf;
        if (!v)
            continue;
        if (to == s->hf && !ckpt_family_has_key(r->family, k->key))
            json_decref(v); /* a key that the family does not have */
        else if (json_object_set_new(to, k->key, v) < 0)
            return -1;
    }
    return 0;
}

/* Make the framework's config of the model's. If the checkpoint that is read is the same
 * framework's, its config is kept, and only keys that it has are made anew. */
static int make_framework(struct ckpt_settings *s, const struct ckpt_recipe *r,
                          const struct ckpt_recipe_output *output)
{
    const struct ckpt_expr_env env = {ckpt_settings_after, s, s->src};

    if (json_object_set_new(s->own, "_view", json_string(output->view)) < 0 ||
        json_object_set_new(s->own, "_pad_to", json_integer((json_int_t)output->pad_to)) < 0 ||
        json_object_set_new(s->own, "_tp", json_integer((json_int_t)output->tp)) < 0 ||
        json_object_set_new(s->own, "_fuse_qkv", json_boolean(output->fuse_qkv)) < 0 ||
        !(s->made = output->config ? json_deep_copy(output->config) : json_object()))
        return -1;
    s->source = output->config;
    for (size_t i = 0; i < r->makes.len; i++) {
        const struct ckpt_config_key *k = &r->makes.ptr[i];
        json_t *v = NULL;
        if (!output->config || json_object_get(s->made, k->key))
            v = ckpt_expr_eval(k->origin, &env);
        if (v && json_object_set_new(s->made, k->key, v) < 0)
            return -1;
    }
    s->framework = s->made;
    return 0;
}

/* Add the base's config or the user's options, which override what was found; keys that depend on
 * the view are left out. Values are copied, because both belong to all views of a run, which
 * several threads may open at the same time, and jansson's reference counts are not made for that.
 */
static int overlay(struct ckpt_settings *s, const json_t *from, bool options)
{
    static const char *const not_ours[] = {"torch_dtype", "dtype", "transformers_version",
                                           "quantization_config"};
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)from, key, v) {
        bool skip = options && key[0] == '_';
        if (!options && strcmp(key, "transformers_version") == 0 &&
            json_object_set_new(s->own, "_transformers_version", json_deep_copy(v)) < 0)
            return -1;
        for (size_t i = 0; i < sizeof not_ours / sizeof *not_ours && !options; i++)
            skip |= strcmp(key, not_ours[i]) == 0;
        if (!skip && json_object_set_new(s->hf, key, json_deep_copy(v)) < 0)
            return -1;
    }
    return 0;
}

/* Without any config a base is the way out; a config that lacks some keys may be completed. */
static int fail_needs(const struct ckpt_settings *s, const struct ckpt_recipe *r,
                      const char *places, const char *keys, const char *options,
                      struct ckpt_err *err)
{
    const char *type = s->family->types.n ? s->family->types.text[0] : s->family->name;
    const size_t framework = strcspn(r->name, "/");

    if (!s->src->config)
        return ckpt_fail(err, CKPT_MISSING,
                         "the checkpoint holds no model config (%.*s saves none): name the model "
                         "with base=DIR or base=ORG/NAME (or give what a %s model needs as "
                         "options KEY=VALUE: %s)",
                         (int)framework, r->name, type, keys);
    return ckpt_fail(err, CKPT_MISSING,
                     "the checkpoint's config%s does not say %s, which a %s model needs; give it "
                     "as an option (%s), or name the model with base=DIR or base=ORG/NAME",
                     places, keys, type, options);
}

static int check_needs(const struct ckpt_settings *s, const struct ckpt_recipe *r,
                       struct ckpt_catalog *warnings, struct ckpt_err *err)
{
    const json_t *looked_for = json_object_get(s->src->about, "config_looked_for"), *place;
    ckpt_cleanup(ckpt_str_release) struct ckpt_str places = {0}, keys = {0}, options = {0};
    size_t n;

    json_array_foreach(looked_for, n, place) /* " (model_config.yaml)" */
        ckpt_str_printf(&places, "%s%s", n ? ", " : " (", json_string_value(place));
    if (n)
        ckpt_str_putc(&places, ')');
    for (size_t i = 0; i < s->family->needs.n; i++) {
        const char *key = s->family->needs.text[i];
        const json_t *v = json_object_get(s->hf, key);
        if (v && !json_is_null(v))
            continue;
        if (ckpt_texts_have(&r->may_lack, key, strlen(key))) {
            ckpt_catalog_warn(warnings,
                              "the checkpoint's config%s does not say '%s': config.json leaves it "
                              "to transformers' default (option %s=...)",
                              ckpt_str_get(&places), key, key);
            continue;
        }
        ckpt_str_printf(&keys, "%s'%s'", keys.len ? ", " : "", key);
        ckpt_str_printf(&options, "%s%s=...", options.len ? ", " : "", key);
    }
    return keys.len ? fail_needs(s, r, ckpt_str_get(&places), ckpt_str_get(&keys),
                                 ckpt_str_get(&options), err)
                    : 0;
}

/* ---- dims ---- */

bool ckpt_settings_dim(const struct ckpt_settings *s, const char *name, uint64_t *ret)
{
    for (size_t i = 0; i < s->ndim; i++)
        if (strcmp(s->family->dim[i].name, name) == 0) {
            *ret = s->dim[i];
            return s->known[i];
        }
    return false;
}

/* Compute the dims. One that is not an integer stays unknown, which matters only if a tensor has
 * it. */
static void compute_dims(struct ckpt_settings *s)
{
    const struct ckpt_expr_env env = {dim_key, s, s->src};

    for (size_t i = 0; i < s->family->ndim; i++) {
        const struct ckpt_dim *d = &s->family->dim[i];
        ckpt_cleanup(ckpt_json_decrefp) json_t *v = NULL;
        for (size_t e = 0; e < d->nexpr && !v; e++)
            v = ckpt_expr_eval(d->expr[e], &env);
        s->known[i] = json_is_integer(v) && json_integer_value(v) >= 0;
        s->dim[i] = s->known[i] ? (uint64_t)json_integer_value(v) : 0;
        s->ndim = i + 1;
    }
}

void ckpt_settings_sizes(const struct ckpt_settings *s, const struct ckpt_scope *scope,
                         struct ckpt_sizes *out)
{
    out->scope = scope;
    out->known = 0;
    for (uint32_t v = 0; v < scope->nvar; v++) {
        out->var[v] = 0;
        if (scope->var[v].dim && ckpt_settings_dim(s, scope->var[v].name, &out->var[v]))
            out->known |= 1u << v;
    }
}

const char *ckpt_settings_hint(const struct ckpt_settings *s, const char *dim, char *buf,
                               size_t cap)
{
    buf[0] = '\0';
    for (size_t i = 0; i < s->family->ndim; i++)
        if (strcmp(s->family->dim[i].name, dim) == 0 && s->family->dim[i].option)
            (void)snprintf(buf, cap, " (option %s=...)", s->family->dim[i].option);
    return buf;
}

int ckpt_settings_of_config(struct ckpt_settings *s, const struct ckpt_family *f,
                            const json_t *config, struct ckpt_err *err)
{
    const char *key;
    json_t *value;

    s->family = f;
    if (!(s->hf = json_deep_copy(f->config)))
        return ckpt_nomem(err);
    json_object_foreach((json_t *)config, key, value)
        if (!json_is_null(value) && json_object_set_new(s->hf, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    compute_dims(s);
    return 0;
}

/* ---- remarks ---- */

/* Append a text, in which {key} is replaced by the key's value. */
static void say(struct ckpt_settings *s, const char *why, struct ckpt_str *out)
{
    for (const char *p = why; *p;) {
        const char *close = *p == '{' ? strchr(p, '}') : NULL;
        if (!close) {
            ckpt_str_putc(out, *p++);
            continue;
        }
        ckpt_cleanup(ckpt_freep) char *key = strndup(p + 1, (size_t)(close - p - 1)), *text = NULL;
        ckpt_cleanup(ckpt_json_decrefp) json_t *v = key ? ckpt_settings_after(s, key) : NULL;
        if (v && (text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT)))
            ckpt_str_puts(out, text);
        else
            ckpt_str_puts(out, "?");
        p = close + 1;
    }
}

static int remarks(struct ckpt_settings *s, const struct ckpt_recipe *r,
                   struct ckpt_catalog *warnings, struct ckpt_err *err)
{
    const struct ckpt_expr_env env = {ckpt_settings_after, s, s->src};
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};

    for (size_t i = 0; i < r->refuse.len; i++)
        if (ckpt_expr_truth(r->refuse.ptr[i].when, &env) == CKPT_TRUE) {
            say(s, r->refuse.ptr[i].why, &text);
            return ckpt_fail(err, CKPT_UNSUPPORTED, "%s: %s", r->name, ckpt_str_get(&text));
        }
    for (size_t i = 0; i < r->warn.len; i++)
        if (ckpt_expr_truth(r->warn.ptr[i].when, &env) == CKPT_TRUE) {
            ckpt_str_clear(&text);
            say(s, r->warn.ptr[i].why, &text);
            ckpt_catalog_warn(warnings, "%s", ckpt_str_get(&text));
        }
    return 0;
}

/* ---- life ---- */

int ckpt_settings_draft(struct ckpt_settings *s, const struct ckpt_recipe *r,
                        const struct ckpt_catalog *src, const struct ckpt_recipe_options *opt,
                        struct ckpt_err *err)
{
    s->src = src;
    s->framework = src->config;
    s->family = r->family;
    s->overrides = opt->overrides;
    s->type = ckpt_settings_type(opt);
    s->own = json_object();
    s->hf = r->family ? json_deep_copy(r->family->config) : json_object();
    if (!s->own || !s->hf)
        return ckpt_nomem(err);
    if (!r->family)
        return 0;
    if ((!r->backwards && fill_from_recipe(s, r) < 0) || overlay(s, opt->base_config, false) < 0 ||
        overlay(s, opt->overrides, true) < 0)
        return ckpt_nomem(err);
    compute_dims(s);
    if (opt->output && (make_framework(s, r, opt->output) < 0 || fill_from_recipe(s, r) < 0))
        return ckpt_nomem(err);
    return 0;
}

int ckpt_settings_init(struct ckpt_settings *s, const struct ckpt_recipe *r,
                       const struct ckpt_catalog *src, const struct ckpt_recipe_options *opt,
                       struct ckpt_catalog *warnings, struct ckpt_err *err)
{
    if (ckpt_settings_draft(s, r, src, opt, err) < 0 || remarks(s, r, warnings, err) < 0)
        return -1;
    if (!r->family)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "%s: no Hugging Face model corresponds to this checkpoint", r->name);
    return check_needs(s, r, warnings, err);
}

void ckpt_settings_release(struct ckpt_settings *s)
{
    json_decref(s->hf);
    json_decref(s->own);
    json_decref(s->made);
    s->hf = s->own = s->made = NULL;
}
