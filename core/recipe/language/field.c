/* SPDX-License-Identifier: Apache-2.0 */
/* Typed look-ups in the JSON of recipe files. */
#include "recipe/language/field.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

char *ckpt_field_text(struct ckpt_arena *arena, struct ckpt_err *err, const char *fmt, ...)
{
    va_list ap, again;

    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *s = n < 0 ? NULL : ckpt_arena_alloc(arena, (size_t)n + 1);
    if (s)
        (void)vsnprintf(s, (size_t)n + 1, fmt, again);
    else
        (void)ckpt_nomem(err);
    va_end(again);
    return s;
}

int ckpt_field_object(const json_t *j, const char *where, const char *const *known,
                      struct ckpt_err *err)
{
    const char *key;
    json_t *v;

    if (!json_is_object(j))
        return ckpt_fail(err, CKPT_FORMAT, "%s: an object is expected here", where);
    json_object_foreach((json_t *)j, key, v) {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0)
            i++;
        if (!known[i])
            return ckpt_fail(err, CKPT_FORMAT, "%s: unknown key '%.100s'", where, key);
    }
    return 0;
}

bool ckpt_texts_have(const struct ckpt_texts *w, const char *word, size_t len)
{
    for (size_t i = 0; i < w->n; i++)
        if (strlen(w->text[i]) == len && memcmp(w->text[i], word, len) == 0)
            return true;
    return false;
}

int ckpt_field_strings(struct ckpt_arena *arena, const json_t *obj, const char *key,
                       const char *where, struct ckpt_texts *ret, struct ckpt_err *err)
{
    const json_t *j = key ? json_object_get(obj, key) : obj;
    size_t n = !j ? 0 : json_is_array(j) ? json_array_size(j) : 1;
    const char **list = ckpt_arena_alloc(arena, (n + 1) * sizeof *list);

    if (!list)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(j) ? json_array_get(j, i) : j;
        if (!json_is_string(v))
            return ckpt_fail(err, CKPT_FORMAT, "%s: a string or a list of strings is expected here",
                             where);
        list[i] = ckpt_arena_strdup(arena, json_string_value(v));
        if (!list[i])
            return ckpt_nomem(err);
    }
    *ret = (struct ckpt_texts){list, n};
    return 0;
}

int ckpt_field_string(struct ckpt_arena *arena, const json_t *obj, const char *key,
                      const char *where, const char **ret, struct ckpt_err *err)
{
    const json_t *v = json_object_get(obj, key);

    *ret = NULL;
    if (!v)
        return 0;
    if (!json_is_string(v))
        return ckpt_fail(err, CKPT_FORMAT, "%s: '%s' must be a string", where, key);
    *ret = ckpt_arena_strdup(arena, json_string_value(v));
    return *ret ? 0 : ckpt_nomem(err);
}

bool ckpt_field_lists(const json_t *list, const char *word)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s && strcmp(s, word) == 0)
            return true;
    }
    return false;
}
