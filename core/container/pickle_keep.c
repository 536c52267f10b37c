/* SPDX-License-Identifier: Apache-2.0 */
/* Storing the strings, tuples, objects, lists and dicts of a pickle in as few bytes as possible. */
#include "container/pickle_machine.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { KEPT_CAP = 64 }; /* capacity that an emptied box keeps */

int ckpt_pm_check_id(struct ckpt_pickle_machine *m, size_t id)
{
    return id <= CKPT_PM_MAX_ID
               ? 0
               : ckpt_fail(m->err, CKPT_LIMIT, "a pickle has more than %d values", CKPT_PM_MAX_ID);
}

int ckpt_pm_str(struct ckpt_pickle_machine *m, const char *ptr, size_t len, uint32_t *ret)
{
    struct ckpt_pickle *p = m->p;
    struct ckpt_pickle_str str = {NULL, (uint32_t)len};
    bool is_new;

    if (ckpt_map_get(&p->str_ids, ptr, len, ret))
        return 0;
    if (ckpt_pm_check_id(m, p->strs.len) < 0)
        return -1;
    if (!(str.ptr = ckpt_arena_strndup(&p->text, ptr, len)) || ckpt_vec_reserve(&p->strs, 1) < 0 ||
        ckpt_map_put(&p->str_ids, str.ptr, len, (uint32_t)p->strs.len, ret, &is_new) < 0)
        return ckpt_nomem(m->err);
    p->strs.ptr[p->strs.len++] = str;
    return 0;
}

static int grow_tuples(struct ckpt_pickle_machine *m)
{
    size_t cap = m->tuple_cap ? 2 * m->tuple_cap : 64;
    uint32_t *slot = calloc(cap, sizeof *slot);

    if (!slot)
        return ckpt_nomem(m->err);
    for (size_t i = 0; i < m->tuple_cap; i++) {
        if (!m->tuple[i])
            continue;
        const int64_t *t = m->p->ints.ptr + m->tuple[i] - 1;
        size_t h = (size_t)XXH3_64bits(t + 1, (size_t)*t * sizeof *t) & (cap - 1);
        while (slot[h])
            h = (h + 1) & (cap - 1);
        slot[h] = m->tuple[i];
    }
    free(m->tuple);
    m->tuple = slot;
    m->tuple_cap = cap;
    return 0;
}

int ckpt_pm_ints(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret)
{
    struct ckpt_pickle *p = m->p;
    size_t at = p->ints.len;

    if (2 * m->ntuple >= m->tuple_cap && grow_tuples(m) < 0)
        return -1;
    if (ckpt_vec_reserve(&p->ints, n + 1) < 0)
        return ckpt_nomem(m->err);
    int64_t *t = p->ints.ptr + at;
    *t = (int64_t)n;
    for (size_t i = 0; i < n; i++)
        t[1 + i] = (int64_t)v[i] >> 4;
    size_t h = (size_t)XXH3_64bits(t + 1, n * sizeof *t) & (m->tuple_cap - 1);
    for (; m->tuple[h]; h = (h + 1) & (m->tuple_cap - 1))
        if (memcmp(p->ints.ptr + m->tuple[h] - 1, t, (n + 1) * sizeof *t) == 0) {
            *ret = ckpt_pv_make(CKPT_PV_INTS, m->tuple[h] - 1);
            return 0;
        }
    if (ckpt_pm_check_id(m, at) < 0)
        return -1;
    m->tuple[h] = (uint32_t)at + 1;
    m->ntuple++;
    p->ints.len += n + 1;
    *ret = ckpt_pv_make(CKPT_PV_INTS, at);
    return 0;
}

bool ckpt_pm_all_ints(const ckpt_pv *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ckpt_pv_kind(v[i]) != CKPT_PV_INT)
            return false;
    return true;
}

int ckpt_pm_tuple(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret)
{
    struct ckpt_pickle *p = m->p;
    size_t at = p->words.len;

    if (ckpt_pm_all_ints(v, n))
        return ckpt_pm_ints(m, v, n, ret);
    if (n == 1 && ckpt_pv_kind(v[0]) == CKPT_PV_INTS) {
        *ret = ckpt_pv_make(CKPT_PV_INTS1, ckpt_pv_id(v[0]));
        return 0;
    }
    if (ckpt_pm_check_id(m, at) < 0)
        return -1;
    if (ckpt_vec_reserve(&p->words, n + 1) < 0)
        return ckpt_nomem(m->err);
    p->words.ptr[at] = n;
    memcpy(p->words.ptr + at + 1, v, n * sizeof *v);
    p->words.len += n + 1;
    *ret = ckpt_pv_make(CKPT_PV_TUPLE, at);
    return 0;
}

int ckpt_pm_obj(struct ckpt_pickle_machine *m, uint64_t global, int rule, ckpt_pv args,
                ckpt_pv *ret)
{
    struct ckpt_pickle *p = m->p;
    unsigned n = ckpt_pickle_nslot(p, rule);
    size_t at = p->words.len;

    if (ckpt_pm_check_id(m, at) < 0)
        return -1;
    if (ckpt_vec_reserve(&p->words, n + 1) < 0)
        return ckpt_nomem(m->err);
    memset(p->words.ptr + at, 0, (n + 1) * sizeof *p->words.ptr);
    p->words.ptr[at] = global;
    if (rule < 0 || !p->rules->global[rule].slot)
        p->words.ptr[at + 1] = args;
    p->words.len += n + 1;
    *ret = ckpt_pv_make(CKPT_PV_OBJ, at);
    return 0;
}

bool ckpt_pm_is_box(ckpt_pv v)
{
    return ckpt_pv_kind(v) == CKPT_PV_LIST || ckpt_pv_kind(v) == CKPT_PV_DICT;
}

int ckpt_pm_box(struct ckpt_pickle_machine *m, enum ckpt_pv_kind kind, ckpt_pv *ret)
{
    struct ckpt_pickle_box *box;
    size_t id = m->p->boxes.len;

    if (m->free_boxes.len) {
        id = m->free_boxes.ptr[--m->free_boxes.len];
    } else if (ckpt_pm_check_id(m, id) < 0) {
        return -1;
    } else if (ckpt_vec_add(&m->p->boxes, &box) < 0) {
        return ckpt_nomem(m->err);
    }
    *ret = ckpt_pv_make(kind, id);
    return 0;
}

int ckpt_pm_add(struct ckpt_pickle_machine *m, ckpt_pv box, const ckpt_pv *v, size_t n)
{
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(box)];
    size_t cap = b->cap;

    if (n > UINT32_MAX / 2 - b->len)
        return ckpt_fail(m->err, CKPT_LIMIT, "a list or dict has more than 2^31 values");
    if (b->len + n > cap && cap == 0) { /* exactly this much, because most get no more */
        if (!(b->ptr = malloc(n * sizeof *v)))
            return ckpt_nomem(m->err);
        cap = n;
    } else if (ckpt_vec_reserve_((void **)&b->ptr, &cap, b->len, n, sizeof *v) < 0) {
        return ckpt_nomem(m->err);
    }
    b->cap = (uint32_t)cap;
    if (n)
        memcpy(b->ptr + b->len, v, n * sizeof *v);
    b->len += (uint32_t)n;
    return 0;
}

void ckpt_pm_recycle(struct ckpt_pickle_machine *m, ckpt_pv v)
{
    if (!ckpt_pm_is_box(v))
        return;
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(v)];
    if (b->shared || ckpt_vec_reserve(&m->free_boxes, 1) < 0)
        return;
    if (b->memo && m->memo.ptr[b->memo - 1] == (uint32_t)v)
        m->memo.ptr[b->memo - 1] = 0;
    if (b->cap > KEPT_CAP) {
        free(b->ptr);
        b->ptr = NULL;
        b->cap = 0;
    }
    b->len = b->memo = 0;
    m->free_boxes.ptr[m->free_boxes.len++] = (uint32_t)ckpt_pv_id(v);
}

int ckpt_pm_fail_kind(struct ckpt_pickle_machine *m, ckpt_pv v, const char *what)
{
    return ckpt_fail(m->err, CKPT_FORMAT, "%s %s", what, ckpt_pv_text(m->p, v).text);
}
