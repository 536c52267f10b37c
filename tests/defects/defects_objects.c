/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a pickle whose values are asked for: small files that stand for much. */
#include "defects.h"

#include <stdlib.h>

#include "base/str.h"
#include "container/torch.h"
#include "container/torch_file.h"

static void put(struct ckpt_str *s, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ckpt_str_printf(s, "%c", bytes[i]);
}

#define PUT(s, literal) put(s, literal, sizeof(literal) - 1)

/* [[[...]]] */
static void deep(struct ckpt_str *s)
{
    for (int i = 0; i < 60; i++)
        PUT(s, "]");
    for (int i = 0; i < 59; i++)
        PUT(s, "a");
}

/* {"a": {"a": ...}} */
static void deep_dicts(struct ckpt_str *s)
{
    for (int i = 0; i < 60; i++)
        PUT(s, "}\x8c\1a");
    PUT(s, "K\1");
    for (int i = 0; i < 60; i++)
        PUT(s, "s");
}

/* Each list holds the one before ten times. */
static void laughs(struct ckpt_str *s)
{
    PUT(s, "]q\0");
    for (int i = 0; i < 20; i++) {
        PUT(s, "](");
        for (int k = 0; k < 10; k++)
            put(s, i ? "h\1" : "h\0", 2);
        PUT(s, "eq\1");
    }
}

/* The same in lists that might hold tensors somewhere. */
static void laughing_dicts(struct ckpt_str *s)
{
    PUT(s, "}\x8c\1x(");
    laughs(s);
    PUT(s, "ts");
}

/* One text of 64 KiB, five thousand times. */
static void texts(struct ckpt_str *s)
{
    PUT(s, "](X\0\0\1\0");
    for (int i = 0; i < 65536; i++)
        PUT(s, "y");
    PUT(s, "q\0");
    for (int i = 0; i < 5000; i++)
        PUT(s, "h\0");
    PUT(s, "e");
}

/* A list that holds itself. */
static void cycle(struct ckpt_str *s) { PUT(s, "]q\0h\0a"); }

static void sound(struct ckpt_str *s) { PUT(s, "]K\1a"); }

static const struct lie {
    const char *name;
    void (*make)(struct ckpt_str *s);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", sound, CKPT_OK, NULL},
    {"deep", deep, CKPT_LIMIT, "deeper than 48"},
    {"deep_dicts", deep_dicts, CKPT_LIMIT, "deeper than 48"},
    {"laughs", laughs, CKPT_LIMIT, "more than 4000000 values"},
    {"laughing_dicts", laughing_dicts, CKPT_LIMIT, "more than 4000000 values"},
    {"texts", texts, CKPT_LIMIT, "bytes of text"},
    {"cycle", cycle, CKPT_LIMIT, "deeper than 48"},
};

static int values(const struct ckpt_str *s, bool leaves, struct ckpt_err *err)
{
    struct ckpt_pickle p;
    json_t *j = leaves ? json_object() : NULL;
    int result = ckpt_pickle_parse(s->ptr, s->len, &ckpt_torch_rules, &p, err);

    if (result < 0) {
        json_decref(j);
        return -1;
    }
    result = leaves ? ckpt_pickle_leaves(&p, p.root, "", j, err)
                    : ckpt_pickle_value(&p, p.root, &j, err);
    json_decref(j);
    ckpt_pickle_release(&p);
    return result;
}

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < 2 * (sizeof lies / sizeof lies[0]); i++) {
        const struct lie *lie = &lies[i / 2];
        struct ckpt_str s = {0};
        struct ckpt_err err = {0};
        clock_t begin = clock();
        if (!wanted(&j, lie->name))
            continue;
        PUT(&s, "\x80\x04");
        lie->make(&s);
        PUT(&s, ".");
        judge(&j, lie->name, values(&s, i % 2, &err), &err, lie->code, NULL, lie->needle, begin);
        ckpt_str_release(&s);
    }
    return verdict(&j);
}
