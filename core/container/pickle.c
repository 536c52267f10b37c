/* SPDX-License-Identifier: Apache-2.0 */
/* Access to the values of a parsed pickle. */
#include "container/pickle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool ckpt_pv_int(ckpt_pv v, int64_t *ret)
{
    if (ckpt_pv_kind(v) != CKPT_PV_INT)
        return false;
    *ret = (int64_t)v >> 4;
    return true;
}

const char *ckpt_pv_str(const struct ckpt_pickle *p, ckpt_pv v)
{
    if (ckpt_pv_kind(v) != CKPT_PV_STR)
        return NULL;
    const struct ckpt_pickle_str *s = &p->strs.ptr[ckpt_pv_id(v)];
    return memchr(s->ptr, 0, s->len) ? NULL : s->ptr;
}

/* ---- sequences ---- */

bool ckpt_pv_is_seq(ckpt_pv v)
{
    enum ckpt_pv_kind k = ckpt_pv_kind(v);
    return k == CKPT_PV_INTS || k == CKPT_PV_INTS1 || k == CKPT_PV_TUPLE || k == CKPT_PV_LIST;
}

size_t ckpt_pv_len(const struct ckpt_pickle *p, ckpt_pv v)
{
    uint64_t id = ckpt_pv_id(v);

    switch (ckpt_pv_kind(v)) {
    case CKPT_PV_INTS:
        return (size_t)p->ints.ptr[id];
    case CKPT_PV_INTS1:
        return 1;
    case CKPT_PV_TUPLE:
        return (size_t)p->words.ptr[id];
    case CKPT_PV_LIST:
        return p->boxes.ptr[id].len;
    default:
        return 0;
    }
}

ckpt_pv ckpt_pv_at(const struct ckpt_pickle *p, ckpt_pv v, size_t i)
{
    uint64_t id = ckpt_pv_id(v);

    if (i >= ckpt_pv_len(p, v))
        return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    switch (ckpt_pv_kind(v)) {
    case CKPT_PV_INTS:
        return ckpt_pv_make(CKPT_PV_INT, (uint64_t)p->ints.ptr[id + 1 + i]);
    case CKPT_PV_INTS1:
        return ckpt_pv_make(CKPT_PV_INTS, id);
    case CKPT_PV_TUPLE:
        return p->words.ptr[id + 1 + i];
    default:
        return p->boxes.ptr[id].ptr[i];
    }
}

const int64_t *ckpt_pv_ints(const struct ckpt_pickle *p, ckpt_pv v, size_t *ret_n)
{
    if (ckpt_pv_kind(v) != CKPT_PV_INTS)
        return NULL;
    *ret_n = ckpt_pv_len(p, v);
    return p->ints.ptr + ckpt_pv_id(v) + 1;
}

/* ---- dicts ---- */

size_t ckpt_pv_npair(const struct ckpt_pickle *p, ckpt_pv v)
{
    return ckpt_pv_kind(v) == CKPT_PV_DICT ? p->boxes.ptr[ckpt_pv_id(v)].len / 2 : 0;
}

ckpt_pv ckpt_pv_key(const struct ckpt_pickle *p, ckpt_pv v, size_t i)
{
    return p->boxes.ptr[ckpt_pv_id(v)].ptr[2 * i];
}

ckpt_pv ckpt_pv_value(const struct ckpt_pickle *p, ckpt_pv v, size_t i)
{
    return p->boxes.ptr[ckpt_pv_id(v)].ptr[2 * i + 1];
}

ckpt_pv ckpt_pv_get(const struct ckpt_pickle *p, ckpt_pv dict, const char *key)
{
    size_t len = strlen(key);

    for (size_t i = ckpt_pv_npair(p, dict); i-- > 0;) {
        ckpt_pv k = ckpt_pv_key(p, dict, i);
        if (ckpt_pv_kind(k) != CKPT_PV_STR)
            continue;
        const struct ckpt_pickle_str *s = &p->strs.ptr[ckpt_pv_id(k)];
        if (s->len == len && memcmp(s->ptr, key, len) == 0)
            return ckpt_pv_value(p, dict, i);
    }
    return ckpt_pv_make(CKPT_PV_ABSENT, 0);
}

/* ---- objects ---- */

/* The name of the value's global; NULL if it has none. */
static const struct ckpt_pickle_name *name_of(const struct ckpt_pickle *p, ckpt_pv v)
{
    uint64_t id = ckpt_pv_id(v);

    if (ckpt_pv_kind(v) == CKPT_PV_OBJ)
        id = p->words.ptr[id];
    else if (ckpt_pv_kind(v) != CKPT_PV_GLOBAL && ckpt_pv_kind(v) != CKPT_PV_OPAQUE)
        return NULL;
    return id < p->globals.len ? &p->globals.ptr[id] : NULL;
}

int ckpt_pv_rule(const struct ckpt_pickle *p, ckpt_pv v)
{
    const struct ckpt_pickle_name *g = name_of(p, v);

    if (ckpt_pv_kind(v) == CKPT_PV_OBJ)
        return g ? g->rule : CKPT_PICKLE_PERSID;
    return ckpt_pv_kind(v) == CKPT_PV_GLOBAL && g ? g->rule : CKPT_PICKLE_OTHER;
}

ckpt_pv ckpt_pv_slot(const struct ckpt_pickle *p, ckpt_pv v, unsigned i)
{
    if (ckpt_pv_kind(v) != CKPT_PV_OBJ || i >= ckpt_pickle_nslot(p, ckpt_pv_rule(p, v)))
        return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    return p->words.ptr[ckpt_pv_id(v) + 1 + i];
}

const char *ckpt_pv_module(const struct ckpt_pickle *p, ckpt_pv v)
{
    const struct ckpt_pickle_name *g = name_of(p, v);
    return g ? p->strs.ptr[g->module].ptr : "";
}

const char *ckpt_pv_name(const struct ckpt_pickle *p, ckpt_pv v)
{
    const struct ckpt_pickle_name *g = name_of(p, v);
    return g ? p->strs.ptr[g->name].ptr : "";
}

struct ckpt_pv_text ckpt_pv_text(const struct ckpt_pickle *p, ckpt_pv v)
{
    static const char *const words[16] = {
        "nothing",
        "None",
        "a boolean",
        "an integer",
        "a float",
        "a string",
        "bytes",
        "a tuple of integers",
        "a tuple",
        "a tuple",
        "a list",
        "a dict",
        "a global",
        "an object",
        "a foreign object",
        "?",
    };
    struct ckpt_pv_text t;

    if (name_of(p, v))
        (void)snprintf(t.text, sizeof t.text, "%s.%s", ckpt_pv_module(p, v), ckpt_pv_name(p, v));
    else
        (void)snprintf(t.text, sizeof t.text, "%s", words[ckpt_pv_kind(v)]);
    return t;
}

/* ---- end ---- */

void ckpt_pickle_release(struct ckpt_pickle *p)
{
    for (size_t i = 0; i < p->boxes.len; i++)
        free(p->boxes.ptr[i].ptr);
    ckpt_vec_release(&p->boxes);
    ckpt_vec_release(&p->words);
    ckpt_vec_release(&p->floats);
    ckpt_vec_release(&p->globals);
    ckpt_map_release(&p->str_ids);
    ckpt_vec_release(&p->strs);
    ckpt_vec_release(&p->ints);
    ckpt_arena_release(&p->text);
}
