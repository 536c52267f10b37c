/* SPDX-License-Identifier: Apache-2.0 */
/* Converting a pickle's tree within a budget, because a value may be shared many times. */
#include "container/pickle_json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/str.h"
#include "container/pickle_walk.h"

enum { MAX_DEPTH = 16, MAX_VALUES = 1000 * 1000 };

struct walk {
    const struct ckpt_pickle *p;
    size_t n;
    unsigned depth;
};

static json_t *convert(void *ctx, ckpt_pv v);

/* Keys that JSON cannot have are left out. */
static const char *key_of(void *ctx, ckpt_pv key)
{
    const char *s = ckpt_pv_str(((const struct walk *)ctx)->p, key);

    return s && ckpt_utf8_ok(s) ? s : NULL;
}

static struct ckpt_pickle_walk members(struct walk *w)
{
    return (struct ckpt_pickle_walk){w->p, w, convert, key_of};
}

static json_t *sequence(struct walk *w, ckpt_pv v)
{
    const struct ckpt_pickle_walk m = members(w);

    return ckpt_pickle_walk_list(&m, v);
}

static json_t *dict(struct walk *w, ckpt_pv v)
{
    const struct ckpt_pickle_walk m = members(w);

    return ckpt_pickle_walk_dict(&m, v);
}

/* A JSON string; null if the text is not UTF-8. */
static json_t *text(const char *s) { return s && ckpt_utf8_ok(s) ? json_string(s) : json_null(); }

static json_t *name(const struct ckpt_pickle *p, ckpt_pv v)
{
    char buf[CKPT_PV_TEXT];

    return *ckpt_pv_name(p, v) ? text(ckpt_pv_text(p, v, buf, sizeof buf)) : json_null();
}

static json_t *object(struct walk *w, ckpt_pv v)
{
    ckpt_pv state = ckpt_pv_slot(w->p, v, 1);

    return ckpt_pv_rule(w->p, v) >= 0 && ckpt_pv_kind(state) == CKPT_PV_DICT ? dict(w, state)
                                                                             : name(w->p, v);
}

static json_t *value(struct walk *w, ckpt_pv v)
{
    int64_t i;

    switch (ckpt_pv_kind(v)) {
    case CKPT_PV_BOOL:
        return json_boolean(ckpt_pv_id(v) != 0);
    case CKPT_PV_INT:
        return ckpt_pv_int(v, &i) ? json_integer(i) : json_null();
    case CKPT_PV_FLOAT:
        return isfinite(w->p->floats.ptr[ckpt_pv_id(v)])
                   ? json_real(w->p->floats.ptr[ckpt_pv_id(v)])
                   : json_null();
    case CKPT_PV_STR:
        return text(ckpt_pv_str(w->p, v));
    case CKPT_PV_INTS:
    case CKPT_PV_INTS1:
    case CKPT_PV_TUPLE:
    case CKPT_PV_LIST:
        return sequence(w, v);
    case CKPT_PV_DICT:
        return dict(w, v);
    case CKPT_PV_OBJ:
        return object(w, v);
    case CKPT_PV_GLOBAL:
    case CKPT_PV_OPAQUE:
        return name(w->p, v);
    default:
        return json_null();
    }
}

static json_t *convert(void *ctx, ckpt_pv v)
{
    struct walk *w = ctx;
    json_t *j;

    if (w->depth == MAX_DEPTH || w->n++ >= MAX_VALUES)
        return json_null();
    w->depth++;
    j = value(w, v);
    w->depth--;
    return j;
}

int ckpt_pickle_json(const struct ckpt_pickle *p, ckpt_pv v, json_t **ret, struct ckpt_err *err)
{
    struct walk w = {.p = p};
    json_t *j = convert(&w, v);

    if (!j)
        return ckpt_nomem(err);
    if (w.n > MAX_VALUES) {
        json_decref(j);
        return ckpt_fail(err, CKPT_LIMIT, "a configuration has more than %d values", MAX_VALUES);
    }
    *ret = j;
    return 0;
}

bool ckpt_pickle_attack(const struct ckpt_pickle *p, char *buf, size_t cap)
{
    static const char *const modules[] = {"os",        "posix",  "nt",    "subprocess",
                                          "shutil",    "socket", "runpy", "ctypes",
                                          "importlib", "pty",    "code",  "commands"};
    static const char *const builtins[] = {"eval",       "exec", "execfile", "compile",
                                           "__import__", "open", "input"};

    for (size_t i = 0; i < p->globals.len; i++) {
        const char *module = p->strs.ptr[p->globals.ptr[i].module].ptr;
        const char *name = p->strs.ptr[p->globals.ptr[i].name].ptr;
        bool bad = false;
        for (size_t k = 0; k < sizeof modules / sizeof modules[0]; k++)
            bad |= strcmp(module, modules[k]) == 0;
        if (strcmp(module, "builtins") == 0 || strcmp(module, "__builtin__") == 0)
            for (size_t k = 0; k < sizeof builtins / sizeof builtins[0]; k++)
                bad |= strcmp(name, builtins[k]) == 0;
        if (!bad)
            continue;
        (void)snprintf(buf, cap, "%s.%s", module, name);
        return true;
    }
    return false;
}
