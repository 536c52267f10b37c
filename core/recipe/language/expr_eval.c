/* SPDX-License-Identifier: Apache-2.0 */
/* Evaluating an expression's tree with three-valued logic. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/vec.h"
#include "recipe/language/expr.h"
#include "recipe/language/expr_node.h"

enum { MAX_LIST = 1 << 16, FUEL = 1 << 22 };

/* A name that each() and where() bind. */
struct local {
    const char *name;
    json_int_t value;
    const struct local *up;
};

struct eval {
    const struct ckpt_expr_env *env;
    const struct local *local;
    unsigned fuel; /* bounds the work that a hostile config can cause */
    /* the last layers() and its value, because each() evaluates it repeatedly */
    const struct ckpt_expr *layers;
    json_t *layers_value;
};

static json_t *eval(struct eval *ev, const struct ckpt_expr *e);

/* Subtract n steps from the budget; false: it is used up. */
static bool burn(struct eval *ev, size_t n)
{
    bool enough = n < ev->fuel;

    ev->fuel -= enough ? (unsigned)n : ev->fuel;
    return enough;
}

/* Subtract a search through all names, which compares little of each. */
static bool burn_names(struct eval *ev)
{
    return ev->env->cat && burn(ev, ev->env->cat->tensors.len / 64);
}

static enum ckpt_truth truth(const json_t *v)
{
    if (!v || json_is_null(v))
        return CKPT_UNKNOWN;
    if (json_is_boolean(v))
        return json_is_true(v) ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_integer(v))
        return json_integer_value(v) ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_real(v))
        return json_real_value(v) != 0 ? CKPT_TRUE : CKPT_FALSE;
    if (json_is_string(v))
        return json_string_length(v) ? CKPT_TRUE : CKPT_FALSE;
    return (json_is_array(v) ? json_array_size(v) : json_object_size(v)) ? CKPT_TRUE : CKPT_FALSE;
}

static json_t *truth_value(enum ckpt_truth t)
{
    return t == CKPT_UNKNOWN ? NULL : json_boolean(t == CKPT_TRUE);
}

static enum ckpt_truth eval_truth(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e);

    return truth(v);
}

static json_t *eval_key(struct eval *ev, const char *key)
{
    for (const struct local *l = ev->local; l; l = l->up)
        if (strcmp(l->name, key) == 0)
            return json_integer(l->value);
    ckpt_cleanup(ckpt_json_decrefp) json_t *v =
        ev->env->get ? ev->env->get(ev->env->ctx, key) : NULL;
    return json_is_null(v) ? NULL : ckpt_steal(&v);
}

static json_t *arithmetic_int(enum ckpt_expr_op op, json_int_t a, json_int_t b)
{
    json_int_t r = 0;
    bool bad = false;

    if ((op == CKPT_OP_DIV || op == CKPT_OP_MOD) && (b == 0 || (b == -1 && a == INT64_MIN)))
        return NULL;
    switch (op) {
    case CKPT_OP_ADD:
        bad = ckd_add(&r, a, b);
        break;
    case CKPT_OP_SUB:
        bad = ckd_sub(&r, a, b);
        break;
    case CKPT_OP_MUL:
        bad = ckd_mul(&r, a, b);
        break;
    case CKPT_OP_MOD: /* as in Python, the result has the sign of b */
        r = a % b;
        if (r && (r < 0) != (b < 0))
            r += b;
        break;
    default:
        if (a % b)
            return json_real((double)a / (double)b);
        r = a / b;
    }
    return bad ? NULL : json_integer(r);
}

static json_t *arithmetic(enum ckpt_expr_op op, const json_t *a, const json_t *b)
{
    if (json_is_integer(a) && json_is_integer(b))
        return arithmetic_int(op, json_integer_value(a), json_integer_value(b));
    if (!json_is_number(a) || !json_is_number(b))
        return NULL;
    double x = json_number_value(a), y = json_number_value(b), r;
    switch (op) {
    case CKPT_OP_ADD:
        r = x + y;
        break;
    case CKPT_OP_SUB:
        r = x - y;
        break;
    case CKPT_OP_MUL:
        r = x * y;
        break;
    case CKPT_OP_DIV:
        r = x / y; /* not finite for y = 0 */
        break;
    default:
        return NULL;
    }
    return isfinite(r) ? json_real(r) : NULL;
}

static json_t *compare(enum ckpt_expr_op op, const json_t *a, const json_t *b)
{
    int c;

    if (op == CKPT_OP_EQ || op == CKPT_OP_NE)
        return json_boolean(ckpt_json_same(a, b) == (op == CKPT_OP_EQ));
    if (json_is_integer(a) && json_is_integer(b)) {
        json_int_t x = json_integer_value(a), y = json_integer_value(b);
        c = (x > y) - (x < y);
    } else if (json_is_number(a) && json_is_number(b)) {
        double x = json_number_value(a), y = json_number_value(b);
        c = (x > y) - (x < y);
    } else {
        return NULL;
    }
    return json_boolean(op == CKPT_OP_LT   ? c < 0
                        : op == CKPT_OP_LE ? c <= 0
                        : op == CKPT_OP_GT ? c > 0
                                           : c >= 0);
}

static json_t *eval_in(struct eval *ev, const json_t *a, const json_t *list)
{
    size_t i;
    json_t *v;

    if (!json_is_array(list) || !burn(ev, json_array_size(list)))
        return NULL;
    json_array_foreach(list, i, v)
        if (ckpt_json_same(a, v))
            return json_true();
    return json_false();
}

static json_t *eval_binary(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *a = eval(ev, e->args[0]);
    ckpt_cleanup(ckpt_json_decrefp) json_t *b = eval(ev, e->args[1]);

    if (!a || !b)
        return NULL;
    if (e->op == CKPT_OP_IN)
        return eval_in(ev, a, b);
    return e->op >= CKPT_OP_EQ ? compare(e->op, a, b) : arithmetic(e->op, a, b);
}

static json_t *eval_logic(struct eval *ev, const struct ckpt_expr *e)
{
    const enum ckpt_truth decides = e->op == CKPT_OP_OR ? CKPT_TRUE : CKPT_FALSE;
    enum ckpt_truth a = eval_truth(ev, e->args[0]);

    if (a == decides)
        return truth_value(a);
    enum ckpt_truth b = eval_truth(ev, e->args[1]);
    if (b == decides)
        return truth_value(b);
    return truth_value(a == CKPT_UNKNOWN ? a : b);
}

static bool any_match(const struct ckpt_expr *e, const char *name,
                      uint64_t value[CKPT_NAME_NUMBERS])
{
    size_t len = strlen(name);

    for (uint32_t i = 0; i < e->nname; i++)
        if (ckpt_name_match(&e->name[i], name, len, value))
            return true;
    return false;
}

static const struct ckpt_tensor *find_tensor(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_catalog *cat = ev->env->cat;
    uint64_t value[CKPT_NAME_NUMBERS];

    if (!cat)
        return NULL;
    for (uint32_t i = 0; i < e->nname; i++) {
        const struct ckpt_name *n = &e->name[i];
        const struct ckpt_tensor *t;
        if (n->npart == 1 && n->part[0].text && (t = ckpt_catalog_find(cat, n->part[0].text)))
            return t;
    }
    for (size_t i = 0; i < cat->tensors.len && (i > 0 || burn_names(ev)); i++)
        if (any_match(e, cat->tensors.ptr[i].name, value))
            return &cat->tensors.ptr[i];
    return NULL;
}

/* The values of the first number in the matching names, ascending, each once. */
static json_t *eval_layers(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_catalog *cat = ev->env->cat;
    uint64_t value[CKPT_NAME_NUMBERS] = {0};
    ckpt_cleanup(ckpt_vec_cleanup) CKPT_VEC(uint64_t) found = {0};

    if (ev->layers == e)
        return json_incref(ev->layers_value);
    json_t *list = burn_names(ev) ? json_array() : NULL;
    for (size_t i = 0; list && i < cat->tensors.len; i++)
        if (any_match(e, cat->tensors.ptr[i].name, value) && ckpt_vec_push(&found, value[0]) < 0)
            break;
    ckpt_sort(found.ptr, found.len, ckpt_u64s_cmp);
    for (size_t i = 0; list && i < found.len; i++)
        if (i == 0 || found.ptr[i] != found.ptr[i - 1])
            ckpt_json_append(&list, json_integer((json_int_t)found.ptr[i]));
    json_decref(ev->layers_value);
    ev->layers = e;
    ev->layers_value = json_incref(list);
    return list;
}

/* shape(): of the whole tensor, which is not known for a ranked tensor; part(): of one rank's part.
 */
static json_t *eval_shape(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_tensor *t = find_tensor(ev, e);
    ckpt_cleanup(ckpt_json_decrefp) json_t *d = eval(ev, e->args[0]);

    if (!t || !json_is_integer(d) || json_integer_value(d) < 0 ||
        (t->ranks && e->call == CKPT_CALL_SHAPE))
        return NULL;
    uint64_t i = (uint64_t)json_integer_value(d) + (t->ranks != 0);
    return i < t->rank && t->dim[i] <= INT64_MAX ? json_integer((json_int_t)t->dim[i]) : NULL;
}

/* each(i, n, e): the values of e. where(i, n, e): the i for which e is true. Unknown if any of them
 * is. */
static json_t *eval_list(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *n = eval(ev, e->args[0]);
    struct local l = {.name = e->text, .up = ev->local};
    ckpt_cleanup(ckpt_json_decrefp) json_t *list = json_array();
    bool ok = list && json_is_integer(n) && json_integer_value(n) <= MAX_LIST;

    ev->local = &l;
    for (; ok && l.value < json_integer_value(n); l.value++) {
        ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->args[1]);
        if (!v || (e->call == CKPT_CALL_WHERE && truth(v) == CKPT_UNKNOWN))
            ok = false;
        else if (e->call == CKPT_CALL_EACH)
            ok = json_array_append(list, v) == 0;
        else if (truth(v) == CKPT_TRUE)
            ok = json_array_append_new(list, json_integer(l.value)) == 0;
    }
    ev->local = l.up;
    return ok ? ckpt_steal(&list) : NULL;
}

static json_t *to_number(enum ckpt_expr_call call, const json_t *v)
{
    const double r = json_number_value(v);

    if (json_is_boolean(v) && call == CKPT_CALL_INT)
        return json_integer(json_is_true(v));
    if (!json_is_number(v))
        return NULL;
    if (call == CKPT_CALL_SQRT)
        return r >= 0 ? json_real(sqrt(r)) : NULL;
    if (call == CKPT_CALL_FLOAT)
        return json_real(r);
    if (json_is_integer(v))
        return json_integer(json_integer_value(v));
    return r >= -0x1p62 && r <= 0x1p62 ? json_integer((json_int_t)r) : NULL;
}

/* Texts, one behind the other. */
static json_t *join(const json_t *list)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str all = {0};

    if (!json_is_array(list))
        return NULL;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text)
            return NULL;
        ckpt_str_puts(&all, text);
    }
    return all.failed ? NULL : json_string(ckpt_str_get(&all));
}

/* The number as a floating type has it, whose name is given. */
static json_t *rounded(const json_t *number, const json_t *name)
{
    const double x = json_number_value(number);
    enum ckpt_dtype dtype;
    unsigned char bytes[8];
    double back;

    if (!json_is_number(number) || !json_is_string(name) ||
        !ckpt_dtype_parse(json_string_value(name), json_string_length(name), &dtype) ||
        !ckpt_dtype_is_castable(dtype))
        return NULL;
    ckpt_dtype_cast(bytes, dtype, &x, CKPT_F64, 1);
    ckpt_dtype_cast(&back, CKPT_F64, bytes, dtype, 1);
    return json_real(back);
}

/* A function of the values of its arguments, which may be unknown. */
static json_t *eval_function(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *a = eval(ev, e->args[0]);
    ckpt_cleanup(ckpt_json_decrefp) json_t *b = e->narg > 1 ? eval(ev, e->args[1]) : NULL;

    switch (e->call) {
    case CKPT_CALL_KNOWN:
        return json_boolean(a != NULL);
    case CKPT_CALL_LEN:
        return json_is_array(a) ? json_integer((json_int_t)json_array_size(a)) : NULL;
    case CKPT_CALL_JOIN:
        return join(a);
    case CKPT_CALL_CONTAINS: /* the case of letters is ignored, because names differ in it */
        if (!json_is_string(a) || !json_is_string(b))
            return NULL;
        return json_boolean(strcasestr(json_string_value(a), json_string_value(b)) != NULL);
    case CKPT_CALL_AT:
        if (!json_is_array(a) || !json_is_integer(b) || json_integer_value(b) < 0)
            return NULL;
        json_t *v = json_array_get(a, (size_t)json_integer_value(b));
        return v && !json_is_null(v) ? json_incref(v) : NULL;
    case CKPT_CALL_ROUNDED:
        return rounded(a, b);
    default:
        return to_number(e->call, a);
    }
}

static json_t *eval_call(struct eval *ev, const struct ckpt_expr *e)
{
    const struct ckpt_tensor *t;
    json_t *v = NULL;
    enum ckpt_truth c;

    switch (e->call) {
    case CKPT_CALL_SHAPE:
    case CKPT_CALL_PART:
        return eval_shape(ev, e);
    case CKPT_CALL_DTYPE:
        return (t = find_tensor(ev, e)) ? json_string(ckpt_dtype_torch_name(t->dtype)) : NULL;
    case CKPT_CALL_LAYERS:
        return eval_layers(ev, e);
    case CKPT_CALL_HAS:
        return ev->env->cat ? json_boolean(find_tensor(ev, e) != NULL) : NULL;
    case CKPT_CALL_DEFAULT:
        for (uint32_t i = 0; i < e->narg && !v; i++)
            v = eval(ev, e->args[i]);
        return v;
    case CKPT_CALL_IF:
        c = eval_truth(ev, e->args[0]);
        return c == CKPT_UNKNOWN ? NULL : eval(ev, e->args[c == CKPT_TRUE ? 1 : 2]);
    case CKPT_CALL_EACH:
    case CKPT_CALL_WHERE:
        return eval_list(ev, e);
    default:
        return eval_function(ev, e);
    }
}

static json_t *eval_negate(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = eval(ev, e->args[0]);

    if (json_is_integer(v) && json_integer_value(v) != INT64_MIN)
        return json_integer(-json_integer_value(v));
    return json_is_real(v) ? json_real(-json_real_value(v)) : NULL;
}

/* An object of the members that are known; unknown if none is. */
static json_t *eval_object(struct eval *ev, const struct ckpt_expr *e)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *out = json_object();

    for (uint32_t i = 0; out && i < e->narg; i++) {
        json_t *v = eval(ev, e->args[i]);
        if (v)
            ckpt_json_set(&out, e->key[i], v);
    }
    return json_object_size(out) > 0 ? ckpt_steal(&out) : NULL;
}

static json_t *eval(struct eval *ev, const struct ckpt_expr *e)
{
    enum ckpt_truth t;

    if (ev->fuel == 0)
        return NULL;
    ev->fuel--;
    switch (e->op) {
    case CKPT_OP_INT:
        return json_integer(e->i);
    case CKPT_OP_REAL:
        return json_real(e->r);
    case CKPT_OP_TEXT:
        return json_string(e->text);
    case CKPT_OP_TRUE:
        return json_true();
    case CKPT_OP_FALSE:
        return json_false();
    case CKPT_OP_NULL:
        return NULL;
    case CKPT_OP_KEY:
        return eval_key(ev, e->text);
    case CKPT_OP_OR:
    case CKPT_OP_AND:
        return eval_logic(ev, e);
    case CKPT_OP_NOT:
        t = eval_truth(ev, e->args[0]);
        return truth_value(t == CKPT_UNKNOWN ? t : t == CKPT_TRUE ? CKPT_FALSE : CKPT_TRUE);
    case CKPT_OP_NEGATE:
        return eval_negate(ev, e);
    case CKPT_OP_CALL:
        return eval_call(ev, e);
    case CKPT_OP_LITERAL: /* a copy, because other threads may count references to the literal */
        return json_deep_copy(e->literal);
    case CKPT_OP_OBJECT:
        return eval_object(ev, e);
    default:
        return eval_binary(ev, e);
    }
}

json_t *ckpt_expr_eval(const struct ckpt_expr *e, const struct ckpt_expr_env *env)
{
    struct eval ev = {.env = env, .fuel = FUEL};
    json_t *v = eval(&ev, e);

    json_decref(ev.layers_value);
    return v;
}

enum ckpt_truth ckpt_expr_truth(const struct ckpt_expr *e, const struct ckpt_expr_env *env)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *v = ckpt_expr_eval(e, env);

    return truth(v);
}
