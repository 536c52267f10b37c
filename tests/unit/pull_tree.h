/* SPDX-License-Identifier: Apache-2.0 */
/* Trees of JSON built by pulling values, to be compared with jansson's. */
#ifndef TEST_PULL_TREE_H
#define TEST_PULL_TREE_H

#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* The value as a tree, built by pulling; NULL: refused. An integer is read as such, any other
 * number by jansson. Two members of a name are for the caller to refuse, here too. */
static inline json_t *pull(struct ckpt_json_pull *p, bool *twice);

static json_t *pull_object(struct ckpt_json_pull *p, bool *twice)
{
    json_t *j = json_object();
    const char *key;
    (void)ckpt_json_pull_object(p);
    while ((key = ckpt_json_pull_member(p))) {
        *twice |= json_object_get(j, key) != NULL;
        (void)json_object_set_new(j, key, pull(p, twice));
    }
    return j;
}

static json_t *pull_number(struct ckpt_json_pull *p)
{
    const char *begin = p->at;
    uint64_t v;
    return ckpt_json_pull_u64(p, &v)
               ? json_integer((json_int_t)v)
               : json_loadb(begin, (size_t)(p->at - begin), JSON_DECODE_ANY, NULL);
}

static inline json_t *pull(struct ckpt_json_pull *p, bool *twice)
{
    const char c = ckpt_json_pull_peek(p);
    json_t *j;
    switch (c) {
    case '{':
        return pull_object(p, twice);
    case '[':
        j = json_array();
        (void)ckpt_json_pull_array(p);
        while (ckpt_json_pull_element(p))
            (void)json_array_append_new(j, pull(p, twice));
        return j;
    case '"':
        return json_string(ckpt_json_pull_string(p));
    case 't':
    case 'f':
    case 'n':
        ckpt_json_pull_skip(p);
        return c == 'n' ? json_null() : json_boolean(c == 't');
    default:
        return pull_number(p);
    }
}

/* skip: only look whether it is valid, and give NULL. */
static json_t *pull_tree(const char *text, size_t len, bool skip, struct ckpt_err *err)
{
    char *own = malloc(len + 1);
    struct ckpt_json_pull p;
    bool twice = false;
    json_t *j = NULL;

    memcpy(own, text, len);
    own[len] = '\0';
    ckpt_json_pull_init(&p, own, len, "text");
    if (skip)
        ckpt_json_pull_skip(&p);
    else
        j = pull(&p, &twice);
    if (ckpt_json_pull_end(&p, err) < 0 || twice) {
        json_decref(j);
        j = NULL;
    }
    free(own);
    return j;
}

#endif
