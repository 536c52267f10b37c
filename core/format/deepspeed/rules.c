/* SPDX-License-Identifier: Apache-2.0 */
/* Reading universal_checkpoint_info. */
#include "format/deepspeed/load.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/str.h"

#define INFO "universal_checkpoint_info"

static const struct {
    const char *key;
    enum ckpt_ds_join join;
} lists[] = {
    {"tp_replicated_parameter_patterns", CKPT_DS_REPLICATED},
    {"parameter_to_average_patterns", CKPT_DS_AVERAGE},
    {"parameter_with_row_parallelism_patterns", CKPT_DS_CAT_1},
    {"vocabulary_parameter_patterns", CKPT_DS_VOCABULARY},
    {"parameter_with_2_sub_params_cat_dim_0", CKPT_DS_HALVES},
};

void ckpt_ds_rules_release(struct ckpt_ds_rules *r)
{
    for (size_t i = 0; i < r->rule.len; i++)
        ckpt_regex_free(r->rule.ptr[i].regex);
    ckpt_vec_release(&r->rule);
}

/* Add a rule. The pattern must match from the beginning of a name, as with re.match. */
static int add_rule(struct ckpt_ds_rules *r, const struct ckpt_torch_file *f, ckpt_pv pattern,
                    enum ckpt_ds_join join, ckpt_pv map, struct ckpt_err *err)
{
    const char *text = ckpt_pv_str(&f->p, pattern);
    ckpt_cleanup(ckpt_freep) char *anchored = ckpt_asprintf("\\A(?:%s)", text ? text : "");
    struct ckpt_ds_rule rule = {.join = join, .map = map};
    struct ckpt_err e = {0};

    if (!anchored)
        return ckpt_nomem(err);
    if (!text || ckpt_regex_new(anchored, "", &rule.regex, &e) < 0)
        return ckpt_fail(err, CKPT_FORMAT, INFO ": a pattern is not a regular expression: %s",
                         text ? e.text : "it is not a string");
    if (ckpt_vec_push(&r->rule, rule) < 0) {
        ckpt_regex_free(rule.regex);
        return ckpt_nomem(err);
    }
    return 0;
}

static int add_list(struct ckpt_ds_rules *r, const struct ckpt_torch_file *f, ckpt_pv list,
                    enum ckpt_ds_join join, struct ckpt_err *err)
{
    for (size_t i = 0; i < ckpt_pv_len(&f->p, list); i++)
        if (add_rule(r, f, ckpt_pv_at(&f->p, list, i), join, 0, err) < 0)
            return -1;
    return 0;
}

static int read_affine(struct ckpt_ds_rules *r, const struct ckpt_torch_file *f, ckpt_pv info,
                       struct ckpt_err *err)
{
    const struct ckpt_pickle *p = &f->p;
    const ckpt_pv map = ckpt_pv_get(p, info, "affine_map"), params = ckpt_pv_get(p, map, "params");
    int64_t version = 0;

    if (ckpt_pv_kind(map) != CKPT_PV_DICT)
        return 0;
    if (!ckpt_pv_int(ckpt_pv_get(p, map, "version"), &version) || version != 1)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         INFO ": affine_map has version %" PRId64 ", only 1 is known", version);
    for (size_t i = 0; i < ckpt_pv_npair(p, params); i++)
        if (add_rule(r, f, ckpt_pv_key(p, params, i), CKPT_DS_AFFINE, ckpt_pv_value(p, params, i),
                     err) < 0)
            return -1;
    return 0;
}

static int read_sub_params(struct ckpt_ds_rules *r, const struct ckpt_torch_file *f, ckpt_pv info,
                           struct ckpt_err *err)
{
    const ckpt_pv list = ckpt_pv_get(&f->p, info, "parameter_with_sub_params");

    for (size_t i = 0; i < ckpt_pv_len(&f->p, list); i++) {
        const ckpt_pv patterns = ckpt_pv_get(&f->p, ckpt_pv_at(&f->p, list, i), "patterns");
        if (add_list(r, f, patterns, CKPT_DS_SUB_PARAMS, err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_ds_rules_read(const struct ckpt_torch_file *f, struct ckpt_ds_rules *ret,
                       struct ckpt_err *err)
{
    const ckpt_pv info = ckpt_pv_get(&f->p, f->p.root, INFO);

    if (ckpt_pv_kind(info) != CKPT_PV_DICT)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "it has no " INFO ": nothing in the checkpoint says how the parts of its "
                         "tensor-parallel ranks join");
    if (read_affine(ret, f, info, err) < 0)
        return -1;
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        if (add_list(ret, f, ckpt_pv_get(&f->p, info, lists[i].key), lists[i].join, err) < 0)
            return -1;
    ret->has_vocabulary = ckpt_ds_file_u64(f, info, "original_vocab_size", &ret->vocabulary);
    return read_sub_params(ret, f, info, err);
}

static int matches(const struct ckpt_ds_rule *rule, const char *name, bool *ret,
                   struct ckpt_err *err)
{
    char *rest = NULL;

    if (ckpt_regex_sub(rule->regex, name, &rest, err) < 0)
        return ckpt_err_in(err, INFO ": '%s'", name);
    *ret = rest != NULL;
    free(rest);
    return 0;
}

int ckpt_ds_rules_find(const struct ckpt_ds_rules *r, const char *name, struct ckpt_ds_rule *ret,
                       struct ckpt_err *err)
{
    bool match = false;

    *ret = (struct ckpt_ds_rule){.join = CKPT_DS_CAT_0};
    for (size_t i = 0; i < r->rule.len; i++) {
        if (ret->regex && ret->join == CKPT_DS_AFFINE && r->rule.ptr[i].join != CKPT_DS_AFFINE)
            return 0; /* an affine map has priority over the lists */
        if (matches(&r->rule.ptr[i], name, &match, err) < 0)
            return -1;
        if (match && ret->regex && ret->join != r->rule.ptr[i].join)
            return ckpt_fail(err, CKPT_CONFLICT, INFO ": two kinds of patterns match '%s'", name);
        if (match && ret->regex && ret->join == CKPT_DS_AFFINE)
            return ckpt_fail(err, CKPT_CONFLICT, INFO ": two affine maps match '%s'", name);
        if (match)
            *ret = r->rule.ptr[i];
    }
    return 0;
}

int ckpt_ds_rules_match(const struct ckpt_torch_file *f, const char *key, const char *name,
                        bool *ret, struct ckpt_err *err)
{
    const ckpt_pv list = ckpt_pv_get(&f->p, ckpt_pv_get(&f->p, f->p.root, INFO), key);
    ckpt_cleanup(ckpt_ds_rules_release) struct ckpt_ds_rules r = {0};

    *ret = false;
    if (add_list(&r, f, list, CKPT_DS_REPLICATED, err) < 0)
        return -1;
    for (size_t i = 0; i < r.rule.len && !*ret; i++)
        if (matches(&r.rule.ptr[i], name, ret, err) < 0)
            return -1;
    return 0;
}
