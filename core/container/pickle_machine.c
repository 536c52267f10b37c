/* SPDX-License-Identifier: Apache-2.0 */
/* The opcodes of pickles and their meaning: CPython's Lib/pickletools.py. */
#include "container/pickle_machine.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"

enum { FIRST_STACK = 64 };

static void machine_release(struct ckpt_pickle_machine *m)
{
    free(m->buf);
    free(m->tuple);
    ckpt_vec_release(&m->stack);
    ckpt_vec_release(&m->marks);
    ckpt_vec_release(&m->memo);
    ckpt_vec_release(&m->free_boxes);
    ckpt_vec_release(&m->slot_name);
}

static int push_mark(struct ckpt_pickle_machine *m)
{
    if (m->marks.len >= CKPT_PICKLE_MAX_MARKS)
        return ckpt_fail(m->err, CKPT_LIMIT, "nests deeper than %d", CKPT_PICKLE_MAX_MARKS);
    if (ckpt_vec_push(&m->marks, (uint32_t)m->stack.len) < 0)
        return ckpt_nomem(m->err);
    m->floor = m->stack.len;
    return 0;
}

/* Remove the mark and the values above it; they can be read until the next push. */
static int pop_mark(struct ckpt_pickle_machine *m, ckpt_pv **ret, size_t *ret_n)
{
    if (m->marks.len == 0)
        return ckpt_fail(m->err, CKPT_FORMAT, "the stack has no mark");
    size_t at = m->marks.ptr[--m->marks.len];
    m->floor = m->marks.len ? m->marks.ptr[m->marks.len - 1] : 0;
    *ret = m->stack.ptr + at;
    *ret_n = m->stack.len - at;
    m->stack.len = at;
    return 0;
}

static int push_str(struct ckpt_pickle_machine *m, unsigned width, enum ckpt_pv_kind kind)
{
    const char *ptr;
    uint32_t id;
    size_t len;

    if (ckpt_pm_take_counted(m, width, &ptr, &len) < 0 || ckpt_pm_str(m, ptr, len, &id) < 0)
        return -1;
    return ckpt_pm_push(m, ckpt_pv_make(kind, id));
}

static int tuple_of_top(struct ckpt_pickle_machine *m, size_t n)
{
    ckpt_pv t;

    if (ckpt_pm_has(m, n) < 0 || ckpt_pm_tuple(m, m->stack.ptr + m->stack.len - n, n, &t) < 0)
        return -1;
    m->stack.len -= n;
    return ckpt_pm_push(m, t);
}

static int tuple_of_mark(struct ckpt_pickle_machine *m)
{
    ckpt_pv *v = NULL, t;
    size_t n = 0;

    return pop_mark(m, &v, &n) < 0 || ckpt_pm_tuple(m, v, n, &t) < 0 ? -1 : ckpt_pm_push(m, t);
}

static int push_box(struct ckpt_pickle_machine *m, enum ckpt_pv_kind kind)
{
    ckpt_pv v;
    return ckpt_pm_box(m, kind, &v) < 0 ? -1 : ckpt_pm_push(m, v);
}

/* Add values to the container below them. For an object of an unknown class they are dropped. */
static int add_to_top(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n,
                      enum ckpt_pv_kind kind)
{
    if (ckpt_pm_has(m, 1) < 0)
        return -1;
    if (ckpt_pv_kind(*ckpt_pm_top(m)) == kind)
        return ckpt_pm_add(m, *ckpt_pm_top(m), v, n);
    return ckpt_pv_kind(*ckpt_pm_top(m)) == CKPT_PV_OPAQUE
               ? 0
               : ckpt_pm_fail_kind(m, *ckpt_pm_top(m), "cannot put members into");
}

static int add_marked(struct ckpt_pickle_machine *m, enum ckpt_pv_kind kind)
{
    ckpt_pv *v = NULL;
    size_t n = 0;

    if (pop_mark(m, &v, &n) < 0)
        return -1;
    if (kind == CKPT_PV_DICT && n % 2)
        return ckpt_fail(m->err, CKPT_FORMAT, "a key without a value");
    return add_to_top(m, v, n, kind);
}

static int add_few(struct ckpt_pickle_machine *m, size_t n, enum ckpt_pv_kind kind)
{
    if (ckpt_pm_has(m, n + 1) < 0)
        return -1;
    m->stack.len -= n;
    return add_to_top(m, m->stack.ptr + m->stack.len, n, kind);
}

static int frozenset(struct ckpt_pickle_machine *m)
{
    ckpt_pv *v = NULL, box;
    size_t n = 0;

    if (pop_mark(m, &v, &n) < 0 || ckpt_pm_box(m, CKPT_PV_LIST, &box) < 0 ||
        ckpt_pm_add(m, box, v, n) < 0)
        return -1;
    return ckpt_pm_push(m, box);
}

static int put(struct ckpt_pickle_machine *m, uint64_t index)
{
    if (ckpt_pm_has(m, 1) < 0)
        return -1;
    ckpt_pv v = *ckpt_pm_top(m);
    if (index >= m->end - m->begin) /* each needs an opcode */
        return ckpt_fail(m->err, CKPT_LIMIT,
                         "memo entry %" PRIu64 " cannot exist in a pickle of %" PRIu64 " bytes",
                         index, m->end - m->begin);
    if (v > UINT32_MAX)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "an integer in the memo");
    if (index >= m->memo.len) {
        size_t more = (size_t)index + 1 - m->memo.len;
        if (ckpt_vec_reserve(&m->memo, more) < 0)
            return ckpt_nomem(m->err);
        memset(m->memo.ptr + m->memo.len, 0, more * sizeof *m->memo.ptr);
        m->memo.len += more;
    }
    m->memo.ptr[index] = (uint32_t)v;
    if (ckpt_pm_is_box(v)) {
        struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(v)];
        b->shared |= b->memo != 0;
        b->memo = (uint32_t)index + 1;
    }
    return 0;
}

static void share(struct ckpt_pickle_machine *m, ckpt_pv v)
{
    if (ckpt_pm_is_box(v))
        m->p->boxes.ptr[ckpt_pv_id(v)].shared = true;
}

static int get(struct ckpt_pickle_machine *m, uint64_t index)
{
    if (index >= m->memo.len || m->memo.ptr[index] == 0)
        return ckpt_fail(m->err, CKPT_FORMAT, "memo entry %" PRIu64 " was never stored", index);
    share(m, m->memo.ptr[index]);
    return ckpt_pm_push(m, m->memo.ptr[index]);
}

static int push_int(struct ckpt_pickle_machine *m, int64_t v)
{
    if (v >= INT64_C(1) << 59 || v < -(INT64_C(1) << 59))
        return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_OPAQUE, CKPT_PM_NO_GLOBAL));
    return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_INT, (uint64_t)v));
}

/* Two's complement, little-endian. */
static int push_long(struct ckpt_pickle_machine *m, unsigned width)
{
    const char *ptr;
    uint64_t v = 0;
    size_t len;

    if (ckpt_pm_take_counted(m, width, &ptr, &len) < 0)
        return -1;
    if (len > 8)
        return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_OPAQUE, CKPT_PM_NO_GLOBAL));
    for (size_t i = 0; i < len; i++)
        v |= (uint64_t)(unsigned char)ptr[i] << 8 * i;
    if (len > 0 && len < 8 && ptr[len - 1] & 0x80)
        v |= ~UINT64_C(0) << 8 * len;
    return push_int(m, (int64_t)v);
}

static int push_float(struct ckpt_pickle_machine *m)
{
    uint64_t bits = 0;
    double d;

    if (ckpt_pm_need(m, 8) < 0)
        return -1;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | *m->at++;
    memcpy(&d, &bits, sizeof d);
    if (ckpt_pm_check_id(m, m->p->floats.len) < 0)
        return -1;
    if (ckpt_vec_push(&m->p->floats, d) < 0)
        return ckpt_nomem(m->err);
    return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_FLOAT, m->p->floats.len - 1));
}

static int pop(struct ckpt_pickle_machine *m)
{
    ckpt_pv *v;
    size_t n;

    if (m->stack.len == m->floor && m->marks.len)
        return pop_mark(m, &v, &n);
    if (ckpt_pm_has(m, 1) < 0)
        return -1;
    m->stack.len--;
    return 0;
}

static int dup(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_has(m, 1) < 0)
        return -1;
    share(m, *ckpt_pm_top(m));
    return ckpt_pm_push(m, *ckpt_pm_top(m));
}

static int proto(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_need(m, 1) < 0)
        return -1;
    unsigned v = *m->at++;
    return v >= 2 && v <= 5
               ? 0
               : ckpt_fail(m->err, CKPT_UNSUPPORTED, "pickle protocol %u is not supported", v);
}

static int frame(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_need(m, 8) < 0)
        return -1;
    return ckpt_pm_take_le(m, 8) > ckpt_pm_left(m) ? ckpt_pm_fail_end(m) : 0;
}

static int step(struct ckpt_pickle_machine *m, unsigned char op)
{
    ckpt_pv *v;
    size_t n;

    switch (op) {
    case 0x80:
        return proto(m);
    case 0x95:
        return frame(m);
    case '(':
        return push_mark(m);
    case '0':
        return pop(m);
    case '1':
        return pop_mark(m, &v, &n);
    case '2':
        return dup(m);
    case 'N':
        return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_NONE, 0));
    case 0x88:
    case 0x89:
        return ckpt_pm_push(m, ckpt_pv_make(CKPT_PV_BOOL, op == 0x88));
    case 'K':
        return ckpt_pm_need(m, 1) < 0 ? -1 : push_int(m, (int64_t)ckpt_pm_take_le(m, 1));
    case 'M':
        return ckpt_pm_need(m, 2) < 0 ? -1 : push_int(m, (int64_t)ckpt_pm_take_le(m, 2));
    case 'J':
        return ckpt_pm_need(m, 4) < 0 ? -1 : push_int(m, (int32_t)ckpt_pm_take_le(m, 4));
    case 0x8a:
        return push_long(m, 1);
    case 0x8b:
        return push_long(m, 4);
    case 'G':
        return push_float(m);
    case 0x8c:
        return push_str(m, 1, CKPT_PV_STR);
    case 'X':
        return push_str(m, 4, CKPT_PV_STR);
    case 0x8d:
        return push_str(m, 8, CKPT_PV_STR);
    case 'C':
        return push_str(m, 1, CKPT_PV_BYTES);
    case 'B':
        return push_str(m, 4, CKPT_PV_BYTES);
    case 0x8e:
        return push_str(m, 8, CKPT_PV_BYTES);
    case ')':
        return tuple_of_top(m, 0);
    case 0x85:
    case 0x86:
    case 0x87:
        return tuple_of_top(m, op - 0x84u);
    case 't':
        return tuple_of_mark(m);
    case ']':
    case 0x8f:
        return push_box(m, CKPT_PV_LIST);
    case 'a':
        return add_few(m, 1, CKPT_PV_LIST);
    case 'e':
    case 0x90:
        return add_marked(m, CKPT_PV_LIST);
    case 0x91:
        return frozenset(m);
    case '}':
        return push_box(m, CKPT_PV_DICT);
    case 's':
        return add_few(m, 2, CKPT_PV_DICT);
    case 'u':
        return add_marked(m, CKPT_PV_DICT);
    case 0x94:
        return put(m, m->memo.len);
    case 'q':
        return ckpt_pm_need(m, 1) < 0 ? -1 : put(m, ckpt_pm_take_le(m, 1));
    case 'r':
        return ckpt_pm_need(m, 4) < 0 ? -1 : put(m, ckpt_pm_take_le(m, 4));
    case 'h':
        return ckpt_pm_need(m, 1) < 0 ? -1 : get(m, ckpt_pm_take_le(m, 1));
    case 'j':
        return ckpt_pm_need(m, 4) < 0 ? -1 : get(m, ckpt_pm_take_le(m, 4));
    case 'c':
        return ckpt_pm_text_global(m);
    case 0x93:
        return ckpt_pm_stack_global(m);
    case 0x81:
    case 'R':
        return ckpt_pm_reduce(m, 2);
    case 0x92:
        return ckpt_pm_reduce(m, 3);
    case 'b':
        return ckpt_pm_build(m);
    case 'Q':
        return ckpt_pm_persistent_id(m);
    default:
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "pickle opcode 0x%02x is not supported", op);
    }
}

static int run(struct ckpt_pickle_machine *m)
{
    if (ckpt_pm_need(m, 2) < 0)
        return -1;
    if (*m->at != 0x80)
        return ckpt_fail(m->err, CKPT_FORMAT, "is not a pickle of protocol 2 or later");
    for (;;) {
        uint64_t off = m->pos - (uint64_t)(m->stop - m->at) - m->begin;
        if (ckpt_pm_need(m, 1) < 0)
            return ckpt_err_in(m->err, "byte %" PRIu64, off);
        unsigned char op = *m->at++;
        if (op == '.')
            break;
        if (step(m, op) < 0)
            return ckpt_err_in(m->err, "byte %" PRIu64, off);
    }
    if (ckpt_pm_has(m, 1) < 0)
        return -1;
    m->p->root = *ckpt_pm_top(m);
    return 0;
}

/* The strings that name slots have known numbers, so that a state's keys are compared as such. */
static int intern_slots(struct ckpt_pickle_machine *m)
{
    const struct ckpt_pickle_global *g = m->p->rules->global;

    for (; g->name; g++) {
        unsigned n = 0;
        for (; g->slot && g->slot[n]; n++) {
            uint32_t id;
            assert(n < CKPT_PICKLE_MAX_SLOTS);
            if (ckpt_pm_str(m, g->slot[n], strlen(g->slot[n]), &id) < 0)
                return -1;
            if (ckpt_vec_push(&m->slot_name, id) < 0)
                return ckpt_nomem(m->err);
        }
        for (; n < CKPT_PICKLE_MAX_SLOTS; n++)
            if (ckpt_vec_push(&m->slot_name, 0) < 0)
                return ckpt_nomem(m->err);
    }
    return 0;
}

static int parse(struct ckpt_pickle_machine *m, const struct ckpt_pickle_rules *rules,
                 struct ckpt_pickle *ret)
{
    struct ckpt_pickle p = {.rules = rules};
    int result;

    m->p = &p;
    if (ckpt_vec_reserve(&m->stack, FIRST_STACK) < 0) /* never NULL from here on */
        result = ckpt_nomem(m->err);
    else
        result = intern_slots(m) < 0 ? -1 : run(m);
    machine_release(m);
    if (result < 0)
        ckpt_pickle_release(&p);
    else
        *ret = p;
    return result;
}

int ckpt_pickle_read(struct ckpt_source *s, uint64_t off, uint64_t len,
                     const struct ckpt_pickle_rules *rules, uint32_t *ret_crc,
                     struct ckpt_pickle *ret, struct ckpt_err *err)
{
    static const unsigned char nothing[1];
    uint32_t crc = 0;
    struct ckpt_pickle_machine m = {.err = err,
                                    .source = s,
                                    .at = nothing,
                                    .stop = nothing,
                                    .pos = off,
                                    .begin = off,
                                    .crc = ret_crc ? &crc : NULL};

    if (!ckpt_range_ok(off, len, s->size))
        return ckpt_fail(err, CKPT_FORMAT, "the pickle lies outside the file");
    m.end = off + len;
    m.buf_cap = (size_t)ckpt_min_u64(len + 1, CKPT_PM_WINDOW);
    if (!(m.buf = malloc(m.buf_cap)))
        return ckpt_nomem(err);
    if (parse(&m, rules, ret) < 0)
        return -1;
    if (ret_crc && m.pos < m.end) {
        ckpt_pickle_release(ret);
        return ckpt_fail(err, CKPT_FORMAT,
                         "the pickle ends long before the last of its %" PRIu64 " bytes", len);
    }
    if (ret_crc)
        *ret_crc = crc;
    return 0;
}

int ckpt_pickle_parse(const void *data, size_t len, const struct ckpt_pickle_rules *rules,
                      struct ckpt_pickle *ret, struct ckpt_err *err)
{
    struct ckpt_pickle_machine m = {.err = err, .at = data, .pos = len, .end = len};

    m.stop = m.at + len;
    return parse(&m, rules, ret);
}

ckpt_pv ckpt_pickle_pack(struct ckpt_pickle *p, ckpt_pv seq)
{
    size_t n = ckpt_pv_len(p, seq), at = p->ints.len;

    if (ckpt_pv_kind(seq) == CKPT_PV_INTS)
        return seq;
    if (!ckpt_pv_is_seq(seq) || at > CKPT_PM_MAX_ID || ckpt_vec_reserve(&p->ints, n + 1) < 0)
        return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    p->ints.ptr[at] = (int64_t)n;
    for (size_t i = 0; i < n; i++)
        if (!ckpt_pv_int(ckpt_pv_at(p, seq, i), &p->ints.ptr[at + 1 + i]))
            return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    p->ints.len += n + 1;
    return ckpt_pv_make(CKPT_PV_INTS, at);
}
