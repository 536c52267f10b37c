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
    memmove(&s->kept.ptr[i], &s->kept.ptr[i + 1], (--s->kept.len - i) * sizeof *s->kept.ptr);
}

struct ckpt_save *ckpt_saves_find(const struct ckpt_saves *s, const char *step)
{
    const size_t i = index_of(s, step);

    return i < s->kept.len ? ckpt_save_ref(s->kept.ptr[i].save) : NULL;
}

void ckpt_saves_keep(struct ckpt_saves *s, const char *step, struct ckpt_save *save)
{
    const size_t known = index_of(s, step);
    char *name = strdup(step);

    if (known < s->kept.len)
        drop(s, known);
    if (s->kept.len == MOST_KEPT)
        drop(s, 0);
    if (!name || ckpt_vec_reserve(&s->kept, 1) < 0) {
        free(name);
        return;
    }
    s->kept.ptr[s->kept.len++] = (struct ckpt_kept_save){name, ckpt_save_ref(save)};
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
