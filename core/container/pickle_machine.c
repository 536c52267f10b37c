/* SPDX-License-Identifier: Apache-2.0 */
/* The opcodes of pickles and their meaning: CPython's Lib/pickletools.py. */
#include "container/pickle_machine.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "container/stand_in.h"

/* ---- the bytes of a pickle, in a window that moves along ---- */

enum {
    WINDOW = 256 * 1024, /* bytes of the input that are read at once */
    AHEAD = 16 << 20,    /* and that are fetched ahead, if they are far */
};

/* Bytes of the pickle that were not taken. */
static inline uint64_t left(const struct ckpt_pickle_machine *m)
{
    return (uint64_t)(m->stop - m->at) + (m->end - m->pos);
}

static int fail_end(struct ckpt_pickle_machine *m)
{
    return ckpt_fail(m->err, CKPT_FORMAT, "the pickle is truncated");
}

/* Have at least n bytes in the window, moving it. */
static int refill(struct ckpt_pickle_machine *m, size_t n)
{
    size_t have = (size_t)(m->stop - m->at);

    if (n > left(m))
        return fail_end(m);
    if (n > m->buf_cap) {
        unsigned char *buf = malloc(n + WINDOW);
        if (!buf)
            return ckpt_nomem(m->err);
        memcpy(buf, m->at, have);
        free(m->buf);
        m->buf = buf;
        m->buf_cap = n + WINDOW;
    } else if (have) {
        memmove(m->buf, m->at, have);
    }
    size_t more = (size_t)ckpt_min_u64(m->buf_cap - have, m->end - m->pos);
    m->at = m->buf;
    m->stop = m->buf + have;
    (void)ckpt_source_prefetch(m->source, m->pos, ckpt_min_u64(m->end - m->pos, AHEAD));
    if (ckpt_source_pread(m->source, m->buf + have, more, m->pos, m->err) < 0)
        return -1;
    if (m->crc)
        *m->crc = ckpt_crc32(*m->crc, m->stop, more);
    m->stop += more;
    m->pos += more;
    return 0;
}

/* Have at least n bytes in the window. */
static inline int need(struct ckpt_pickle_machine *m, size_t n)
{
    return (size_t)(m->stop - m->at) >= n ? 0 : refill(m, n);
}

/* Take a number of n bytes, little-endian, which are in the window. */
static inline uint64_t take_le(struct ckpt_pickle_machine *m, unsigned n)
{
    uint64_t v = 0;

    for (unsigned i = 0; i < n; i++)
        v |= (uint64_t)m->at[i] << 8 * i;
    m->at += n;
    return v;
}

/* Take `len` bytes, which stay until the window moves. */
static int take_bytes(struct ckpt_pickle_machine *m, uint64_t len, const char **ret)
{
    if (len > left(m))
        return fail_end(m);
    if (len > CKPT_PICKLE_MAX_STRING)
        return ckpt_fail(m->err, CKPT_LIMIT,
                         "a string has %" PRIu64 " bytes; at most %d are supported", len,
                         CKPT_PICKLE_MAX_STRING);
    if (need(m, (size_t)len) < 0)
        return -1;
    *ret = (const char *)m->at;
    m->at += len;
    return 0;
}

/* ---- stack ---- */

static inline int push(struct ckpt_pickle_machine *m, ckpt_pv v)
{
    if (m->stack.len >= CKPT_PICKLE_MAX_STACK)
        return ckpt_fail(m->err, CKPT_LIMIT, "more than %d values on the stack",
                         CKPT_PICKLE_MAX_STACK);
    return ckpt_vec_push(&m->stack, v) < 0 ? ckpt_nomem(m->err) : 0;
}

/* FORMAT if there are fewer than n values above the innermost mark. */
static inline int has(struct ckpt_pickle_machine *m, size_t n)
{
    return m->stack.len - m->floor >= n
               ? 0
               : ckpt_fail(m->err, CKPT_FORMAT, "takes more values than the stack holds");
}

static inline ckpt_pv *top(struct ckpt_pickle_machine *m)
{
    return &m->stack.ptr[m->stack.len - 1];
}

/* ---- opcodes ---- */

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

static int push_str(struct ckpt_pickle_machine *m, uint64_t len, enum ckpt_pv_kind kind)
{
    const char *ptr;
    uint32_t id;

    if (take_bytes(m, len, &ptr) < 0 || ckpt_pm_str(m, ptr, (size_t)len, &id) < 0)
        return -1;
    return push(m, ckpt_pv_make(kind, id));
}

static int tuple_of_top(struct ckpt_pickle_machine *m, size_t n)
{
    ckpt_pv t;

    if (has(m, n) < 0 || ckpt_pm_tuple(m, m->stack.ptr + m->stack.len - n, n, &t) < 0)
        return -1;
    m->stack.len -= n;
    return push(m, t);
}

static int tuple_of_mark(struct ckpt_pickle_machine *m)
{
    ckpt_pv *v = NULL, t;
    size_t n = 0;

    return pop_mark(m, &v, &n) < 0 || ckpt_pm_tuple(m, v, n, &t) < 0 ? -1 : push(m, t);
}

static int push_box(struct ckpt_pickle_machine *m, enum ckpt_pv_kind kind)
{
    ckpt_pv v;
    return ckpt_pm_box(m, kind, &v) < 0 ? -1 : push(m, v);
}

/* Add values to the container below them. For an object of an unknown class they are dropped. */
static int add_to_top(struct ckpt_pickle_machine *m, const ckpt_pv *v, size_t n,
                      enum ckpt_pv_kind kind)
{
    if (has(m, 1) < 0)
        return -1;
    if (ckpt_pv_kind(*top(m)) == kind)
        return ckpt_pm_add(m, *top(m), v, n);
    return ckpt_pv_kind(*top(m)) == CKPT_PV_OPAQUE
               ? 0
               : ckpt_pm_fail_kind(m, *top(m), "cannot put members into");
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
    if (has(m, n + 1) < 0)
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
    return push(m, box);
}

static int put(struct ckpt_pickle_machine *m, uint64_t index)
{
    if (has(m, 1) < 0)
        return -1;
    ckpt_pv v = *top(m);
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
    return push(m, m->memo.ptr[index]);
}

static int push_int(struct ckpt_pickle_machine *m, int64_t v)
{
    if (v >= INT64_C(1) << 59 || v < -(INT64_C(1) << 59))
        return push(m, ckpt_pv_make(CKPT_PV_OPAQUE, CKPT_PM_NO_GLOBAL));
    return push(m, ckpt_pv_make(CKPT_PV_INT, (uint64_t)v));
}

/* Two's complement, little-endian. */
static int push_long(struct ckpt_pickle_machine *m, uint64_t len)
{
    const char *ptr;
    uint64_t v = 0;

    if (take_bytes(m, len, &ptr) < 0)
        return -1;
    if (len > 8)
        return push(m, ckpt_pv_make(CKPT_PV_OPAQUE, CKPT_PM_NO_GLOBAL));
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

    if (need(m, 8) < 0)
        return -1;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | *m->at++;
    memcpy(&d, &bits, sizeof d);
    if (ckpt_pm_check_id(m, m->p->floats.len) < 0)
        return -1;
    if (ckpt_vec_push(&m->p->floats, d) < 0)
        return ckpt_nomem(m->err);
    return push(m, ckpt_pv_make(CKPT_PV_FLOAT, m->p->floats.len - 1));
}

static int pop(struct ckpt_pickle_machine *m)
{
    ckpt_pv *v;
    size_t n;

    if (m->stack.len == m->floor && m->marks.len)
        return pop_mark(m, &v, &n);
    if (has(m, 1) < 0)
        return -1;
    m->stack.len--;
    return 0;
}

static int dup(struct ckpt_pickle_machine *m)
{
    if (has(m, 1) < 0)
        return -1;
    share(m, *top(m));
    return push(m, *top(m));
}

/* ---- globals, and the results of calling them, by the caller's table ---- */

enum { MAX_LINE = 4096 }; /* of the names of GLOBAL */

static int push_global(struct ckpt_pickle_machine *m, uint32_t module, uint32_t name)
{
    struct ckpt_pickle *p = m->p;
    const char *mod = p->strs.ptr[module].ptr, *own = p->strs.ptr[name].ptr;
    struct ckpt_pickle_name g = {module, name, CKPT_PICKLE_OTHER};

    for (int i = 0; p->rules->global[i].name && g.rule == CKPT_PICKLE_OTHER; i++)
        if (strcmp(own, p->rules->global[i].name) == 0 &&
            (!p->rules->global[i].module || strcmp(mod, p->rules->global[i].module) == 0))
            g.rule = i;
    if (ckpt_pm_check_id(m, p->globals.len) < 0)
        return -1;
    if (ckpt_vec_push(&p->globals, g) < 0)
        return ckpt_nomem(m->err);
    return push(m, ckpt_pv_make(CKPT_PV_GLOBAL, p->globals.len - 1));
}

static int stack_global(struct ckpt_pickle_machine *m)
{
    if (has(m, 2) < 0)
        return -1;
    ckpt_pv name = *top(m), module = *(top(m) - 1);
    if (ckpt_pv_kind(name) != CKPT_PV_STR || ckpt_pv_kind(module) != CKPT_PV_STR)
        return ckpt_fail(m->err, CKPT_FORMAT, "a global's name is not a string");
    m->stack.len -= 2;
    return push_global(m, (uint32_t)ckpt_pv_id(module), (uint32_t)ckpt_pv_id(name));
}

static int take_line(struct ckpt_pickle_machine *m, uint32_t *ret)
{
    size_t n = 0;

    for (;; n++) {
        if (n >= MAX_LINE)
            return ckpt_fail(m->err, CKPT_FORMAT, "a global's name has no end");
        if (need(m, n + 1) < 0)
            return -1;
        if (m->at[n] == '\n')
            break;
    }
    const char *line = (const char *)m->at;
    m->at += n + 1;
    return ckpt_pm_str(m, line, n, ret);
}

static int text_global(struct ckpt_pickle_machine *m)
{
    uint32_t module, name;

    return take_line(m, &module) < 0 || take_line(m, &name) < 0 ? -1 : push_global(m, module, name);
}

/* torch.Size((2, 3)), or of a list. */
static int make_size(struct ckpt_pickle_machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv arg = ckpt_pv_at(m->p, args, 0);

    if (ckpt_pv_kind(args) == CKPT_PV_INTS1) {
        *ret = arg;
        return 0;
    }
    if (ckpt_pv_len(m->p, args) != 1 || ckpt_pv_kind(arg) != CKPT_PV_LIST)
        return ckpt_pm_fail_kind(m, arg, "a size made from");
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(arg)];
    if (!ckpt_pm_all_ints(b->ptr, b->len))
        return ckpt_pm_fail_kind(m, arg, "a size made from");
    return ckpt_pm_ints(m, b->ptr, b->len, ret);
}

/* OrderedDict(), or OrderedDict([(key, value), ...]). */
static int make_dict(struct ckpt_pickle_machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv pairs = ckpt_pv_at(m->p, args, 0);

    if (ckpt_pm_box(m, CKPT_PV_DICT, ret) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_pv_len(m->p, pairs); i++) {
        ckpt_pv pair = ckpt_pv_at(m->p, pairs, i);
        if (ckpt_pv_len(m->p, pair) != 2)
            return ckpt_pm_fail_kind(m, pair, "a dict made from");
        ckpt_pv kv[2] = {ckpt_pv_at(m->p, pair, 0), ckpt_pv_at(m->p, pair, 1)};
        if (ckpt_pm_add(m, *ret, kv, 2) < 0)
            return -1;
    }
    return 0;
}

/* The result of calling a global, or making an object of it. */
static int call(struct ckpt_pickle_machine *m, ckpt_pv callable, ckpt_pv args, ckpt_pv *ret)
{
    int rule = ckpt_pv_rule(m->p, callable);

    if (ckpt_pv_kind(callable) == CKPT_PV_OPAQUE ||
        (ckpt_pv_kind(callable) == CKPT_PV_GLOBAL && rule == CKPT_PICKLE_OTHER)) {
        *ret = ckpt_pv_make(CKPT_PV_OPAQUE, ckpt_pv_id(callable));
        ckpt_pm_recycle(m, args);
        return 0;
    }
    if (ckpt_pv_kind(callable) != CKPT_PV_GLOBAL)
        return ckpt_pm_fail_kind(m, callable, "cannot call");
    if (!ckpt_pv_is_seq(args) || ckpt_pv_kind(args) == CKPT_PV_LIST)
        return ckpt_pm_fail_kind(m, args, "arguments that are");
    switch (m->p->rules->global[rule].role) {
    case CKPT_PICKLE_SIZE:
        return make_size(m, args, ret);
    case CKPT_PICKLE_DICT:
        return make_dict(m, args, ret);
    default:
        return ckpt_pm_obj(m, ckpt_pv_id(callable), rule, args, ret);
    }
}

/* REDUCE, NEWOBJ, NEWOBJ_EX: `n` values, which are class, arguments, and keyword arguments, which
 * are dropped. */
static int reduce(struct ckpt_pickle_machine *m, size_t n)
{
    ckpt_pv v;

    if (has(m, n) < 0 ||
        call(m, m->stack.ptr[m->stack.len - n], m->stack.ptr[m->stack.len - n + 1], &v) < 0)
        return -1;
    m->stack.len -= n;
    return push(m, v);
}

static int persistent_id(struct ckpt_pickle_machine *m)
{
    ckpt_pv v;

    if (!m->p->rules->persid)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "a persistent id is not expected here");
    if (has(m, 1) < 0 || ckpt_pm_obj(m, CKPT_PM_NO_GLOBAL, CKPT_PICKLE_PERSID, *top(m), &v) < 0)
        return -1;
    *top(m) = v;
    return 0;
}

/* The members of a state that have slots. */
static void fill_slots(struct ckpt_pickle_machine *m, ckpt_pv obj, int rule, ckpt_pv state)
{
    const uint32_t *name = m->slot_name.ptr + (size_t)rule * CKPT_PICKLE_MAX_SLOTS;
    unsigned nslot = ckpt_pickle_nslot(m->p, rule);
    uint64_t *slot = m->p->words.ptr + ckpt_pv_id(obj) + 1;

    for (size_t i = 0; i < ckpt_pv_npair(m->p, state); i++) {
        ckpt_pv key = ckpt_pv_key(m->p, state, i);
        for (unsigned k = 0; k < nslot; k++)
            if (key == ckpt_pv_make(CKPT_PV_STR, name[k]))
                slot[k] = ckpt_pv_value(m->p, state, i);
    }
}

static int build_obj(struct ckpt_pickle_machine *m, ckpt_pv obj, ckpt_pv state)
{
    int rule = ckpt_pv_rule(m->p, obj);

    if (rule < 0 || !m->p->rules->global[rule].slot) {
        m->p->words.ptr[ckpt_pv_id(obj) + 2] = state;
        return 0;
    }
    if (ckpt_pv_kind(state) == CKPT_PV_DICT) {
        fill_slots(m, obj, rule, state);
        ckpt_pm_recycle(m, state);
        return 0;
    }
    /* a class with __slots__: (members or None, slots) */
    if (ckpt_pv_kind(state) != CKPT_PV_TUPLE || ckpt_pv_len(m->p, state) != 2)
        return ckpt_pm_fail_kind(m, state, "the state of an object is");
    for (size_t i = 0; i < 2; i++)
        fill_slots(m, obj, rule, ckpt_pv_at(m->p, state, i));
    return 0;
}

static int build(struct ckpt_pickle_machine *m)
{
    if (has(m, 2) < 0)
        return -1;
    ckpt_pv state = *top(m), obj = *(top(m) - 1);
    m->stack.len--;
    switch (ckpt_pv_kind(obj)) {
    case CKPT_PV_OBJ:
        return build_obj(m, obj, state);
    case CKPT_PV_OPAQUE:
        ckpt_pm_recycle(m, state);
        return 0;
    case CKPT_PV_DICT: /* attributes of an OrderedDict, such as a state dict's _metadata */
        return 0;
    default:
        return ckpt_pm_fail_kind(m, obj, "cannot give a state to");
    }
}

/* ---- one opcode, and all ---- */

/* How many bytes of a number follow an opcode: of an integer, a length, or an entry of the memo. */
static const unsigned char width[256] = {
    [0x80] = 1, [0x95] = 8, ['K'] = 1, ['M'] = 2,  ['J'] = 4, [0x8a] = 1,
    [0x8b] = 4, [0x8c] = 1, ['X'] = 4, [0x8d] = 8, ['C'] = 1, ['B'] = 4,
    [0x8e] = 8, ['q'] = 1,  ['r'] = 4, ['h'] = 1,  ['j'] = 4};

static int step(struct ckpt_pickle_machine *m, unsigned char op)
{
    ckpt_pv *v;
    size_t n;

    if (need(m, width[op]) < 0)
        return -1;
    const uint64_t number = take_le(m, width[op]);
    switch (op) {
    case 0x80:
        return number >= 2 && number <= 5
                   ? 0
                   : ckpt_fail(m->err, CKPT_UNSUPPORTED, "pickle protocol %u is not supported",
                               (unsigned)number);
    case 0x95: /* the length of a frame */
        return number > left(m) ? fail_end(m) : 0;
    case '(':
        return push_mark(m);
    case '0':
        return pop(m);
    case '1':
        return pop_mark(m, &v, &n);
    case '2':
        return dup(m);
    case 'N':
        return push(m, ckpt_pv_make(CKPT_PV_NONE, 0));
    case 0x88:
    case 0x89:
        return push(m, ckpt_pv_make(CKPT_PV_BOOL, op == 0x88));
    case 'K':
    case 'M':
        return push_int(m, (int64_t)number);
    case 'J':
        return push_int(m, (int32_t)number);
    case 0x8a:
    case 0x8b:
        return push_long(m, number);
    case 'G':
        return push_float(m);
    case 0x8c:
    case 'X':
    case 0x8d:
        return push_str(m, number, CKPT_PV_STR);
    case 'C':
    case 'B':
    case 0x8e:
        return push_str(m, number, CKPT_PV_BYTES);
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
    case 'r':
        return put(m, number);
    case 'h':
    case 'j':
        return get(m, number);
    case 'c':
        return text_global(m);
    case 0x93:
        return stack_global(m);
    case 0x81:
    case 'R':
        return reduce(m, 2);
    case 0x92:
        return reduce(m, 3);
    case 'b':
        return build(m);
    case 'Q':
        return persistent_id(m);
    default:
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "pickle opcode 0x%02x is not supported", op);
    }
}

static int run(struct ckpt_pickle_machine *m)
{
    if (need(m, 2) < 0)
        return -1;
    if (*m->at != 0x80)
        return ckpt_refuse_stand_in(m->at, (size_t)(m->stop - m->at), m->err) < 0
                   ? -1
                   : ckpt_fail(m->err, CKPT_FORMAT, "is not a pickle of protocol 2 or later");
    for (;;) {
        uint64_t off = m->pos - (uint64_t)(m->stop - m->at) - m->begin;
        if (need(m, 1) < 0)
            return ckpt_err_in(m->err, "byte %" PRIu64, off);
        unsigned char op = *m->at++;
        if (op == '.')
            break;
        if (step(m, op) < 0)
            return ckpt_err_in(m->err, "byte %" PRIu64, off);
    }
    if (has(m, 1) < 0)
        return -1;
    m->p->root = *top(m);
    return 0;
}

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
    m.buf_cap = (size_t)ckpt_min_u64(len + 1, WINDOW);
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
