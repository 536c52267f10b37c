/* SPDX-License-Identifier: Apache-2.0 */
/* Matching the names of an optimizer's tensors with those of the weights. */
#include "format/states.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"
#include "base/vec.h"

/* ---- names ---- */

static bool is_known_kind(const char *kind)
{
    static const char *const known[] = {"exp_avg", "exp_avg_sq",      "max_exp_avg_sq",
                                        "step",    "momentum_buffer", "master"};

    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(kind, known[i]) == 0)
            return true;
    return false;
}

bool ckpt_state_parse_torch(const char *name, struct ckpt_state_name *ret)
{
    for (const char *at = name, *dot; (dot = strchr(at, '.')); at = dot + 1) {
        const char *rest = dot + 1, *kind = strrchr(rest, '.');
        if (!ckpt_has_prefix(at, "optim"))
            continue;
        const bool nested = ckpt_take_text(&rest, "state.");
        if (!kind || kind <= rest || (!nested && !is_known_kind(kind + 1)))
            return false;
        *ret = (struct ckpt_state_name){.root = name,
                                        .root_len = (size_t)(at - name),
                                        .parameter = rest,
                                        .parameter_len = (size_t)(kind - rest),
                                        .kind = kind + 1,
                                        .kind_len = strlen(kind + 1)};
        return true;
    }
    return false;
}

/* ---- weights ---- */

/* An optimizer's parameters, whose tensors have the same root. */
struct matching {
    struct ckpt_catalog *cat;
    const struct ckpt_state_name *name; /* of each tensor; a weight's has no kind */
    const struct ckpt_state_name *of;   /* the first of this optimizer */
    struct ckpt_str buf;
};

static bool is_of(const struct matching *m, const struct ckpt_state_name *n)
{
    return n->kind && n->root_len == m->of->root_len &&
           memcmp(n->root, m->of->root, n->root_len) == 0;
}

/* A wrapper's part of a parameter's name, which the weights' names may lack. */
static const char *unwrapped(const char *parameter, size_t *len)
{
    static const char wrapper[] = "module.";
    const size_t n = sizeof wrapper - 1;

    while (*len > n && strncmp(parameter, wrapper, n) == 0) {
        parameter += n;
        *len -= n;
    }
    return parameter;
}

/* The weight of a parameter whose name begins so; or NULL. */
static const char *find_weight(struct matching *m, const char *begin, size_t begin_len,
                               const struct ckpt_state_name *n)
{
    size_t len = n->parameter_len;
    const char *parameter = n->parameter;

    for (int i = 0; i < 2; i++, parameter = unwrapped(parameter, &len)) {
        m->buf.len = 0;
        ckpt_str_printf(&m->buf, "%.*s%.*s", (int)begin_len, begin, (int)len, parameter);
        const struct ckpt_tensor *t = ckpt_catalog_find(m->cat, ckpt_str_get(&m->buf));
        if (t && !m->name[t - m->cat->tensors.ptr].kind)
            return t->name;
    }
    return NULL;
}

/* How many of the optimizer's tensors have a weight whose name begins so. */
static size_t count_weights(struct matching *m, const char *begin, size_t len)
{
    size_t n = 0;

    for (size_t i = 0; i < m->cat->tensors.len; i++)
        n += is_of(m, &m->name[i]) && find_weight(m, begin, len, &m->name[i]);
    return n;
}

/* The length of a weight's name before the parameter's; SIZE_MAX: it is not the parameter's. */
static size_t before(const char *weight, const struct ckpt_state_name *n)
{
    const size_t len = strlen(weight);
    size_t own = n->parameter_len;
    const char *parameter = unwrapped(n->parameter, &own);

    if (len < own || memcmp(weight + len - own, parameter, own) != 0 ||
        (len > own && weight[len - own - 1] != '.'))
        return SIZE_MAX;
    return len - own;
}

/* The beginning with which most of the optimizer's parameters have weights, by trying those of a
 * few of its parameters. *ret is NULL if there is none, or if several are as good: of these the one
 * that begins as the optimizer's own name does is better. */
static void find_beginning(struct matching *m, const char **ret, size_t *ret_len)
{
    enum { TRIES = 4, MOST_BEGINNINGS = 64 };
    size_t best = 0, tried = 0, seen = 0;
    bool best_near = false, tie = false;

    *ret = NULL;
    for (size_t i = 0; i < m->cat->tensors.len && tried < TRIES; i++) {
        if (!is_of(m, &m->name[i]))
            continue;
        tried++;
        for (size_t k = 0; k < m->cat->tensors.len && seen < MOST_BEGINNINGS; k++) {
            const char *weight = m->cat->tensors.ptr[k].name;
            const size_t len = m->name[k].kind ? SIZE_MAX : before(weight, &m->name[i]);
            if (len == SIZE_MAX || (*ret && len == *ret_len && memcmp(weight, *ret, len) == 0))
                continue;
            const size_t n = count_weights(m, weight, len);
            seen++;
            const bool near =
                len >= m->of->root_len && memcmp(weight, m->of->root, m->of->root_len) == 0;
            if (n < best || (n == best && best_near && !near))
                continue;
            tie = n == best && near == best_near;
            best = n;
            best_near = near;
            *ret = weight;
            *ret_len = len;
        }
    }
    if (tie)
        *ret = NULL;
}

static int label_one(struct matching *m, size_t i, const char *begin, size_t begin_len,
                     struct ckpt_err *err)
{
    const struct ckpt_state_name *n = &m->name[i];
    ckpt_cleanup(ckpt_freep) char *kind = strndup(n->kind, n->kind_len),
                                  *parameter = strndup(n->parameter, n->parameter_len);
    ckpt_cleanup(ckpt_freep) char *would = NULL;
    const char *weight = begin ? find_weight(m, begin, begin_len, n) : NULL;

    if (!kind || !parameter)
        return ckpt_nomem(err);
    if (begin && !weight && !(would = ckpt_asprintf("%.*s%s", (int)begin_len, begin, parameter)))
        return ckpt_nomem(err);
    const struct ckpt_state state = {kind, parameter, weight ? weight : would};
    return m->buf.failed ? ckpt_nomem(err) : ckpt_catalog_set_state(m->cat, i, &state, err);
}

/* Label the tensors of one optimizer, and mark them as done in name[]. */
static int label_optimizer(struct matching *m, struct ckpt_state_name *name, bool *done,
                           struct ckpt_err *err)
{
    const char *begin;
    size_t len = 0;

    find_beginning(m, &begin, &len);
    for (size_t i = 0; i < m->cat->tensors.len; i++) {
        if (!is_of(m, &name[i]))
            continue;
        if (label_one(m, i, begin, len, err) < 0)
            return -1;
        done[i] = true;
    }
    return 0;
}

int ckpt_states_label(struct ckpt_catalog *cat, ckpt_state_parse_fn *parse, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct ckpt_state_name *name =
        calloc(cat->tensors.len + 1, sizeof *name);
    ckpt_cleanup(ckpt_freep) bool *done = calloc(cat->tensors.len + 1, sizeof *done);
    int rc = 0;

    if (!name || !done)
        return ckpt_nomem(err);
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (!parse(cat->tensors.ptr[i].name, &name[i]))
            name[i] = (struct ckpt_state_name){0};
    for (size_t i = 0; i < cat->tensors.len && rc == 0; i++) {
        struct matching m = {.cat = cat, .name = name, .of = &name[i]};
        if (name[i].kind && !done[i])
            rc = label_optimizer(&m, name, done, err);
        ckpt_str_release(&m.buf);
    }
    return rc;
}
