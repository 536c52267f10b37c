/* SPDX-License-Identifier: Apache-2.0 */
/* A short list, oldest first. */
#include "mount/silence.h"

#include <string.h>

#include "base/clock.h"

void ckptfs_silences_init(struct ckptfs_silences *s)
{
    atomic_init(&s->n, 0);
    (void)pthread_mutex_init(&s->lock, NULL);
}

void ckptfs_silences_release(struct ckptfs_silences *s) { (void)pthread_mutex_destroy(&s->lock); }

/* The place of a file, or n. With the lock held. */
static size_t find(const struct ckptfs_silences *s, uint64_t file)
{
    size_t i = 0;

    while (i < s->n && s->of[i].file != file)
        i++;
    return i;
}

static void drop(struct ckptfs_silences *s, size_t i)
{
    s->n--;
    memmove(&s->of[i], &s->of[i + 1], (s->n - i) * sizeof *s->of);
}

bool ckptfs_silence_begins(struct ckptfs_silences *s, uint64_t file, uint64_t since_ms)
{
    (void)pthread_mutex_lock(&s->lock);
    const bool is_new = find(s, file) == s->n;
    if (is_new && s->n == CKPTFS_SILENT_MOST)
        drop(s, 0);
    if (is_new)
        s->of[s->n++] = (struct ckptfs_silent){file, since_ms};
    (void)pthread_mutex_unlock(&s->lock);
    return is_new;
}

bool ckptfs_silence_ends(struct ckptfs_silences *s, uint64_t file, uint64_t *ret_ms)
{
    if (atomic_load(&s->n) == 0) /* as nearly always */
        return false;
    (void)pthread_mutex_lock(&s->lock);
    const size_t i = find(s, file);
    const bool was = i < s->n;
    if (was) {
        *ret_ms = ckpt_now_ms() - s->of[i].since_ms;
        drop(s, i);
    }
    (void)pthread_mutex_unlock(&s->lock);
    return was;
}
