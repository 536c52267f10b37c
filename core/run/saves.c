/* SPDX-License-Identifier: Apache-2.0 */
/* A short list, searched from its beginning. */
#include "run/saves.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_KEPT = 32 };

static size_t index_of(const struct ckpt_saves *s, const char *step)
{
    size_t i = 0;

    while (i < s->kept.len && strcmp(s->kept.ptr[i].step, step) != 0)
        i++;
    return i;
}

static void drop(struct ckpt_saves *s, size_t i)
{
    free(s->kept.ptr[i].step);
    ckpt_save_unref(s->kept.ptr[i].save);
    s->kept.ptr[i] = s->kept.ptr[--s->kept.len];
}

struct ckpt_save *ckpt_saves_find(const struct ckpt_saves *s, const char *step)
{
    const size_t i = index_of(s, step);

    return i < s->kept.len ? ckpt_save_ref(s->kept.ptr[i].save) : NULL;
}

static void make_room(struct ckpt_saves *s)
{
    size_t oldest = 0;

    if (s->kept.len < MOST_KEPT)
        return;
    for (size_t i = 1; i < s->kept.len; i++)
        if (s->kept.ptr[i].used < s->kept.ptr[oldest].used)
            oldest = i;
    drop(s, oldest);
}

void ckpt_saves_keep(struct ckpt_saves *s, const char *step, struct ckpt_save *save, uint64_t tick)
{
    const size_t known = index_of(s, step);
    char *name = strdup(step);

    if (known < s->kept.len)
        drop(s, known);
    make_room(s);
    if (!name || ckpt_vec_reserve(&s->kept, 1) < 0) {
        free(name);
        return;
    }
    s->kept.ptr[s->kept.len].step = name;
    s->kept.ptr[s->kept.len].save = ckpt_save_ref(save);
    s->kept.ptr[s->kept.len++].used = tick;
}

void ckpt_saves_forget(struct ckpt_saves *s, const struct ckpt_steps_found *steps)
{
    for (size_t i = s->kept.len; i-- > 0;)
        if (!ckpt_steps_find(steps, s->kept.ptr[i].step))
            drop(s, i);
}

void ckpt_saves_release(struct ckpt_saves *s)
{
    while (s->kept.len)
        drop(s, s->kept.len - 1);
    ckpt_vec_release(&s->kept);
}
