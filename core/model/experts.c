/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the experts of a layer by the layouts of their type. */
#include "model/experts.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

#define NUMBER "{e}"

enum { MOST_EXPERTS = 1 << 16 };

void ckpt_experts_release(struct ckpt_experts *x) { ckpt_vec_release(&x->tensor); }

size_t ckpt_experts_tensor(const struct ckpt_catalog *cat, const json_t *base_names,
                           const char *name)
{
    const struct ckpt_tensor *t = ckpt_catalog_find(cat, ckpt_json_str_or(base_names, name, name));

    return t ? (size_t)(t - cat->tensors.ptr) : SIZE_MAX;
}

struct search {
    const struct ckpt_catalog *cat;
    const json_t *base_names;
    const char *module;
    const struct ckpt_expert_layout *layout;
};

/* Find part `part` of expert e; SIZE_MAX: there is none. */
static size_t find_part(const struct search *s, size_t part, uint64_t e)
{
    const size_t stem = strlen(s->module) - strlen(s->layout->module);
    const char *text = s->layout->part[part], *number = strstr(text, NUMBER);
    ckpt_cleanup(ckpt_freep) char *name =
        number ? ckpt_asprintf("%.*s%.*s%" PRIu64 "%s", (int)stem, s->module, (int)(number - text),
                               text, e, number + strlen(NUMBER))
               : ckpt_asprintf("%.*s%s", (int)stem, s->module, text);

    return name ? ckpt_experts_tensor(s->cat, s->base_names, name) : SIZE_MAX;
}

static int take_stack(const struct search *s, size_t at, struct ckpt_experts *ret,
                      struct ckpt_err *err)
{
    const struct ckpt_tensor *t = &s->cat->tensors.ptr[at];

    if (t->rank != 3 || t->numel == 0)
        return ckpt_fail(err, CKPT_CONFLICT, "the base's '%s' is not a stack of experts", t->name);
    ret->count = t->dim[0];
    ret->rows = t->dim[1];
    ret->cols = t->dim[2];
    return ckpt_vec_push(&ret->tensor, (uint32_t)at) < 0 ? ckpt_nomem(err) : 0;
}

/* Add expert e, and check that it has the same shapes as the first expert. */
static int take_expert(const struct search *s, uint64_t e, struct ckpt_experts *ret,
                       struct ckpt_err *err)
{
    for (size_t part = 0; part < s->layout->npart; part++) {
        const size_t at = find_part(s, part, e);
        if (at == SIZE_MAX)
            return ckpt_fail(err, CKPT_MISSING,
                             "the base lacks a part of expert %" PRIu64 " of '%s'", e, s->module);
        const struct ckpt_tensor *t = &s->cat->tensors.ptr[at],
                                 *first = e ? &s->cat->tensors.ptr[ret->tensor.ptr[part]] : t;
        if (t->rank != 2 || t->numel == 0 || (e == 0 && part && t->dim[1] != ret->cols) ||
            memcmp(t->dim, first->dim, 2 * sizeof *t->dim) != 0)
            return ckpt_fail(err, CKPT_CONFLICT, "the base's '%s' has another shape than '%s'",
                             t->name,
                             s->cat->tensors.ptr[ret->tensor.len ? ret->tensor.ptr[0] : at].name);
        if (e == 0) {
            ret->rows += t->dim[0];
            ret->cols = t->dim[1];
        }
        if (ckpt_vec_push(&ret->tensor, (uint32_t)at) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

static int take(const struct search *s, struct ckpt_experts *ret, struct ckpt_err *err)
{
    if (!strstr(s->layout->part[0], NUMBER))
        return take_stack(s, find_part(s, 0, 0), ret, err);
    while (ret->count < MOST_EXPERTS && find_part(s, 0, ret->count) != SIZE_MAX)
        if (take_expert(s, ret->count++, ret, err) < 0)
            return -1;
    return 0;
}

int ckpt_experts_find(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      const json_t *base_names, const char *module, const char *parameter,
                      struct ckpt_experts *ret, struct ckpt_err *err)
{
    struct search s = {cat, base_names, module, NULL};

    for (size_t i = 0; i < type->experts.n; i++) {
        s.layout = &type->experts.layout[i];
        if (strcmp(s.layout->parameter, parameter) == 0 &&
            ckpt_has_suffix(module, s.layout->module) && find_part(&s, 0, 0) != SIZE_MAX)
            return take(&s, ret, err);
    }
    return ckpt_fail(err, CKPT_MISSING, "the base has no '%s.%s' for the adapter", module,
                     parameter);
}

bool ckpt_experts_is_fused(const struct ckpt_type *type, const char *name)
{
    const char *dot = strrchr(name, '.');

    for (size_t i = 0; dot && i < type->experts.n; i++) {
        const struct ckpt_expert_layout *l = &type->experts.layout[i];
        const size_t len = strlen(l->module), at = (size_t)(dot - name);
        if (strcmp(dot + 1, l->parameter) == 0 && len <= at &&
            memcmp(dot - len, l->module, len) == 0)
            return true;
    }
    return false;
}
