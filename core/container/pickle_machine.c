/* SPDX-License-Identifier: Apache-2.0 */
/* The pickle's stack machine. Opcodes and their meaning: CPython's Lib/pickletools.py. */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/ckd.h"
#include "base/crc32.h"
#include "container/pickle.h"

enum {
    WINDOW = 256 * 1024,
    FIRST_STACK = 64,
    MAX_LINE = 4096,           /* of GLOBAL's two names */
    NO_GLOBAL = (1 << 28) - 1, /* an opaque value that has no name */
    MAX_ID = NO_GLOBAL - 1,    /* what a memo entry can hold */
    KEPT_CAP = 64,             /* room that an emptied box keeps */
};

struct machine {
    struct ckpt_pickle *p;
    struct ckpt_err *err;
    /* input: the window, and what follows it */
    const unsigned char *at, *stop;
    uint64_t pos, end; /* of `stop`, and of the pickle, in the source */
    struct ckpt_source *source;
    unsigned char *buf;
    size_t buf_cap;
    uint32_t *crc; /* of all that was read; or NULL */
    uint64_t begin;
    /* stack */
    CKPT_VEC(ckpt_pv) stack;
    CKPT_VEC(uint32_t) marks;
    size_t floor;            /* the innermost mark */
    CKPT_VEC(uint32_t) memo; /* values whose id fits 28 bits; 0: none */
    CKPT_VEC(uint32_t) free_boxes;
    /* tuples of integers that there are: their place + 1 */
    uint32_t *tuple;
    size_t tuple_cap, ntuple;
    CKPT_VEC(uint32_t) slot_name; /* CKPT_PICKLE_MAX_SLOTS strings for each row of the table */
};

static void machine_release(struct machine *m)
{
    free(m->buf);
    free(m->tuple);
    ckpt_vec_release(&m->stack);
    ckpt_vec_release(&m->marks);
    ckpt_vec_release(&m->memo);
    ckpt_vec_release(&m->free_boxes);
    ckpt_vec_release(&m->slot_name);
}

/* ---- input ---- */

static uint64_t left(const struct machine *m)
{
    return (uint64_t)(m->stop - m->at) + (m->end - m->pos);
}

static int fail_end(struct machine *m)
{
    return ckpt_fail(m->err, CKPT_FORMAT, "the pickle ends in the middle");
}

/* Have at least n bytes in the window. */
static int refill(struct machine *m, size_t n)
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
    if (ckpt_source_pread(m->source, m->buf + have, more, m->pos, m->err) < 0)
        return -1;
    if (m->crc)
        *m->crc = ckpt_crc32(*m->crc, m->stop, more);
    m->stop += more;
    m->pos += more;
    return 0;
}

static inline int need(struct machine *m, size_t n)
{
    return (size_t)(m->stop - m->at) >= n ? 0 : refill(m, n);
}

static inline uint64_t take_le(struct machine *m, unsigned n)
{
    uint64_t v = 0;

    for (unsigned i = 0; i < n; i++)
        v |= (uint64_t)m->at[i] << 8 * i;
    m->at += n;
    return v;
}

/* A length of n bytes, and then as many bytes. */
static int take_counted(struct machine *m, unsigned n, const char **ret, size_t *ret_len)
{
    if (need(m, n) < 0)
        return -1;
    uint64_t len = take_le(m, n);
    if (len > left(m))
        return fail_end(m);
    if (len > CKPT_PICKLE_MAX_STRING)
        return ckpt_fail(m->err, CKPT_LIMIT, "a string of %" PRIu64 " bytes, at most %d are read",
                         len, CKPT_PICKLE_MAX_STRING);
    if (need(m, (size_t)len) < 0)
        return -1;
    *ret = (const char *)m->at;
    *ret_len = (size_t)len;
    m->at += len;
    return 0;
}

/* ---- stack ---- */

static inline int push(struct machine *m, ckpt_pv v)
{
    if (m->stack.len >= CKPT_PICKLE_MAX_STACK)
        return ckpt_fail(m->err, CKPT_LIMIT, "more than %d values on the stack",
                         CKPT_PICKLE_MAX_STACK);
    return ckpt_vec_push(&m->stack, v) < 0 ? ckpt_nomem(m->err) : 0;
}

static inline int has(struct machine *m, size_t n)
{
    return m->stack.len - m->floor >= n
               ? 0
               : ckpt_fail(m->err, CKPT_FORMAT, "takes more values than there are");
}

static inline ckpt_pv *top(struct machine *m) { return &m->stack.ptr[m->stack.len - 1]; }

static int push_mark(struct machine *m)
{
    if (m->marks.len >= CKPT_PICKLE_MAX_MARKS)
        return ckpt_fail(m->err, CKPT_LIMIT, "nests deeper than %d", CKPT_PICKLE_MAX_MARKS);
    if (ckpt_vec_push(&m->marks, (uint32_t)m->stack.len) < 0)
        return ckpt_nomem(m->err);
    m->floor = m->stack.len;
    return 0;
}

/* The values above the mark, which goes; they stay readable until the next push. */
static int pop_mark(struct machine *m, ckpt_pv **ret, size_t *ret_n)
{
    if (m->marks.len == 0)
        return ckpt_fail(m->err, CKPT_FORMAT, "there is no mark");
    size_t at = m->marks.ptr[--m->marks.len];
    m->floor = m->marks.len ? m->marks.ptr[m->marks.len - 1] : 0;
    *ret = m->stack.ptr + at;
    *ret_n = m->stack.len - at;
    m->stack.len = at;
    return 0;
}

/* ---- what is kept ---- */

static int check_id(struct machine *m, size_t id)
{
    return id <= MAX_ID ? 0
                        : ckpt_fail(m->err, CKPT_LIMIT, "a pickle of more than %d values", MAX_ID);
}

static int intern_str(struct machine *m, const char *ptr, size_t len, uint32_t *ret)
{
    struct ckpt_pickle *p = m->p;
    struct ckpt_pickle_str str = {NULL, (uint32_t)len};
    bool is_new;

    if (ckpt_map_get(&p->str_ids, ptr, len, ret))
        return 0;
    if (check_id(m, p->strs.len) < 0)
        return -1;
    if (!(str.ptr = ckpt_arena_strndup(&p->text, ptr, len)) || ckpt_vec_reserve(&p->strs, 1) < 0 ||
        ckpt_map_put(&p->str_ids, str.ptr, len, (uint32_t)p->strs.len, ret, &is_new) < 0)
        return ckpt_nomem(m->err);
    p->strs.ptr[p->strs.len++] = str;
    return 0;
}

static int push_str(struct machine *m, unsigned width, enum ckpt_pv_kind kind)
{
    const char *ptr;
    uint32_t id;
    size_t len;

    if (take_counted(m, width, &ptr, &len) < 0 || intern_str(m, ptr, len, &id) < 0)
        return -1;
    return push(m, ckpt_pv_make(kind, id));
}

static int grow_tuples(struct machine *m)
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

/* The tuple of these INT values, kept once. */
static int make_ints(struct machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret)
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
    if (check_id(m, at) < 0)
        return -1;
    m->tuple[h] = (uint32_t)at + 1;
    m->ntuple++;
    p->ints.len += n + 1;
    *ret = ckpt_pv_make(CKPT_PV_INTS, at);
    return 0;
}

static bool all_ints(const ckpt_pv *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ckpt_pv_kind(v[i]) != CKPT_PV_INT)
            return false;
    return true;
}

/* v may be part of the stack. */
static int make_tuple(struct machine *m, const ckpt_pv *v, size_t n, ckpt_pv *ret)
{
    struct ckpt_pickle *p = m->p;
    size_t at = p->words.len;

    if (all_ints(v, n))
        return make_ints(m, v, n, ret);
    if (n == 1 && ckpt_pv_kind(v[0]) == CKPT_PV_INTS) {
        *ret = ckpt_pv_make(CKPT_PV_INTS1, ckpt_pv_id(v[0]));
        return 0;
    }
    if (check_id(m, at) < 0)
        return -1;
    if (ckpt_vec_reserve(&p->words, n + 1) < 0)
        return ckpt_nomem(m->err);
    p->words.ptr[at] = n;
    memcpy(p->words.ptr + at + 1, v, n * sizeof *v);
    p->words.len += n + 1;
    *ret = ckpt_pv_make(CKPT_PV_TUPLE, at);
    return 0;
}

static int tuple_of_top(struct machine *m, size_t n)
{
    ckpt_pv t;

    if (has(m, n) < 0 || make_tuple(m, m->stack.ptr + m->stack.len - n, n, &t) < 0)
        return -1;
    m->stack.len -= n;
    return push(m, t);
}

static int tuple_of_mark(struct machine *m)
{
    ckpt_pv *v = NULL, t;
    size_t n = 0;

    return pop_mark(m, &v, &n) < 0 || make_tuple(m, v, n, &t) < 0 ? -1 : push(m, t);
}

static int make_obj(struct machine *m, uint64_t global, int rule, ckpt_pv args, ckpt_pv *ret)
{
    struct ckpt_pickle *p = m->p;
    unsigned n = ckpt_pickle_nslot(p, rule);
    size_t at = p->words.len;

    if (check_id(m, at) < 0)
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

/* ---- boxes: lists and dicts ---- */

static bool is_box(ckpt_pv v)
{
    return ckpt_pv_kind(v) == CKPT_PV_LIST || ckpt_pv_kind(v) == CKPT_PV_DICT;
}

static int new_box(struct machine *m, enum ckpt_pv_kind kind, ckpt_pv *ret)
{
    struct ckpt_pickle_box *box;
    size_t id = m->p->boxes.len;

    if (m->free_boxes.len) {
        id = m->free_boxes.ptr[--m->free_boxes.len];
    } else if (check_id(m, id) < 0) {
        return -1;
    } else if (ckpt_vec_add(&m->p->boxes, &box) < 0) {
        return ckpt_nomem(m->err);
    }
    *ret = ckpt_pv_make(kind, id);
    return 0;
}

static int push_box(struct machine *m, enum ckpt_pv_kind kind)
{
    ckpt_pv v;
    return new_box(m, kind, &v) < 0 ? -1 : push(m, v);
}

static int box_add(struct machine *m, ckpt_pv box, const ckpt_pv *v, size_t n)
{
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(box)];
    size_t cap = b->cap;

    if (n > UINT32_MAX / 2 - b->len)
        return ckpt_fail(m->err, CKPT_LIMIT, "a list or dict of more than 2^31 values");
    if (b->len + n > cap && cap == 0) { /* as much as comes at once: most get no more */
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

/* A dict or list that is used up. If nobody else can have it, the next one takes its place, and
 * the memo forgets it. */
static void recycle(struct machine *m, ckpt_pv v)
{
    if (!is_box(v))
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

static int fail_kind(struct machine *m, ckpt_pv v, const char *what)
{
    char text[CKPT_PV_TEXT];
    return ckpt_fail(m->err, CKPT_FORMAT, "%s %s", what, ckpt_pv_text(m->p, v, text, sizeof text));
}

/* Values go into the container below them; into a foreign object they vanish. */
static int add_to_top(struct machine *m, const ckpt_pv *v, size_t n, enum ckpt_pv_kind kind)
{
    if (has(m, 1) < 0)
        return -1;
    if (ckpt_pv_kind(*top(m)) == kind)
        return box_add(m, *top(m), v, n);
    return ckpt_pv_kind(*top(m)) == CKPT_PV_OPAQUE
               ? 0
               : fail_kind(m, *top(m), "cannot put members into");
}

static int add_marked(struct machine *m, enum ckpt_pv_kind kind)
{
    ckpt_pv *v = NULL;
    size_t n = 0;

    if (pop_mark(m, &v, &n) < 0)
        return -1;
    if (kind == CKPT_PV_DICT && n % 2)
        return ckpt_fail(m->err, CKPT_FORMAT, "a key without a value");
    return add_to_top(m, v, n, kind);
}

static int add_few(struct machine *m, size_t n, enum ckpt_pv_kind kind)
{
    if (has(m, n + 1) < 0)
        return -1;
    m->stack.len -= n;
    return add_to_top(m, m->stack.ptr + m->stack.len, n, kind);
}

static int frozenset(struct machine *m)
{
    ckpt_pv *v = NULL, box;
    size_t n = 0;

    if (pop_mark(m, &v, &n) < 0 || new_box(m, CKPT_PV_LIST, &box) < 0 || box_add(m, box, v, n) < 0)
        return -1;
    return push(m, box);
}

/* ---- memo ---- */

static int put(struct machine *m, uint64_t index)
{
    if (has(m, 1) < 0)
        return -1;
    ckpt_pv v = *top(m);
    if (index >= m->end - m->begin) /* each needs an opcode */
        return ckpt_fail(m->err, CKPT_LIMIT,
                         "memo entry %" PRIu64 " of a pickle of %" PRIu64 " bytes", index,
                         m->end - m->begin);
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
    if (is_box(v)) {
        struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(v)];
        b->shared |= b->memo != 0;
        b->memo = (uint32_t)index + 1;
    }
    return 0;
}

static void share(struct machine *m, ckpt_pv v)
{
    if (is_box(v))
        m->p->boxes.ptr[ckpt_pv_id(v)].shared = true;
}

static int get(struct machine *m, uint64_t index)
{
    if (index >= m->memo.len || m->memo.ptr[index] == 0)
        return ckpt_fail(m->err, CKPT_FORMAT, "memo entry %" PRIu64 " is not there", index);
    share(m, m->memo.ptr[index]);
    return push(m, m->memo.ptr[index]);
}

/* ---- globals and objects ---- */

static int push_global(struct machine *m, uint32_t module, uint32_t name)
{
    struct ckpt_pickle *p = m->p;
    const char *mod = p->strs.ptr[module].ptr, *own = p->strs.ptr[name].ptr;
    struct ckpt_pickle_name g = {module, name, CKPT_PICKLE_OTHER};

    for (int i = 0; p->rules->global[i].name && g.rule == CKPT_PICKLE_OTHER; i++)
        if (strcmp(own, p->rules->global[i].name) == 0 &&
            (!p->rules->global[i].module || strcmp(mod, p->rules->global[i].module) == 0))
            g.rule = i;
    if (check_id(m, p->globals.len) < 0)
        return -1;
    if (ckpt_vec_push(&p->globals, g) < 0)
        return ckpt_nomem(m->err);
    return push(m, ckpt_pv_make(CKPT_PV_GLOBAL, p->globals.len - 1));
}

static int stack_global(struct machine *m)
{
    if (has(m, 2) < 0)
        return -1;
    ckpt_pv name = *top(m), module = *(top(m) - 1);
    if (ckpt_pv_kind(name) != CKPT_PV_STR || ckpt_pv_kind(module) != CKPT_PV_STR)
        return ckpt_fail(m->err, CKPT_FORMAT, "a global's name is not a string");
    m->stack.len -= 2;
    return push_global(m, (uint32_t)ckpt_pv_id(module), (uint32_t)ckpt_pv_id(name));
}

static int take_line(struct machine *m, uint32_t *ret)
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
    return intern_str(m, line, n, ret);
}

static int text_global(struct machine *m)
{
    uint32_t module, name;

    return take_line(m, &module) < 0 || take_line(m, &name) < 0 ? -1 : push_global(m, module, name);
}

/* torch.Size((2, 3)), or of a list. */
static int make_size(struct machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv arg = ckpt_pv_at(m->p, args, 0);

    if (ckpt_pv_kind(args) == CKPT_PV_INTS1) {
        *ret = arg;
        return 0;
    }
    if (ckpt_pv_len(m->p, args) != 1 || ckpt_pv_kind(arg) != CKPT_PV_LIST)
        return fail_kind(m, arg, "a size made from");
    struct ckpt_pickle_box *b = &m->p->boxes.ptr[ckpt_pv_id(arg)];
    if (!all_ints(b->ptr, b->len))
        return fail_kind(m, arg, "a size made from");
    return make_ints(m, b->ptr, b->len, ret);
}

/* OrderedDict(), or OrderedDict([(key, value), ...]). */
static int make_dict(struct machine *m, ckpt_pv args, ckpt_pv *ret)
{
    ckpt_pv pairs = ckpt_pv_at(m->p, args, 0);

    if (new_box(m, CKPT_PV_DICT, ret) < 0)
        return -1;
    for (size_t i = 0; i < ckpt_pv_len(m->p, pairs); i++) {
        ckpt_pv pair = ckpt_pv_at(m->p, pairs, i);
        if (ckpt_pv_len(m->p, pair) != 2)
            return fail_kind(m, pair, "a dict made from");
        ckpt_pv kv[2] = {ckpt_pv_at(m->p, pair, 0), ckpt_pv_at(m->p, pair, 1)};
        if (box_add(m, *ret, kv, 2) < 0)
            return -1;
    }
    return 0;
}

/* The result of calling a global, or making an object of it. */
static int call(struct machine *m, ckpt_pv callable, ckpt_pv args, ckpt_pv *ret)
{
    int rule = ckpt_pv_rule(m->p, callable);

    if (ckpt_pv_kind(callable) == CKPT_PV_OPAQUE ||
        (ckpt_pv_kind(callable) == CKPT_PV_GLOBAL && rule == CKPT_PICKLE_OTHER)) {
        *ret = ckpt_pv_make(CKPT_PV_OPAQUE, ckpt_pv_id(callable));
        recycle(m, args);
        return 0;
    }
    if (ckpt_pv_kind(callable) != CKPT_PV_GLOBAL)
        return fail_kind(m, callable, "cannot call");
    if (!ckpt_pv_is_seq(args) || ckpt_pv_kind(args) == CKPT_PV_LIST)
        return fail_kind(m, args, "arguments that are");
    switch (m->p->rules->global[rule].role) {
    case CKPT_PICKLE_SIZE:
        return make_size(m, args, ret);
    case CKPT_PICKLE_DICT:
        return make_dict(m, args, ret);
    default:
        return make_obj(m, ckpt_pv_id(callable), rule, args, ret);
    }
}

/* `n` values: class, arguments, and keyword arguments, which are dropped. */
static int reduce(struct machine *m, size_t n)
{
    ckpt_pv v;

    if (has(m, n) < 0 ||
        call(m, m->stack.ptr[m->stack.len - n], m->stack.ptr[m->stack.len - n + 1], &v) < 0)
        return -1;
    m->stack.len -= n;
    return push(m, v);
}

static int persistent_id(struct machine *m)
{
    ckpt_pv v;

    if (!m->p->rules->persid)
        return ckpt_fail(m->err, CKPT_UNSUPPORTED, "a persistent id is not expected here");
    if (has(m, 1) < 0 || make_obj(m, NO_GLOBAL, CKPT_PICKLE_PERSID, *top(m), &v) < 0)
        return -1;
    *top(m) = v;
    return 0;
}

/* The members of a state that have slots. */
static void fill_slots(struct machine *m, ckpt_pv obj, int rule, ckpt_pv state)
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

static int build_obj(struct machine *m, ckpt_pv obj, ckpt_pv state)
{
    int rule = ckpt_pv_rule(m->p, obj);

    if (rule < 0 || !m->p->rules->global[rule].slot) {
        m->p->words.ptr[ckpt_pv_id(obj) + 2] = state;
        return 0;
    }
    if (ckpt_pv_kind(state) == CKPT_PV_DICT) {
        fill_slots(m, obj, rule, state);
        recycle(m, state);
        return 0;
    }
    /* a class with __slots__: (members or None, slots) */
    if (ckpt_pv_kind(state) != CKPT_PV_TUPLE || ckpt_pv_len(m->p, state) != 2)
        return fail_kind(m, state, "the state of an object is");
    for (size_t i = 0; i < 2; i++)
        fill_slots(m, obj, rule, ckpt_pv_at(m->p, state, i));
    return 0;
}

static int build(struct machine *m)
{
    if (has(m, 2) < 0)
        return -1;
    ckpt_pv state = *top(m), obj = *(top(m) - 1);
    m->stack.len--;
    switch (ckpt_pv_kind(obj)) {
    case CKPT_PV_OBJ:
        return build_obj(m, obj, state);
    case CKPT_PV_OPAQUE:
        recycle(m, state);
        return 0;
    case CKPT_PV_DICT: /* attributes of an OrderedDict, such as a state dict's _metadata */
        return 0;
    default:
        return fail_kind(m, obj, "cannot give a state to");
    }
}

/* ---- numbers ---- */

static int push_int(struct machine *m, int64_t v)
{
    if (v >= INT64_C(1) << 59 || v < -(INT64_C(1) << 59))
        return push(m, ckpt_pv_make(CKPT_PV_OPAQUE, NO_GLOBAL));
    return push(m, ckpt_pv_make(CKPT_PV_INT, (uint64_t)v));
}

/* Two's complement, little-endian. */
static int push_long(struct machine *m, unsigned width)
{
    const char *ptr;
    uint64_t v = 0;
    size_t len;

    if (take_counted(m, width, &ptr, &len) < 0)
        return -1;
    if (len > 8)
        return push(m, ckpt_pv_make(CKPT_PV_OPAQUE, NO_GLOBAL));
    for (size_t i = 0; i < len; i++)
        v |= (uint64_t)(unsigned char)ptr[i] << 8 * i;
    if (len > 0 && len < 8 && ptr[len - 1] & 0x80)
        v |= ~UINT64_C(0) << 8 * len;
    return push_int(m, (int64_t)v);
}

static int push_float(struct machine *m)
{
    uint64_t bits = 0;
    double d;

    if (need(m, 8) < 0)
        return -1;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | *m->at++;
    memcpy(&d, &bits, sizeof d);
    if (check_id(m, m->p->floats.len) < 0)
        return -1;
    if (ckpt_vec_push(&m->p->floats, d) < 0)
        return ckpt_nomem(m->err);
    return push(m, ckpt_pv_make(CKPT_PV_FLOAT, m->p->floats.len - 1));
}

/* ---- the loop ---- */

static int pop(struct machine *m)
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

static int dup(struct machine *m)
{
    if (has(m, 1) < 0)
        return -1;
    share(m, *top(m));
    return push(m, *top(m));
}

static int proto(struct machine *m)
{
    if (need(m, 1) < 0)
        return -1;
    unsigned v = *m->at++;
    return v >= 2 && v <= 5 ? 0 : ckpt_fail(m->err, CKPT_UNSUPPORTED, "pickle protocol %u", v);
}

static int frame(struct machine *m)
{
    if (need(m, 8) < 0)
        return -1;
    return take_le(m, 8) > left(m) ? fail_end(m) : 0;
}

static int step(struct machine *m, unsigned char op)
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
        return push(m, ckpt_pv_make(CKPT_PV_NONE, 0));
    case 0x88:
    case 0x89:
        return push(m, ckpt_pv_make(CKPT_PV_BOOL, op == 0x88));
    case 'K':
        return need(m, 1) < 0 ? -1 : push_int(m, (int64_t)take_le(m, 1));
    case 'M':
        return need(m, 2) < 0 ? -1 : push_int(m, (int64_t)take_le(m, 2));
    case 'J':
        return need(m, 4) < 0 ? -1 : push_int(m, (int32_t)take_le(m, 4));
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
        return need(m, 1) < 0 ? -1 : put(m, take_le(m, 1));
    case 'r':
        return need(m, 4) < 0 ? -1 : put(m, take_le(m, 4));
    case 'h':
        return need(m, 1) < 0 ? -1 : get(m, take_le(m, 1));
    case 'j':
        return need(m, 4) < 0 ? -1 : get(m, take_le(m, 4));
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

static int run(struct machine *m)
{
    if (need(m, 2) < 0)
        return -1;
    if (*m->at != 0x80)
        return ckpt_fail(m->err, CKPT_FORMAT, "is no pickle of protocol 2 or later");
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

/* The strings that name slots have known numbers, so that a state's keys are compared as such. */
static int intern_slots(struct machine *m)
{
    const struct ckpt_pickle_global *g = m->p->rules->global;

    for (; g->name; g++) {
        unsigned n = 0;
        for (; g->slot && g->slot[n]; n++) {
            uint32_t id;
            assert(n < CKPT_PICKLE_MAX_SLOTS);
            if (intern_str(m, g->slot[n], strlen(g->slot[n]), &id) < 0)
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

static int parse(struct machine *m, const struct ckpt_pickle_rules *rules, struct ckpt_pickle *ret)
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
    struct machine m = {.err = err,
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
        return ckpt_fail(err, CKPT_FORMAT, "the pickle ends long before its %" PRIu64 " bytes do",
                         len);
    }
    if (ret_crc)
        *ret_crc = crc;
    return 0;
}

int ckpt_pickle_parse(const void *data, size_t len, const struct ckpt_pickle_rules *rules,
                      struct ckpt_pickle *ret, struct ckpt_err *err)
{
    struct machine m = {.err = err, .at = data, .pos = len, .end = len};

    m.stop = m.at + len;
    return parse(&m, rules, ret);
}

ckpt_pv ckpt_pickle_pack(struct ckpt_pickle *p, ckpt_pv seq)
{
    size_t n = ckpt_pv_len(p, seq), at = p->ints.len;

    if (ckpt_pv_kind(seq) == CKPT_PV_INTS)
        return seq;
    if (!ckpt_pv_is_seq(seq) || at > MAX_ID || ckpt_vec_reserve(&p->ints, n + 1) < 0)
        return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    p->ints.ptr[at] = (int64_t)n;
    for (size_t i = 0; i < n; i++)
        if (!ckpt_pv_int(ckpt_pv_at(p, seq, i), &p->ints.ptr[at + 1 + i]))
            return ckpt_pv_make(CKPT_PV_ABSENT, 0);
    p->ints.len += n + 1;
    return ckpt_pv_make(CKPT_PV_INTS, at);
}
