/* SPDX-License-Identifier: Apache-2.0 */
/* Which steps an average is made of. */
#include "run/average.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/take.h"

void ckpt_average_release(struct ckpt_average *a)
{
    for (size_t i = 0; i < a->n; i++)
        free(a->step[i]);
    free(a->step);
    *a = (struct ckpt_average){0};
}

static int add(struct ckpt_average *a, const char *name, struct ckpt_err *err)
{
    char *own = strdup(name);
    char **more = realloc(a->step, (a->n + 1) * sizeof *more);

    if (more)
        a->step = more;
    if (!own || !more) {
        free(own);
        return ckpt_nomem(err);
    }
    a->step[a->n++] = own;
    return 0;
}

static int choose_last(uint64_t k, const struct ckpt_steps_found *steps, struct ckpt_average *ret,
                       struct ckpt_err *err)
{
    if (k == 0)
        return ckpt_fail(err, CKPT_USAGE, "last:0 is no step");
    if (k > steps->len)
        return ckpt_fail(err, CKPT_MISSING,
                         "last:%" PRIu64 ": the run has only %zu finished step%s", k, steps->len,
                         steps->len == 1 ? "" : "s");
    for (size_t i = steps->len - (size_t)k; i < steps->len; i++)
        if (add(ret, steps->ptr[i].name, err) < 0)
            return -1;
    return 0;
}

/* Take a name from the text, up to a '+' that is not written "\+". */
static void take_name(const char **text, struct ckpt_str *name)
{
    const char *s = *text;

    ckpt_str_clear(name);
    for (; *s && *s != '+'; s++) {
        s += s[0] == '\\' && s[1] == '+';
        ckpt_str_append(name, s, 1);
    }
    *text = s + (*s == '+');
}

/* Mark the step that the name means. */
static int mark(const struct ckpt_steps_found *steps, const char *name, bool *marked,
                struct ckpt_err *err)
{
    const char *step = ckpt_steps_behind(steps, name);
    const struct ckpt_found_step *found = step ? ckpt_steps_find(steps, step) : NULL;

    if (!found)
        return ckpt_fail(err, CKPT_MISSING,
                         "the run has no finished step '%.200s' (ckpt info lists them)", name);
    if (marked[found - steps->ptr])
        return ckpt_fail(err, CKPT_CONFLICT, "step '%s' is named twice", found->name);
    marked[found - steps->ptr] = true;
    return 0;
}

static int choose_named(const char *text, const struct ckpt_steps_found *steps,
                        struct ckpt_average *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str name = {0};
    ckpt_cleanup(ckpt_freep) bool *marked = calloc(steps->len + 1, sizeof *marked);

    if (!marked)
        return ckpt_nomem(err);
    do {
        take_name(&text, &name);
        if (name.failed)
            return ckpt_nomem(err);
        if (!name.len)
            return ckpt_fail(err, CKPT_USAGE,
                             "a step's name is empty: expected STEP+STEP+... or "
                             "last:K");
        if (mark(steps, ckpt_str_get(&name), marked, err) < 0)
            return -1;
    } while (*text);
    for (size_t i = 0; i < steps->len; i++)
        if (marked[i] && add(ret, steps->ptr[i].name, err) < 0)
            return -1;
    return 0;
}

int ckpt_average_choose(const char *text, const struct ckpt_steps_found *steps,
                        struct ckpt_average *ret, struct ckpt_err *err)
{
    const char *s = text;
    uint64_t k;

    if (ckpt_take_text(&s, "last:") && ckpt_take_u64(&s, &k) && !*s)
        return choose_last(k, steps, ret, err);
    return choose_named(text, steps, ret, err);
}

int ckpt_average_step(const struct ckpt_average *a, const struct ckpt_steps_found *steps,
                      struct ckpt_steps_found *ret, struct ckpt_err *err)
{
    struct ckpt_found_step mean = {0};

    *ret = (struct ckpt_steps_found){0};
    for (size_t i = 0; i < a->n; i++) {
        const struct ckpt_found_step *s = ckpt_steps_find(steps, a->step[i]);
        if (!s)
            return 0;
        mean.generation =
            XXH3_64bits_withSeed(&s->generation, sizeof s->generation, mean.generation);
        mean.mtime_ns = s->mtime_ns > mean.mtime_ns ? s->mtime_ns : mean.mtime_ns;
        mean.is_training |= s->is_training;
    }
    mean.name = strdup("");
    ret->latest = strdup("");
    ret->ptr = calloc(1, sizeof *ret->ptr);
    if (!mean.name || !ret->latest || !ret->ptr) {
        free(mean.name);
        ckpt_steps_found_release(ret);
        return ckpt_nomem(err);
    }
    ret->ptr[0] = mean;
    ret->len = ret->cap = 1;
    return 0;
}
